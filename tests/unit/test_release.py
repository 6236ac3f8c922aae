"""What a release needs: one version in all files, a short changelog, deprecations as documented, and its command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import ds_hetero
from ds_hetero.values.deprecated_keys import DEPRECATED_KEYS, deprecation_lines
from ds_hetero.values.section import HeterogeneitySection
from tests import coverage_table, release
from tests.support import ROOT


def _notes() -> dict[str, str]:
    """The notes of every heading of CHANGELOG.md."""
    parts = re.split(r"^## (.*)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_version_is_the_newest_of_the_changelog_and_that_of_the_citation() -> None:
    problems = [problem for problem in release.problems_of_tree() if "[Unreleased]" not in problem]
    assert problems == []
    assert release.version_of_package() == ds_hetero.__version__


def test_notes_of_a_release_take_at_most_60_lines() -> None:
    notes = _notes()
    assert next(iter(notes)) == "[Unreleased]"
    released = {heading: text for heading, text in notes.items() if heading != "[Unreleased]"}
    assert {heading: text.count("\n") for heading, text in released.items() if text.count("\n") > 60} == {}


def test_a_tree_that_is_not_ready_is_told_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "ds_hetero").mkdir()
    (tmp_path / "ds_hetero" / "__init__.py").write_text('__version__ = "9.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A line.\n\n## [9.0.0] - 2026-01-01\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 9.0.0\n")
    assert [problem.partition(":")[0] for problem in release.problems_of_tree(tmp_path)] == [
        "CHANGELOG.md",
        "CHANGELOG.md",
        "CITATION.cff",
    ]


def test_an_interpreter_that_does_not_run_or_is_another_is_missing(tmp_path: Path) -> None:
    own = "{}.{}".format(*sys.version_info)
    broken = tmp_path / "python3.10"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    found, missing = release.find_pythons([own, "3.99"], {"3.99": str(broken)})
    assert [python.version for python in found] == [own] and missing == ["3.99"]
    assert release.find_pythons(["3.99"], {"3.99": sys.executable}) == ([], ["3.99"])


def test_the_release_is_tried_on_every_python_that_is_admitted() -> None:
    setup = (ROOT / "setup.cfg").read_text()
    lowest, above = (int(minor) for minor in re.findall(r"python_requires = >=3\.(\d+),<3\.(\d+)", setup)[0])
    assert release.supported_versions() == [f"3.{minor}" for minor in range(lowest, above)]


def test_addresses_of_the_project_are_in_one_file() -> None:
    assert {"Source", "Issues", "Security"} <= set(release.unfilled_urls()) or release.unfilled_urls() == []
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.cff"),
        *(ROOT / ".github").rglob("*.yml"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    assert [page.name for page in pages if release.PLACEHOLDER in page.read_text()] == []


@pytest.mark.parametrize("form", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda form: form.stem)
def test_an_issue_form_can_be_read(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    fields = content.get("body", [])
    assert all(field["type"] == "markdown" or field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields if "id" in field]
    assert len(ids) == len(set(ids))


def test_the_citation_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)


# --- deprecations ---------------------------------------------------------------------------------------


def test_deprecated_keys_are_those_of_the_page_and_say_so() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    rows = re.findall(r"^\| `\"(\w+)\"` in the section \| `(.*)` \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert rows == [tuple(key) for key in DEPRECATED_KEYS]
    (line,) = deprecation_lines(HeterogeneitySection.model_validate({"verify": "always"}))
    assert '"heterogeneity.verify" is deprecated since 0.3.0' in line and '"checks": {"compare_every": ...}' in line
    assert deprecation_lines(HeterogeneitySection()) == []


def test_a_deprecated_key_is_gone_in_time() -> None:
    late = [key.name for key in DEPRECATED_KEYS if Version(key.gone_in) <= Version(ds_hetero.__version__)]
    assert late == [], "remove these keys, with an error that names the new ones"


# --- coverage -------------------------------------------------------------------------------------------


def test_coverage_is_counted_by_room() -> None:
    def file(covered: int, lines: int) -> dict[str, dict[str, int]]:
        return {"summary": {"covered_lines": covered, "num_statements": lines}}

    files = {
        "ds_hetero/run.py": file(1, 2),
        "ds_hetero/planner/a.py": file(9, 10),
        "ds_hetero/planner/search/b.py": file(0, 10),
    }
    rooms = coverage_table.lines_by_room({"files": files})
    assert rooms == {"ds_hetero": (1, 2), "planner": (9, 20)}
    assert coverage_table.table_of(rooms).splitlines()[-1] == "| all | 22 | 45 % |"
    page = "<!-- coverage -->\nold\n<!-- end of coverage -->\n"
    assert "| planner | 20 | 45 % |" in coverage_table.with_table(page, rooms)
    assert "alone: `tests/unit`, `tests/dist`.\n\n| room" in coverage_table.with_table(page, rooms)
    assert coverage_table.percent_of_all(rooms) == 45


def test_a_page_has_the_place_of_the_coverage() -> None:
    assert "| cli | 3 | 33 % |" in coverage_table.with_table(coverage_table.PAGE.read_text(), {"cli": (1, 3)})


def test_times_of_a_search_do_not_make_plans_differ() -> None:
    plan = {"search_s": 1.0, "plan": [{"search_s": 2.0, "tokens": 3}]}
    assert json.dumps(release._without_times(plan)) == '{"plan": [{"tokens": 3}]}'
