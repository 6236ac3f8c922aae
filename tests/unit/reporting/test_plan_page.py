"""The page in a real Chromium: every section, no complaint in its console, and sliders that say what simulate says.

Budget: 20 s.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hetero.cluster import cluster_to_dict
from ds_hetero.cluster.topology import Link
from ds_hetero.reporting.grid import points_of
from ds_hetero.reporting.html import Page, html_table
from ds_hetero.reporting.run_file import write_run
from ds_hetero.reporting.shared_sections import MAX_DRAWN_LINKS, _machine_links
from tests.reported import SEQ_LEN, TWO_MACHINES, command, described, plan_file, run_of

SECTIONS = [
    "In short",
    "Ranks and links",
    "Who does what",
    "A block",
    "A step",
    "Other plans, and why they lose",
    "Other kinds of jobs",
    "What if?",
    "The run",
    "Run it",
    "The plan file",
]
MOST_BYTES = 1_500_000


def test_links_between_many_machines_are_looked_at_as_far_as_they_are_drawn() -> None:
    looked_at: list[tuple[int, int]] = []

    class LinkClass:
        def __getitem__(self, pair: tuple[int, int]) -> int:
            looked_at.append(pair)
            return 0

    link = Link(name="network", bytes_per_s=25e9, latency_s=1e-5)
    cluster: Any = SimpleNamespace(link_class=LinkClass(), link_classes=(link,))
    lines = _machine_links(cluster, {machine: 8 * machine for machine in range(512)})
    assert len(lines) == len(looked_at) == MAX_DRAWN_LINKS
    assert lines[0] == ["r0", "r8", "25 GB/s", False]


def test_a_run_says_which_ranks_went_and_came(capsys: Any, tmp_path: Path) -> None:
    path = plan_file(capsys, tmp_path)
    run = run_of(described(path), tmp_path / "run.json")
    event = {"kind": "resume", "time": 1.764e9, "ranks": "4 -> 3", "step": 14, "gone": ["slow-1-0"]}
    write_run(replace(run, events=(event,)), tmp_path / "run.json")
    out = tmp_path / "page.html"
    assert command(capsys, "report", path, "--run", tmp_path / "run.json", "--out", out)[0] == 0
    page = out.read_text(encoding="utf-8")
    assert "2025-11-24 16:00:00" in page and "ranks 4 -&gt; 3, step 14, gone [&#x27;slow-1-0&#x27;]" in page


def _open(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
    """A page, and what its console complains about."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else complaints.append(request.url))
    page.goto(path.as_uri())
    return page, complaints


def _report(capsys: Any, folder: Path, *options: object, run: bool = True, **plan: Any) -> Path:
    """The page of a plan of four cards, and of a run of it."""
    path = plan_file(capsys, folder, *options, **plan)
    if run:
        run_of(described(path), folder / "run.json")
    out = folder / "plan.html"
    of_run = ("--run", folder / "run.json") if run else ()
    code, said, err = command(capsys, "report", path, *of_run, "--out", out)
    assert (code, said) == (0, f"written to {out}\n"), err
    return out


def test_every_section_is_there_and_nothing_complains(browser, capsys, tmp_path):
    out = _report(capsys, tmp_path)
    assert out.stat().st_size <= MOST_BYTES
    for width, scheme in ((1280, "light"), (390, "dark")):
        page, complaints = _open(browser, out, width, scheme)
        assert page.locator("h2").all_inner_texts() == SECTIONS
        assert page.locator(".chart svg").count() == page.locator(".chart").count() == 8
        assert page.locator(".chart[aria-label]").count() == 8  # and a table below each
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
        _expect_bars_inside_the_memory_of_the_card(page)
        text = page.inner_text("main")
        assert "rank 0 predicted" in text and "rank 0 measured" in text and "prediction -9.1%" in text
        assert "slower" in text and "does not fit" not in text
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
        assert complaints == []
        page.close()


def _expect_bars_inside_the_memory_of_the_card(page: Any) -> None:
    """Every part of a rank's memory is drawn inside the grey bar of what the card has."""
    rows = page.evaluate(
        """() => {
            const charts = [...document.querySelectorAll(".chart")].map((place) => echarts.getInstanceByDom(place));
            const all = charts.map((chart) => chart.getModel().getSeries());
            const memory = all.find((series) => series.some((one) => one.name === "the card"));
            const bars = (one) => [0, 1, 2, 3].map((row) => one.getData().getItemLayout(row));
            return memory.filter((one) => one.name !== "measured").map((one) => [one.name, bars(one)]);
        }"""
    )
    (cards,) = (bars for name, bars in rows if name == "the card")
    parts = [(name, bars) for name, bars in rows if name != "the card"]
    assert len(cards) == 4 and parts
    for name, bars in parts:
        for card, part in zip(cards, bars, strict=True):
            assert card["y"] <= part["y"], name
            assert part["y"] + part["height"] <= card["y"] + card["height"], name
            assert part["x"] + part["width"] <= card["x"] + card["width"] + 0.5, name


