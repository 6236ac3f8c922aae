"""The site explains a term where it first stands on a page: the hook links it to its row of the glossary."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.support import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("glossary_hook", ROOT / ".ci" / "glossary.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_linked_term_has_a_row(hook):
    assert set(hook.TERMS) <= set(hook.meanings())


def test_the_first_use_in_running_text_is_linked(hook):
    text = "# A replica\n\n`replica` and [replica](x.md).\n\nReplicas have ranks. A replica is here.\n"
    linked = hook.with_links(text, "evidence/page.md")
    assert linked.count("#term-replica") == 1
    assert '[Replicas](../glossary.md#term-replica "a pipeline of one stage' in linked
    assert linked.startswith("# A replica\n\n`replica` and [replica](x.md).")


def test_the_rank_of_an_adapter_and_lanes_of_a_slot_are_not_terms(hook):
    text = "An adapter of rank 16, LoRA of rank 8; a slot with eight lanes, or 16 lanes.\n"
    assert hook.with_links(text, "page.md") == text
    assert "#term-lane" in hook.with_links("A batch has two lanes.\n", "page.md")


def test_code_and_tables_stay_as_they_are(hook):
    text = "```bash\nrun the schedule\n```\n\n| schedule | rank |\n|---|---|\n| a | b |\n"
    assert hook.with_links(text, "page.md") == text


@pytest.mark.parametrize("page", sorted(set(DOCS.rglob("*.md")) - {DOCS / "api.md"}), ids=lambda page: page.name)
def test_every_page_links_every_term_at_most_once(hook, page):
    source = page.relative_to(DOCS).as_posix()
    linked = hook.with_links(page.read_text(), source)
    anchors = re.findall(r"glossary\.md#(term-[\w-]+)", linked)
    assert len(anchors) == len(set(anchors))
    term_link = re.compile(r'\[([^\]]+)\]\([./]*glossary\.md#term-[\w-]+ "[^"]*"\)\{ \.term \}')
    plain = term_link.sub(r"\1", linked)
    assert plain == page.read_text()
