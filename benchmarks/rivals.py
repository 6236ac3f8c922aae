"""Check that our planner is never slower than a published one, and measure its distance from the optimum.

    python -m benchmarks.rivals [--clusters 500] [--exact 60] [--seconds 1500] [--resume] [--json]

All published planners of each kind run on random clusters under one cost model:

    schedule    2 to 5 devices, drawn as in `random_clusters`; the optimum in the case's coarse units
    pipelines   3 to 6 devices over 0.7, 3 or 10 GB/s. Our search starts from published plans where they are cheap to
                make, and in a second run from none; the optimum by the closed form of pipelines
    documents   2 to 16 equal or unequal units on 1 to 4 nodes, 1 to 60 documents; Zeppelin if the nodes are equal

Nothing is measured. Clusters are numbered: the same numbers give the same clusters on every machine. After
``--seconds`` no further cluster is begun. Results are written as they come, and ``--resume`` continues with the rows of
the result file, which the same planner has to have made. The exit code is 1 if ours is slower anywhere by more than
2e-5, which equal shares of equal ranks, and rounding to whole tokens, may cost the search.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure.exact_pipelines import solve_pipelines_exact
from benchmarks.measure.random_clusters import random_case
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import in_order
from benchmarks.pipelines_planner import WORK, draw
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import PlanError
from ds_hetero.planner import make_problem, plan, strategy
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.loads import loads_of
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.exact import solve_exact
from ds_hetero.planner.pipeline_search.evaluate import Evaluator
from ds_hetero.planner.pipeline_search.search import Search, default_effort_s
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.published.registry import planners_of
from ds_hetero.planner.search.search import search

RTOL_SLOWER = (
    2e-5  # relative: equal shares of equal ranks may cost the search 1e-5, see `search.TIDY`, whole tokens as much
)
PROCESSES = 2
WRITE_EVERY_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if our planner is never slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__.partition("\n")[0])
    parser.add_argument("--clusters", type=int, default=500, help="of every kind")
    parser.add_argument("--exact", type=int, default=60, help="of which so many are solved to the optimum")
    parser.add_argument("--seconds", type=float, default=1500, help="after which no further cluster is begun")
    parser.add_argument("--kinds", choices=sorted(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--resume", action="store_true", help="keep the clusters that the result file has")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=FOLDER / "rivals.json")
    options = parser.parse_args(arguments)
    outcome = header(" ".join(["python -m benchmarks.rivals", *(arguments or sys.argv[1:])]))
    rows = json.loads(options.output.read_text())["rows"] if options.resume and options.output.exists() else []
    done_cases = {(row["kind"], row["index"]) for row in rows}
    tasks = [(kind, i, i < options.exact) for i in range(options.clusters) for kind in options.kinds]
    written_s = time.monotonic()
    for row in _run([task for task in tasks if task[:2] not in done_cases], written_s + options.seconds):
        rows.append(row)
        if time.monotonic() > written_s + WRITE_EVERY_S:
            write(_judged(outcome, rows, options.kinds), options.output)
            written_s = time.monotonic()
    outcome = _judged(outcome, rows, options.kinds)
    write(outcome, options.output)
    if options.json:
        print(json.dumps(outcome))
    else:
        _show(outcome, Console(width=None if sys.stdout.isatty() else 150))
    Console(stderr=True).print(f"written to {options.output}")
    return 1 if outcome["failures"] else 0


def _judged(outcome: dict[str, Any], rows: list[dict[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the result that consists of these rows."""
    summaries = {kind: summary([row for row in rows if row["kind"] == kind]) for kind in kinds}
    failures = [
        f"{kind} {row['index']}: ours is {row['least'] - 1:+.4%} against {row['least_of']}"
        for kind in kinds
        for row in rows
        if row["kind"] == kind and row["least"] is not None and row["least"] < 1 - RTOL_SLOWER
    ]
    return {**outcome, "summary": summaries, "failures": failures, "rows": rows}


