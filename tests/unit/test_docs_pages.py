"""README.md and docs/ say what the code says: keys, names, words, files, tests and the table of what works."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest

import ds_hetero
from ds_hetero.cli.app import COMMANDS
from ds_hetero.values.section import (
    ChecksSection,
    ElasticSection,
    HeterogeneitySection,
    PlacementSection,
    ReplanSection,
)
from tests import matrix
from tests.beside import __main__ as beside
from tests.beside.frameworks import FRAMEWORKS
from tests.decision_pages import PAGES as DECISION_PAGES
from tests.markdown import PAGES
from tests.support import ROOT
from tests.support_matrix import PAGES as SUPPORT_PAGES
from tests.support_matrix import STATUS, TABLES, with_tables

DOCS = ROOT / "docs"
MAX_WORDS = 1500
MAX_CELL = 100  # characters
# Reference pages, where one looks up a row.
LOOKED_UP = {
    "adapters.md",
    "architectures.md",
    "cli.md",
    "configuration.md",
    "deepspeed-keys.md",
    "forward-arguments.md",
}
ROWS = [row for rows in TABLES.values() for row in rows]


def _table(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = (DOCS / page).read_text().partition(f"{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, f"docs/{page} has no table below {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[0].splitlines()[2:]]


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    pages = (tmp_path / "site").rglob("*.html")
    assert not [page for page in pages if re.search(r"(src|href)=\"https?://[^\"]*\.(js|css|woff2?)", page.read_text())]


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    assert len(text.encode()) <= 8000


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_cells_of_tables_are_short(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"^ *\|.*$", text, re.MULTILINE):
        for cell in line.strip(" |").split(" | "):
            visible = re.sub(r"\]\([^)]*\)", "]", cell)
            assert len(visible) <= MAX_CELL, f"cut the table into a list: {visible}"


def test_no_page_of_the_manual_is_longer_than_a_reader_takes_at_once():
    lengths = {path.name: len(path.read_text().split()) for path in DOCS.glob("*.md") if path.name not in LOOKED_UP}
    assert {name: words for name, words in lengths.items() if words > MAX_WORDS} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_named_on_a_page_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:tests|examples|benchmarks|ds_hetero|ds_configs|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for module in re.findall(r"python -m ((?:benchmarks|ds_hetero|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} runs {module}"


def test_every_key_of_the_section_is_documented_with_its_default():
    rows = {key.strip("`"): default for key, _, default in _table("configuration.md", "## Keys")}
    fields = dict(HeterogeneitySection.model_fields)
    for outer, section in (
        ("placement", PlacementSection),
        ("replan", ReplanSection),
        ("elastic", ElasticSection),
        ("checks", ChecksSection),
    ):
        fields |= {f"{outer}.{name}": field for name, field in section.model_fields.items()}
    assert list(rows) == [
        name for key in HeterogeneitySection.model_fields for name in fields if name.split(".")[0] == key
    ]
    for name, default in rows.items():
        value = fields[name].default
        if isinstance(value, bool | int | float | str):
            assert default == f"`{json.dumps(value)}`", name


def test_the_api_page_lists_the_public_names():
    directives = re.findall(r"^::: ([\w.]+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    documented = {directive.rpartition(".")[2] for directive in directives}
    assert documented == {name for name in ds_hetero.__all__ if not name.startswith("__")}


def test_every_command_is_explained():
    headings = re.findall(r"^## ([a-z-]+)$", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


def test_every_error_is_explained():
    named = {error.strip("`") for error, _ in _table("failures.md", "## Messages")}
    assert named == {name for name in ds_hetero.__all__ if name.endswith("Error")} - {"HeteroError"}


def test_a_word_of_the_glossary_has_one_meaning():
    words = [word for word, _ in _table("glossary.md", "# Glossary")]
    assert words == sorted(set(words), key=str.lower)


@pytest.mark.parametrize("page", SUPPORT_PAGES, ids=lambda page: page.stem)
def test_the_table_of_what_works_is_that_of_the_tests(page):
    assert page.read_text() == with_tables(page), "run python -m tests.support_matrix"


@pytest.mark.parametrize("page", DECISION_PAGES, ids=lambda page: f"{page.name}s")
def test_a_page_of_decisions_holds_the_table_that_decides(page):
    assert page.path.read_text() == page.with_tables(), "run python -m tests.decision_pages"


def test_the_table_of_releases_is_that_of_the_results():
    text = matrix.PAGE.read_text()
    assert text == matrix.with_table(text, matrix.read_results()), "run .ci/matrix --write"
    assert not [name for name, result in matrix.read_results().items() if result["failed"]]


def test_frameworks_train_beside_this_one_as_on_one_process():
    text, results = beside.PAGE.read_text(), beside.read_results()
    assert text == beside.with_table(text, results), "run .ci/frameworks --write"
    for name, result in results.items():
        assert beside.largest_difference(result) <= beside.TOLERANCE
        assert result["installs"] == list(FRAMEWORKS[name].installs), f"run .ci/frameworks {name}"
    for framework in FRAMEWORKS.values():
        for packages in framework.installs:
            assert f"`pip install {packages}`" in text
        assert f"`{framework.module} " in text


def test_tests_of_the_matrix_exist():
    for test in matrix.SUITE:
        path, function = test.partition("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), test


def test_a_row_of_what_works_has_a_status_and_a_test_where_it_is_tested():
    assert {row.status for row in ROWS} <= set(STATUS)
    for row in ROWS:
        assert (row.status != "tested") or row.tests, f"{row.what!r} names no test"


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_that_the_table_names_exists(test):
    file, _, name = test.partition("::")
    assert name in {
        node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_tested_model_is_in_the_table():
    from tests.integration.models.test_models import MODELS, REFUSED
    from tests.integration.models.test_self_check import SILENTLY_WRONG

    listed = [case for row in ROWS for case in row.cases]
    assert sorted(listed) == sorted([*MODELS, *REFUSED, *SILENTLY_WRONG])
