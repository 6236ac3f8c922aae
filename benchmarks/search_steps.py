"""Measure the worth of each step of the search for a schedule: run the search without it, on small and large clusters.

    python -m benchmarks.search_steps [--count 70] [--json]

The clusters are two to eight GPUs of the catalogue (`random_clusters`), half of them in coarse units, and the clusters
of ds_configs with up to 64 devices. Budgets are counts of evaluations, so all results but the seconds are the same on
every machine. A step is worth something if the plan without it is slower by more than `NOISE`. Without a step the
others get its evaluations, so that the plan may also be faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import mean
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure.random_clusters import random_cases
from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster import load_cluster
from ds_hetero.common.reading import config_dir
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner import make_problem
from ds_hetero.planner.search import closed_forms, descent, moves, partitions, regroup, search, starts
from ds_hetero.planner.search.problem import Problem

NOISE = 1e-4  # of the time: rounding to whole tokens is less
MAX_RANKS = 64  # of a ready cluster
SEQ_LEN = 65_536


def _first(problem: Problem, start: Any, *_: Any, **__: Any) -> Any:
    """Stand for a step of the search that improves a start: return the start."""
    return start


def _none(*_: Any, **__: Any) -> tuple[()]:
    """Stand for a step of the search that proposes candidates: return none."""
    return ()


# What stands for a step that is left out: (module, function, replacement).
STEPS: dict[str, list[tuple[Any, str, Any]]] = {
    "stage I: meshes of USP": [(partitions, "_meshes", _none)],
    "stage I: nodes merged along links": [(partitions, "_agglomerated", _none)],
    "stage I: covers of heads": [(partitions, "_covers", _none)],
    "stage I: groups of equal speed": [(partitions, "ladder", lambda limit: [])],
    "stage I: sets of working ranks": [(starts, "working_sets", lambda problem: [problem.node >= 0])],
    "stage II: ring orders": [(closed_forms, "best_order", _first), (search, "best_order", _first)],
    "caps of the all-to-all": [(search, "cap_all_to_all", _first)],
    "stage III: the descent": [(search, "descend", _first)],
    "moves: sets of ranks": [(moves, "moves_of_sets", lambda problem, grouping, tokens, sets, step: tokens[None])],
    "moves: pairs of ranks": [(moves, "moves_of_pairs", lambda tokens, step: tokens[None][:0])],
    "moves: heads": [(moves, "head_moves", lambda problem, grouping, at, *_: at.heads[None][:0])],
    "moves: on in a direction": [(descent, "_continue_move", lambda problem, grouping, at, moved, budget: moved)],
    "regroup": [(search, "regroup", _first), (regroup, "regroup", _first)],
    "order once more": [(search, "_reorder", _first)],
    "search in whole tokens": [(search, "_with_whole_tokens", _first)],
    "other working ranks": [(search, "with_other_ranks", _first)],
    "descents once more": [(search, "_once_more", _none)],
    "trades of places": [(search, "trade_places", _first)],
    "equal shares": [(search, "share_equally", _first)],
    "all directions": [(search, "in_all_directions", _first)],
    "last descent": [(search, "_last_descent", _first)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; it always returns 0, because it has no targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_steps", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=70, help="random clusters")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args(arguments)
    progress = Console(stderr=True)
    cases = list(_cases(options.count))
    rows = []
    with_all = [_search(*case) for case in track(cases, "all steps", console=progress)]
    for step in track(list(STEPS), "without one", console=progress):
        rows.append(_row(step, cases, with_all))
    outcome: dict[str, Any] = {
        **header(" ".join(["python -m benchmarks.search_steps", *(arguments or sys.argv[1:])])),
        "clusters": len(cases),
        "seconds": sum(seconds for _, seconds in with_all),
        "steps": rows,
    }
    write(outcome, FOLDER / "search_steps.json")
    if options.json:
        print(json.dumps(outcome))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(outcome))
    return 0


def _cases(count: int) -> Iterator[tuple[str, Any]]:
    """Yield names, and functions that make a new problem; a problem remembers what was evaluated."""
    sizes = (2, 3, 4, 5, 6, 7, 8)
    cases_by_size = {size: random_cases(count, size, "calibrated", of_catalogue=True) for size in sizes}
    for i in range(count):
        size = sizes[i % len(sizes)]
        case = next(cases_by_size[size])
        unit = case.token_unit if i % 2 else 1
        yield f"{size} cards, {i}", lambda case=case, unit=unit: make_problem(case.cost, token_unit=unit)[0]
    for path in sorted((config_dir() / "clusters").glob("*.yaml")):
        cluster = load_cluster(path)
        if cluster.num_ranks > MAX_RANKS:
            continue
        work = Workload(seq_len=SEQ_LEN, tiled_logits=True)
        cost = make_cost_model("calibrated", cluster, load_model("llama-3.2-3b"), work)
        yield path.stem, lambda cost=cost: make_problem(cost)[0]


def _search(_: str, make: Any, replaced: Sequence[tuple[Any, str, Any]] = ()) -> tuple[float, float]:
    """Return the time of the best assignment, and the CPU seconds of the search."""
    problem = make()
    begin_s = time.process_time()
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(patch.object(module, name, replacement))
        assignments = search.search(problem)
    return (assignments[0].time_s if assignments else float("inf")), time.process_time() - begin_s


def _row(step: str, cases: Sequence[tuple[str, Any]], with_all: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the result of the search without one step: slowdowns relative to the search with all, by cluster.

    Args:
        cases: name and problem of every cluster.
        with_all: time of the plan, and CPU seconds, of the whole search, by cluster.
    """
    losses, seconds = {}, 0.0
    for (name, make), (time_s, _) in zip(cases, with_all, strict=True):
        without_s, search_s = _search(name, make, STEPS[step])
        seconds += search_s
        if time_s < float("inf"):
            losses[name] = without_s / time_s - 1
    finite = [loss for loss in losses.values() if loss < float("inf")]
    return {
        "step": step,
        "slower": sum(loss > NOISE for loss in losses.values()),
        "faster": sum(loss < -NOISE for loss in losses.values()),
        "nothing_found": len(losses) - len(finite),
        "mean": mean(finite),
        "worst": max(finite),
        "worst_cluster": max(losses, key=lambda name: losses[name]),
        "seconds": seconds,
    }


def _table(outcome: dict[str, Any]) -> Table:
    """Return the table of results."""
    title = f"The search without one of its steps, {outcome['clusters']} clusters, {outcome['seconds']:.0f} s with all"
    table = Table("without", "slower", "faster", "mean", "worst", "of", "s", title=title)
    for row in outcome["steps"]:
        cells = [str(row["slower"] + row["nothing_found"]), str(row["faster"])]
        cells += [f"{row['mean']:+.3%}", f"{row['worst']:+.2%}", row["worst_cluster"], f"{row['seconds']:.0f}"]
        table.add_row(row["step"], *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
