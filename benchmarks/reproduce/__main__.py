"""Every table and figure of the five papers on one page.

    python -m benchmarks.reproduce all [--only hexiseq hetero-ring zeppelin hexiscale tangram] [--figures NAMES]

The page is docs/papers.md, its pictures lie in docs/images/papers, and the numbers in benchmarks/results/papers.json.
Nothing is measured. A figure that is not run again stays as it was, as all do that ``--figures "Figure 3"`` does not
name; one that fails is named on the page and ends the command with 1, after all others. ``--quick`` makes a small part
of every figure, for tests, and writes no page unless ``--page`` names one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measure.results import FOLDER, header, write
from benchmarks.reproduce.figures.figure import Paper, draw, section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "papers.md"
PAPERS = ("hexiseq", "hetero-ring", "zeppelin", "hexiscale", "tangram")
INTRODUCTION = """# The papers, table by table

Here is what the five papers print that this project is made from, beside what is computed here.
`python -m benchmarks.reproduce all` makes this page. Nothing on it is measured: it is predictions of cost
models, and searches. What is measured is on [another page](measured.md). Every figure says which assumption decides
whether the numbers agree.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if every figure could be made."""
    options = _parser().parse_args(arguments)
    outcome = header(" ".join(["python -m benchmarks.reproduce", *(arguments or sys.argv[1:])]))
    output = options.output or FOLDER / ("papers_quick.json" if options.quick else "papers.json")
    before = json.loads(output.read_text())["papers"] if output.is_file() else {}
    console = Console(stderr=True)
    outcome["papers"] = before
    for key in options.only:
        kept = {} if options.figures is None else {each["name"]: each for each in before[key]["figures"]}
        kept = {name: each for name, each in kept.items() if name not in options.figures}
        outcome["papers"][key] = _made(_paper(key), options.quick, console, kept)
        write(outcome, output)  # after every paper, so that nothing is lost
    page = options.page or (None if options.quick else PAGE)
    if page is not None:
        _write_page(outcome["papers"], page, console)
    if options.json:
        print(json.dumps(outcome))
    console.print(f"written to {output}{f' and {page}' if page else ''}")
    return 1 if any("error" in each for paper in outcome["papers"].values() for each in paper["figures"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("all",))
    parser.add_argument("--only", choices=PAPERS, nargs="+", default=list(PAPERS), help="papers that are run again")
    parser.add_argument("--figures", nargs="+", help="of these papers that are run again; left out, all")
    parser.add_argument("--quick", action="store_true", help="a small part of every figure")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    parser.add_argument("--page", type=Path, help="the page; default: docs/papers.md")
    return parser


def _paper(key: str) -> Paper:
    paper: Paper = import_module(f"benchmarks.reproduce.figures.{key.replace('-', '_')}").PAPER
    return paper


def _made(paper: Paper, quick: bool, console: Console, kept: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a paper with the CPU seconds that each took; those of ``kept`` stay as they were."""
    figures: list[dict[str, Any]] = []
    for name, make in paper.makers.items():
        if name in kept:
            figures.append(kept[name])
            continue
        started = time.process_time()
        try:
            figure: dict[str, Any] = make(quick).to_dict()
        except Exception as error:  # the others are made all the same, and the command ends with 1
            figure = {"name": name, "error": f"{type(error).__name__}: {error}"}
        figure["cpu_s"] = time.process_time() - started
        figures.append(figure)
        console.print(f"{paper.key}, {name}: {figure.get('error', 'made')}, {figure['cpu_s']:.1f} s of CPU")
    return {"title": paper.title, "figures": figures, "left_out": dict(paper.left_out)}


def _write_page(papers: Mapping[str, Any], page: Path, console: Console) -> None:
    lines = [INTRODUCTION]
    pictures = page.parent / "images" / "papers"
    for key in (key for key in PAPERS if key in papers):
        lines += [f"## {papers[key]['title']}", ""]
        for figure in papers[key]["figures"]:
            if "error" in figure:
                lines += [f"### {figure['name']}", "", f"Could not be made: {figure['error']}", ""]
                continue
            picture = None
            if figure["lines"]:
                name = f"{key}-{figure['name'].lower().replace(' ', '-')}.png"
                draw(figure, pictures / name)
                picture = f"images/papers/{name}"
            lines += section(key, figure, picture)
        if papers[key]["left_out"]:
            lines += ["| not reproduced | why |", "|---|---|"]
            lines += [f"| {name} | {why} |" for name, why in papers[key]["left_out"].items()] + [""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n")
    console.print(f"{len(lines)} lines of {page.name}")


if __name__ == "__main__":
    sys.exit(main())
