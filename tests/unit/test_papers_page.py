"""The page of the papers: every figure of the quick mode has a table, says what decides, and is on the page."""

import json

import pytest

from benchmarks.reproduce import hexiseq, hexiseq_paper
from benchmarks.reproduce.__main__ import PAPERS, main
from benchmarks.reproduce.figures import figure as figures


def _page(tmp_path, *papers):
    page, output = tmp_path / "papers.md", tmp_path / "papers.json"
    code = main(["all", "--quick", "--only", *papers, "--page", str(page), "--output", str(output)])
    return code, page.read_text(), json.loads(output.read_text())["papers"]


def _check(tmp_path, papers):
    code, text, made = _page(tmp_path, *papers)
    assert code == 0
    for paper in made.values():
        assert f"## {paper['title']}" in text
        for figure in paper["figures"]:
            assert f"### {figure['name']}" in text
            assert figure["decides"] and figure["rows"]
            assert all(len(row) == len(figure["columns"]) for row in figure["rows"])
        for name, why in paper["left_out"].items():
            assert f"| {name} | {why} |" in text
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

    good = figures.Figure(name="Table 1", shows="Numbers.", columns=("a",), rows=[("1",)], decides="nothing.")
    paper = figures.Paper(key="hexiseq", title="A paper", makers={"Figure 9": broken, "Table 1": lambda quick: good})
    monkeypatch.setattr("benchmarks.reproduce.__main__._paper", lambda key: paper)
    code, text, made = _page(tmp_path, "hexiseq")
    assert code == 1
    assert "Could not be made: ArithmeticError: no such number" in text
    assert "| 1 |" in text
    assert [figure["name"] for figure in made["hexiseq"]["figures"]] == ["Figure 9", "Table 1"]
    before = made["hexiseq"]["figures"][0]
    code, _, made = _page(tmp_path, "hexiseq", "--figures", "Table 1")
    assert code == 1 and made["hexiseq"]["figures"][0] == before  # with the CPU seconds that it took


def test_the_network_that_fits_the_measured_rows_of_uniform_schedules(monkeypatch):
    """Neither constant is at an end of its choice, and without them the error is twice as large."""
    rows = [row for row in hexiseq_paper.TABLE_3 if row.method != "hexiseq"]
    monkeypatch.setattr(hexiseq_paper, "TABLE_3", rows)
    fit = hexiseq.network_fit()
    assert (fit["gb_per_s"], fit["share"]) == (30, 0.5)
    assert 2 * fit["rms_log_error"] < fit["before"]
    assert len(fit["rows"]) == len(rows) == 6