def _run(tasks: Sequence[tuple[str, int, bool]], until: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of all tasks (kind, number, with optimum), in their order; without those after ``until``."""
    case = partial(_run_case, until=until)
    rows = in_order(case, tasks, PROCESSES, start_method="fork", one_task_each=False)
    with progress(Console(stderr=True)) as report:
        for done, row in enumerate(rows):
            report((done + 1) / len(tasks), f"{tasks[done][0]} {tasks[done][1]}")
            if row is not None:
                yield row


def _run_case(task: tuple[str, int, bool], until: float) -> dict[str, Any] | None:
    """Run one numbered case; return None after ``until``."""
    kind, index, with_exact = task
    if time.monotonic() > until:
        return None
    ours, baselines_s, optimum = KINDS[kind](random.Random(f"{kind} {index}"), with_exact)
    times = {name: time_s for name, time_s in baselines_s.items() if time_s is not None}
    assert ours or not times, (kind, index, times)  # what a published planner plans, ours must plan
    slowest_of_ours = max((time_s for time_s in ours.values()), default=None)
    least_of = min(times, key=lambda name: times[name], default=None)
    return {
        "kind": kind,
        "index": index,
        "ours_s": ours,
        "rivals_s": baselines_s,
        "least_of": least_of,
        "least": None if least_of is None or slowest_of_ours is None else times[least_of] / slowest_of_ours,
        "over_optimum": optimum,
    }


Judged = tuple[dict[str, float], dict[str, float | None], float | None]
"""Times of ours, times of the published planners, and how many times the optimum ours is."""


def of_schedules(rng: random.Random, with_exact: bool) -> Judged:
    """Compare planners of schedules for one replica, by the time of an iteration."""
    case = random_case(rng, rng.randint(2, 5), "calibrated")
    cost, baselines_s = case.cost, dict[str, float | None]()
    for planner in planners_of("schedule"):
        try:
            prediction = cost.predict(strategy(planner.name, cost))
        except PlanError:
            baselines_s[planner.name] = None
            continue
        baselines_s[planner.name] = prediction.iteration_s if prediction.feasible else None
    try:
        ours = {"ours": plan(case.cluster, case.model, case.workload).step_s}
    except PlanError:
        return {}, baselines_s, None
    if not with_exact:
        return ours, baselines_s, None
    problem, _ = make_problem(cost, token_unit=case.token_unit)
    best = search(problem)[:1]
    if not best:
        return ours, baselines_s, None
    solved = solve_exact(problem, upper_bound_s=best[0].time_s)
    return ours, baselines_s, 1.0 if solved.best is None else best[0].time_s / solved.best.time_s


def of_pipelines(rng: random.Random, with_exact: bool) -> Judged:
    """Compare planners of unequal pipelines, by the time of a step."""
    cluster, model, samples = draw(rng)
    costs = CalibratedStageCosts(cluster, model, WORK)
    goal = costs.time_objective()
    baselines_s: dict[str, float | None] = {}
    for planner in planners_of("pipelines"):
        assert planner.pipelines is not None
        candidate = planner.pipelines(costs, goal, samples, (1, 2))
        baselines_s[planner.name] = None if candidate is None else candidate.step_s
    ours: dict[str, float] = {}
    for name, starts in (("from published plans", True), ("from none", False)):
        try:
            planned = plan_pipelines(
                cluster, model, WORK, samples, costs=costs, micro_batch_sizes=(1, 2), from_published=starts
            )
        except PlanError:
            return {}, baselines_s, None
        ours[name] = planned.step_s
    if not with_exact:
        return ours, baselines_s, None
    result = Search(Evaluator(costs, samples, goal), (1, 2), effort_s=default_effort_s(cluster.num_ranks)).run()
    if result is None:
        return ours, baselines_s, None
    better = solve_pipelines_exact(Evaluator(costs, samples, goal), below=result.closed_form_value)
    return ours, baselines_s, 1.0 if better is None else result.closed_form_value / better.value


def of_documents(rng: random.Random, with_exact: bool) -> Judged:
    """Compare placements of documents, by the time of a block; no optimum is computed."""
    nodes, per_node = rng.randint(1, 4), rng.randint(2, 4)
    units = nodes * per_node
    lengths = [int(2 ** rng.uniform(6, 16)) for _ in range(rng.randint(1, 60))]
    token_s = 1e-6
    speeds = [rng.choice((1.0, 1.0, 0.5, 0.25)) if rng.random() < 0.5 else 1.0 for _ in range(units)]
    costs = UnitCosts(
        token_s=tuple(token_s / speed for speed in speeds),
        square_s=tuple(token_s / rng.choice((2_000, 8_000, 32_000)) / speed for speed in speeds),
        most_tokens=(int(rng.uniform(2, 6) * sum(lengths) / units) + 1,) * units,
        node=tuple(unit // per_node for unit in range(units)),
        receive_s=(token_s * rng.choice((0.01, 0.1, 0.5)),) * nodes,
        cross_s=(token_s * rng.choice((0.5, 1.0, 4.0)),) * nodes,
    )
    baselines_s: dict[str, float | None] = {}
    for planner in planners_of("documents"):
        assert planner.documents is not None
        loads = loads_of(lengths, planner.documents(lengths, costs), costs)
        baselines_s[planner.name] = loads.predicted_s if loads.fits(costs) else None
    return {"ours": place_lengths(lengths, costs).predicted_s}, baselines_s, None


KINDS: dict[str, Callable[[random.Random, bool], Judged]] = {
    "schedule": of_schedules,
    "pipelines": of_pipelines,
    "documents": of_documents,
}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowdown of every published planner relative to ours, and our distance from the optimum.

    The slower one of our results counts.
    """
    planned = [row for row in rows if row["ours_s"]]
    ratios: dict[str, list[float]] = {}
    for row in planned:
        for name, time_s in row["rivals_s"].items():
            ratios.setdefault(name, [])
            if time_s is not None:
                ratios[name].append(time_s / max(row["ours_s"].values()))
    gaps = [row["over_optimum"] - 1 for row in planned if row["over_optimum"] is not None]
    starts = [
        row["ours_s"]["from none"] / row["ours_s"]["from published plans"] - 1
        for row in planned
        if len(row["ours_s"]) > 1
    ]
    return {
        "clusters": len(rows),
        "nothing_fits": len(rows) - len(planned),
        "rivals": {
            name: {
                "plans": len(values),
                "least": min(values, default=None),
                "median": median(values) if values else None,
                "most": max(values, default=None),
            }
            for name, values in ratios.items()
        },
        "starts_save": {"cases": sum(gap > 1e-9 for gap in starts), "most": max(starts, default=0.0)},
        "optimum": {
            "solved": len(gaps),
            "not_optimal": sum(gap > 1e-9 for gap in gaps),
            "mean": mean(gaps) if gaps else None,
            "most": max(gaps, default=None),
        },
    }


def _show(outcome: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(
        "kind", "clusters", "planner", "plans", "least", "median", "most", title="Times of published planners over ours"
    )
    for kind, kind_summary in outcome["summary"].items():
        for name, summary_of_planner in kind_summary["rivals"].items():
            ratios = (
                "-" if summary_of_planner[key] is None else f"{summary_of_planner[key]:.3f}"
                for key in ("least", "median", "most")
            )
            table.add_row(kind, str(kind_summary["clusters"]), name, str(summary_of_planner["plans"]), *ratios)
    console.print(table)
    for kind, kind_summary in outcome["summary"].items():
        optimum, starts = kind_summary["optimum"], kind_summary["starts_save"]
        if optimum["solved"]:
            console.print(
                f"{kind}: {optimum['not_optimal']} of {optimum['solved']} are not optimal, {optimum['mean']:.3%} in "
                f"the mean and {optimum['most']:.2%} at most"
            )
        if kind == "pipelines":
            console.print(f"{kind}: starts save in {starts['cases']} clusters, {starts['most']:.2%} at most")
    for failure in outcome["failures"]:
        console.print(f"NOT MET: {failure}")


if __name__ == "__main__":
    sys.exit(main())
