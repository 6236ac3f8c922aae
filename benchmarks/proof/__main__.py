"""Check exhaustively in a small scope that every table that the runtime executes agrees with its definition.

    python -m benchmarks.proof                       # all families, some minutes on two cores
    python -m benchmarks.proof --quick --json        # fewer ranks, tokens and documents: half a minute
    python -m benchmarks.proof --only routes heads

The scope: schedules of up to 4 ranks, 6 heads (every number of KV heads) and 8 tokens, both layouts, every window;
placements of up to 3 documents; plans of up to 3 pipelines of 3 stages with 4 layers; and the messages of their steps,
with those of 1,000 plans of up to 48 ranks, as a graph of waits (`benchmarks.proof.order`). The tables are those of
ds_hetero.values, batch, sharding and planner, which the runtime reads; none is rebuilt here.
`benchmarks.proof.families` lists the symmetries that are used. Nothing imports torch. The exit code is 1 if anything is
violated; Ctrl-C prints the results so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure.workers import as_completed
from benchmarks.proof.families import FAMILIES, Family
from benchmarks.proof.scopes import FULL, QUICK, Scope

MAX_SHOWN = 5  # violations of a family


class Checked(NamedTuple):
    """Outcome of some cases: their number, seconds, number of violations, and the first few of these."""

    cases: int
    seconds: float
    violations: int
    examples: tuple[str, ...]


def check(family: Family, portion: tuple[Any, ...]) -> Checked:
    """Check the cases of one portion."""
    begin, cases, violated, examples = time.perf_counter(), 0, 0, list[str]()
    for text, wrong in family.cases(*portion):
        cases += 1
        if first := next(wrong, None):
            violated += 1
            examples += [f"{text}: {first}"] if len(examples) < MAX_SHOWN else []
    return Checked(cases, time.perf_counter() - begin, violated, tuple(examples))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if there is a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller scope")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--out", type=Path, help="file for the JSON object, written as results come")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: as many as there are cores")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAMILY", help=", ".join(names))
    options = parser.parse_args(arguments)
    scope = QUICK if options.quick else FULL
    begin = time.perf_counter()
    tasks = [(family, p) for family in FAMILIES if family.name in options.only for p in family.portions(scope)]
    by_family: dict[str, list[Checked]] = {name: [] for name in options.only}

    def result_so_far(is_complete: bool) -> dict[str, Any]:
        result = _result(by_family, scope, time.perf_counter() - begin, is_complete)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result

    is_complete = True
    try:
        for name, checked in _run(tasks, options.processes):
            by_family[name].append(checked)
            result_so_far(is_complete=False)
    except KeyboardInterrupt:
        is_complete = False
    result = result_so_far(is_complete)
    print(json.dumps(result)) if options.json else _print(result)
    return 1 if result["violations"] or not is_complete else 0


def _run(tasks: Sequence[tuple[Family, tuple[Any, ...]]], processes: int) -> Iterator[tuple[str, Checked]]:
    """Yield the outcomes of all portions, as they end."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("portions of cases", total=len(tasks))
        named = [(FAMILIES.index(family), portion) for family, portion in tasks]
        for index, checked in as_completed(_task, named, processes, start_method="fork", one_task_each=False):
            bar.update(shown, advance=1, description=tasks[index][0].name)
            yield tasks[index][0].name, checked


def _task(named: tuple[int, tuple[Any, ...]]) -> Checked:
    family, portion = named
    return check(FAMILIES[family], portion)


def _result(by_family: dict[str, list[Checked]], scope: Scope, seconds: float, is_complete: bool) -> dict[str, Any]:
    families = {
        name: {
            "cases": sum(checked.cases for checked in portions),
            "violations": sum(checked.violations for checked in portions),
            "cpu_seconds": round(sum(checked.seconds for checked in portions), 2),
            "examples": [text for checked in portions for text in checked.examples][:MAX_SHOWN],
        }
        for name, portions in by_family.items()
    }
    return {
        "cases": sum(family["cases"] for family in families.values()),
        "violations": sum(family["violations"] for family in families.values()),
        "seconds": round(seconds, 1),
        "is_complete": is_complete,
        "scope": {name: getattr(scope, name) for name in scope.__dataclass_fields__},
        "families": families,
    }


def _print(result: dict[str, Any]) -> None:
    """Print the table."""
    says = {family.name: family.says for family in FAMILIES}
    print(f"{'family':<12} {'cases':>12} {'violated':>9} {'CPU s':>8}  what holds in all of them")
    for name, of_family in result["families"].items():
        counts = f"{of_family['cases']:>12,} {of_family['violations']:>9,} {of_family['cpu_seconds']:>8.1f}"
        print(f"{name:<12} {counts}  {says[name]}")
        for text in of_family["examples"]:
            print(f"    {text}")
    ended = "" if result["is_complete"] else " until it was interrupted"
    print(f"{result['cases']:,} cases, {result['violations']:,} violated, in {result['seconds']:,.0f} s{ended}")


if __name__ == "__main__":
    sys.exit(main())
