"""Pages of papers: every figure of the quick mode has a table, names its assumptions, and stands on its page."""

import json
import re

import pytest
from rich.console import Console

from benchmarks.reproduce import hexiseq, hexiseq_paper
from benchmarks.reproduce.__main__ import PAPERS, _paper, _write_page, main
from benchmarks.reproduce.figures import figure as figures
from tests.support import ROOT

DOCS = ROOT / "docs"


def _pages(tmp_path, *papers):
    """Return the exit code, the text of the pages, and the numbers."""
    pages, output = tmp_path / "evidence", tmp_path / "papers.json"
    code = main(["all", "--quick", "--only", *papers, "--pages", str(pages), "--output", str(output)])
    text = "".join(path.read_text() for path in sorted(pages.iterdir()))
    return code, text, json.loads(output.read_text())["papers"]


def _check(tmp_path, papers):
    code, text, made = _pages(tmp_path, *papers)
    assert code == 0
    for paper in made.values():
        assert f"# {paper['name']}, figure by figure" in text
        for figure in paper["figures"]:
            assert f"## {figure['name']}: {figure['title']}" in text
            assert figure["title"] and figure["decides"] and figure["rows"]
            assert all(len(row) == len(figure["columns"]) for row in figure["rows"])
        for name, why in paper["left_out"].items():
            assert f"* **{name}.** {why}" in text
    pictures = list((tmp_path / "images" / "papers").glob("*.png"))
    assert len(pictures) == sum(bool(figure["lines"]) for paper in made.values() for figure in paper["figures"])


def test_quick_figures_that_take_seconds(tmp_path):
    _check(tmp_path, ["hetero-ring", "zeppelin"])


@pytest.mark.slow
def test_all_other_quick_figures(tmp_path):
    _check(tmp_path, [paper for paper in PAPERS if paper not in ("hetero-ring", "zeppelin")])


def test_a_figure_that_fails_is_named_and_the_others_are_made(tmp_path, monkeypatch):
    def broken(quick):
        raise ArithmeticError("no such number")

    good = figures.Figure(
        name="Table 1", title="numbers", shows="Numbers.", columns=("a",), rows=[("1",)], decides="nothing."
    )
    paper = figures.Paper(
        key="hexiseq", name="A paper", title="A paper", makers={"Figure 9": broken, "Table 1": lambda quick: good}
    )
    monkeypatch.setattr("benchmarks.reproduce.__main__._paper", lambda key: paper)
    code, text, made = _pages(tmp_path, "hexiseq")
    assert code == 1
    assert "Could not be made: ArithmeticError: no such number" in text
    assert "| 1 |" in text
    assert [figure["name"] for figure in made["hexiseq"]["figures"]] == ["Figure 9", "Table 1"]
    before = made["hexiseq"]["figures"][0]
    code, _, made = _pages(tmp_path, "hexiseq", "--figures", "Table 1")
    assert code == 1 and made["hexiseq"]["figures"][0] == before  # with the CPU seconds that it took


def test_the_network_that_fits_the_measured_rows_of_uniform_schedules(monkeypatch):
    """Neither constant is at an end of its choice, and without them the error is twice as large."""
    rows = [row for row in hexiseq_paper.TABLE_3 if row.method != "hexiseq"]
    monkeypatch.setattr(hexiseq_paper, "TABLE_3", rows)
    fit = hexiseq.network_fit()
    assert (fit["gb_per_s"], fit["share"]) == (30, 0.5)
    assert 2 * fit["rms_log_error"] < fit["before"]
    assert len(fit["rows"]) == len(rows) == 6


def _decimals(text):
    return re.findall(r"\d+\.\d+", text)


def test_every_number_of_the_summary_stands_on_the_page_of_its_paper():
    rows = [line for line in (DOCS / "papers.md").read_text().splitlines() if "](evidence/papers-" in line]
    assert len(rows) >= 10
    for row in rows:
        page = (DOCS / re.search(r"evidence/papers-[\w-]+\.md", row)[0]).read_text()
        assert all(number in page for number in _decimals(row)), row


@pytest.mark.parametrize("key", PAPERS)
def test_every_number_of_a_page_s_result_stands_in_its_figures(key):
    page = (DOCS / "evidence" / f"papers-{key}.md").read_text()
    result, _, figures_part = page.partition("\n## ")
    numbers = _decimals(result.partition("```\n\n")[2])
    assert numbers and all(number in figures_part for number in numbers)


@pytest.mark.parametrize("key", PAPERS)
def test_a_page_is_made_of_the_result_file_and_of_today_s_texts(key, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.reproduce.__main__.draw", lambda figure, path: None)
    made = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text())["papers"][key]
    paper = _paper(key)
    assert (made["result"], made["setup"]) == (paper.result, paper.setup)
    _write_page(key, made, tmp_path, Console(quiet=True))
    page = f"papers-{key}.md"
    assert (tmp_path / page).read_text() == (DOCS / "evidence" / page).read_text(), "python -m benchmarks.reproduce all"