def test_sliders_say_what_simulate_says(browser, capsys, tmp_path):
    """At 20 points, by the keyboard, to 1e-9."""
    out = _report(capsys, tmp_path, run=False)
    plan = described(tmp_path / "plan.json")
    points = list(points_of(plan))
    page, complaints = _open(browser, out)
    grid = json.loads(page.locator("#data").text_content())["grid"]
    assert len(points) == len(grid["points"]) == 5 * 5 * 3
    shown = set()
    for number in random.Random(0).sample(range(len(points)), 20):
        place = number % 5, number // 5 % 5, number // 25
        for name, index in zip(("length", "link", "removal"), place, strict=True):
            page.focus(f"#slide-{name}")
            page.keyboard.press("Home")
            for _ in range(index):
                page.keyboard.press("ArrowRight")
        answers = json.loads(page.get_attribute("#slid", "data-point"))
        assert f"{points[number].seq_len:,} tokens" in page.inner_text("#sliders")
        for answer in filter(None, answers.values()):
            predicted = _simulated(capsys, tmp_path, points[number], grid["schedules"][answer["schedule"]])
            for key, of_simulate in (("step_s", "iteration_s"), ("block_s",) * 2, ("tokens_per_s",) * 2):
                assert answer[key] == pytest.approx(predicted[of_simulate], rel=1e-9)
            assert answer["reason"] == predicted["reason"]
            rate = f"{round(answer['tokens_per_s']):,}"
            assert rate in page.inner_text("#slid")
            shown.add(rate)
    assert len(shown) >= 20 and complaints == []
    page.close()


def _simulated(capsys: Any, folder: Path, point: Any, schedule: dict[str, Any]) -> dict[str, Any]:
    """What ``ds-hetero simulate`` says of a point of the grid."""
    (folder / "there.json").write_text(json.dumps(cluster_to_dict(point.cost.cluster)))
    (folder / "schedule.json").write_text(json.dumps(schedule))
    files = ("--cluster", folder / "there.json", "--schedule", folder / "schedule.json")
    usual = ("--model", "llama-3.2-1b", "--seq-len", point.seq_len, "--json")
    code, said, err = command(capsys, "simulate", *files, *usual)
    assert code == 0, err
    predicted: dict[str, Any] = json.loads(said)
    return predicted


def test_names_from_files_are_text_and_no_tags(browser, capsys, tmp_path):
    bad = '</script><img src=x onerror="document.title=1">'
    cluster = json.loads(json.dumps(TWO_MACHINES).replace('"fast"', json.dumps(bad)))
    page, complaints = _open(browser, _report(capsys, tmp_path, cluster=cluster))
    assert page.title().startswith("Plan for llama-3.2-1b, 16,384 tokens")
    assert page.locator("img").count() == 0 and complaints == []
    assert f"inside {bad}" in page.inner_text("main")
    page.close()


@pytest.mark.slow
def test_pipelines_and_documents_have_their_sections(browser, capsys, tmp_path):
    pipelines = ("--parallel", "full", "--global-batch", 16, "--seq-len", 4096)
    for options, wanted in ((pipelines, "A step"), (("--lengths", "arxiv"), "Documents and their lanes")):
        out = _report(capsys, tmp_path, *options, run=False)
        page, complaints = _open(browser, out, 390)
        assert wanted in page.locator("h2").all_inner_texts() and complaints == []
        assert page.locator(".chart svg").count() == page.locator(".chart").count() > 2
        page.close()


def test_a_page_of_benchmarks_draws_lines(browser, tmp_path):
    page = Page("Benchmarks")
    lines = page.chart("lines", "by length", {"x": [1, 2], "xName": "n", "series": [{"name": "a", "values": [1, 2]}]})
    page.section("One", lines, html_table(("a", "b"), [("x", 1)], "numbers"))
    (tmp_path / "page.html").write_text(page.render(), encoding="utf-8")
    opened, complaints = _open(browser, tmp_path / "page.html")
    assert opened.locator(".chart svg path").count() > 1 and complaints == []
    opened.close()


def test_what_does_not_belong_together_is_refused_by_name(capsys, tmp_path):
    path = plan_file(capsys, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    run_of(
        described(plan_file(capsys, other, "--seq-len", 2 * SEQ_LEN, "--layout", "contiguous", "--tiled-loss")),
        other / "run.json",
    )
    plan = json.loads(path.read_text())
    run = json.loads((other / "run.json").read_text())
    (tmp_path / "version.json").write_text(json.dumps({**plan, "version": 7}))
    (tmp_path / "bare.json").write_text(json.dumps({key: plan[key] for key in plan if key != "scenario"}))
    (tmp_path / "late.json").write_text(json.dumps({**run, "version": 2}))
    (tmp_path / "damaged.json").write_text(json.dumps({**run, "ranks": run["ranks"][:2]}))
    for arguments, says in (
        ((tmp_path / "version.json",), "schedule version 7 is unknown"),
        ((tmp_path / "bare.json",), 'has no "scenario"'),
        ((path, "--run", other / "run.json"), "the run file is of another plan"),
        ((path, "--run", tmp_path / "late.json"), "run file version 2 is unknown"),
        ((path, "--run", tmp_path / "damaged.json"), '"ranks" of the run file has 2 entries'),
        ((path, "--run", path), "is not a run file"),
    ):
        for name, ending in (("report", "html"), ("trace", "json")):
            code, said, err = command(capsys, name, *arguments, "--out", tmp_path / f"shown.{ending}")
            assert (code, said) == (2, "") and says in err, err
    for name, ending in (("report", "html"), ("trace", "json")):
        code, said, err = command(capsys, name, path, "--out", tmp_path / "missing" / f"plan.{ending}")
        assert (code, said) == (2, "") and "cannot be written" in err, err
    assert not list(tmp_path.glob("shown.*"))
    # A file without a scenario is enough where the run has one.
    own = tmp_path / "run.json"
    run_of(described(path), own)
    assert command(capsys, "trace", tmp_path / "bare.json", "--run", own, "--out", tmp_path / "own.json")[0] == 0
