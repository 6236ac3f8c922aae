"""Rebuild every table and figure of the five papers, one page per paper.

    python -m benchmarks.reproduce all [--only hexiseq hetero-ring zeppelin hexiscale tangram] [--figures NAMES]

The pages are docs/evidence/papers-PAPER.md; docs/papers.md sums them up and is written by hand. Pictures are in
docs/images/papers, and numbers in benchmarks/results/papers.json. Nothing is measured. Figures that are not run again
stay as they were: with ``--figures "Figure 3"`` all others. A figure that fails is named on the page, and the command
ends with 1 after all others. ``--quick`` makes a small part of every figure, for tests, and writes no page unless
``--pages`` names a folder.
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
PAGES = ROOT / "docs" / "evidence"
PAPERS = ("hexiseq", "hetero-ring", "zeppelin", "hexiscale", "tangram")
INTRODUCTION = """# {name}, figure by figure

This page compares the tables and figures of {title} with ours. Nothing on it was measured by us: our numbers are
predictions of cost models, and searches. One command makes the page:

<!-- not run in tests: takes minutes -->
```bash
python -m benchmarks.reproduce all --only {key}
```

{result}

"Paper" marks numbers that the paper prints, and "ours" numbers that ds_hetero computes. {setup}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every figure could be made."""
    options = _parser().parse_args(arguments)
    outcome = header(" ".join(["python -m benchmarks.reproduce", *(arguments or sys.argv[1:])]))
    output = options.output or FOLDER / ("papers_quick.json" if options.quick else "papers.json")
    before = json.loads(output.read_text())["papers"] if output.is_file() else {}
    console = Console(stderr=True)
    outcome["papers"] = before
    for key in options.only:
        kept_figures = {} if options.figures is None else {figure["name"]: figure for figure in before[key]["figures"]}
        kept_figures = {name: figure for name, figure in kept_figures.items() if name not in options.figures}
        outcome["papers"][key] = _make_figures(_paper(key), options.quick, console, kept_figures)
        write(outcome, output)  # after every paper, so that nothing is lost
    pages = options.pages or (None if options.quick else PAGES)
    if pages is not None:
        for key in options.only:
            _write_page(key, outcome["papers"][key], pages, console)
    if options.json:
        print(json.dumps(outcome))
    console.print(f"written to {output}{f' and {pages}' if pages else ''}")
    return 1 if any("error" in figure for paper in outcome["papers"].values() for figure in paper["figures"]) else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("all",))
    parser.add_argument("--only", choices=PAPERS, nargs="+", default=list(PAPERS), help="papers that are run again")
    parser.add_argument("--figures", nargs="+", help="of these papers that are run again; left out, all")
    parser.add_argument("--quick", action="store_true", help="a small part of every figure")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    parser.add_argument("--pages", type=Path, help="folder of the pages; default: docs/evidence")
    return parser


def _paper(key: str) -> Paper:
    paper: Paper = import_module(f"benchmarks.reproduce.figures.{key.replace('-', '_')}").PAPER
    return paper


def _make_figures(paper: Paper, quick: bool, console: Console, kept_figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures of a paper with the CPU seconds of each; those of ``kept_figures`` stay as they were."""
    figures: list[dict[str, Any]] = []
    for name, make in paper.makers.items():
        if name in kept_figures:
            figures.append(kept_figures[name])
            continue
        started = time.process_time()
        try:
            figure: dict[str, Any] = make(quick).to_dict()
        except Exception as error:  # the others are made all the same, and the command ends with 1
            figure = {"name": name, "error": f"{type(error).__name__}: {error}"}
        figure["cpu_s"] = time.process_time() - started
        figures.append(figure)
        console.print(f"{paper.key}, {name}: {figure.get('error', 'made')}, {figure['cpu_s']:.1f} s of CPU")
    about = {"name": paper.name, "title": paper.title, "result": paper.result, "setup": paper.setup}
    return {**about, "figures": figures, "left_out": dict(paper.left_out)}


def _write_page(key: str, paper: Mapping[str, Any], pages: Path, console: Console) -> None:
    """Write the page of a paper and its pictures."""
    lines = [INTRODUCTION.format(key=key, **{name: paper[name] for name in ("name", "title", "result", "setup")})]
    pictures = pages.parent / "images" / "papers"
    texts: dict[str, str] = {}
    for figure in paper["figures"]:
        if "error" in figure:
            lines += [f"## {figure['name']}", "", f"Could not be made: {figure['error']}", ""]
            continue
        picture = None
        if figure["lines"]:
            name = f"{key}-{figure['name'].lower().replace(' ', '-')}.png"
            draw(figure, pictures / name)
            picture = f"../images/papers/{name}"
        lines += section(_without_repeats(figure, texts), picture)
    if paper["left_out"]:
        lines += ["## Not reproduced", ""]
        lines += [f"* **{name}.** {why}" for name, why in paper["left_out"].items()] + [""]
    page = pages / f"papers-{key}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n")
    console.print(f"{len(lines)} lines of {page.name}")


def _without_repeats(figure: Mapping[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Return a figure whose texts refer to an earlier figure that has the same ones.

    Args:
        texts: of the figures before it, with the name of the first that has each; this figure's are added.
    """
    short = {**figure}
    for part, reference in (("shows", "As {}, for other cases."), ("decides", "Those of {}.")):
        first = texts.setdefault(figure[part], figure["name"])
        if first != figure["name"]:
            short[part] = reference.format(first)
    return short


if __name__ == "__main__":
    sys.exit(main())
