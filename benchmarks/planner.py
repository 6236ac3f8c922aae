"""Measure how fast and how good the search for schedules is.

    python -m benchmarks.planner growth [--sizes 8 ... 4096] [--repeats 3] [--json]
    python -m benchmarks.planner exact [--count 200] [--cost-model published] [--seconds 600] [--json]
    python -m benchmarks.planner exact --cards --count 300 [--devices 2 3 4]    of two to eight GPUs of the catalogue

    growth   search time from 8 to 4,096 devices, compared with HexiSeq's published times; and quality: total work / sum
             of speeds over the plan's time, and the plan's time over that of a search with ten times the budget
    exact    random clusters of four and five devices (`random_clusters`), solved exactly in coarse units of tokens.
             Compared with the optimum are: the search in the same units, the plan (whole tokens; the best of search and
             baselines), and HexiSeq's Algorithm 1 with its baselines. For six to eight devices the units are too coarse
             to search in: the solver only looks for coarse schedules that beat the plan by 1 %. Sizes alternate,
             results are written as they come, and no case begins after ``--seconds`` of CPU. A case whose optimum
             takes more than `MAX_EVALUATIONS` calls of the cost model counts as not proven

Budgets are counts of evaluations, so all results but the seconds are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure.random_clusters import Case, random_cases
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.reproduce.hexiseq_paper import SCHEDULER_S, TIME_TARGETS
from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost import COST_MODELS, CostModel, Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner import make_problem, plan
from ds_hetero.planner.exact import solve_exact
from ds_hetero.planner.published.hexiseq import algorithm_1
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.problem import Problem
from ds_hetero.planner.search.search import search
from ds_hetero.values.schedule import Schedule

_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_RANKS, _RANKS_OF_CARDS = (4, 5), (2, 3, 4, 5, 6, 7, 8)
TOKENS_PER_DEVICE = 4096
MORE_BUDGET = 10
WITHIN, WITHIN_SHARE, WORST = 0.01, 0.98, 0.05  # of the exact optimum
SEARCHES = {"search": "search, same units", "whole_tokens": "plan, whole tokens", "algorithm_1": "Algorithm 1"}
MAX_EVALUATIONS = 20_000_000  # calls of the cost model for one optimum, about half a minute
MAX_SAME_UNITS = 5  # devices up to which the search is compared in the units of the exact solver too


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every target is met."""
    options = _parser().parse_args(arguments)
    name = f"planner_{options.what}"
    outcome: dict[str, Any] = {
        **header(" ".join(["python -m benchmarks.planner", *(arguments or sys.argv[1:])])),
    }
    progress = Console(stderr=True)
    if options.what == "growth":
        outcome["sizes"] = [growth(size, options.repeats) for size in track(options.sizes, name, console=progress)]
        outcome["failures"] = list(_growth_failures(outcome["sizes"]))
        tables = [_growth_table(outcome["sizes"])]
    else:
        name = f"planner_exact_{'cards' if options.cards else options.cost_model}"
        sizes = options.devices or (_RANKS_OF_CARDS if options.cards else _RANKS)
        cases = _cases(options.cost_model, options.count, sizes, of_catalogue=options.cards)
        path = options.output or FOLDER / f"{name}.json"
        outcome["cases"] = []
        for case in track(cases, name, options.count, console=progress):
            if time.process_time() > options.seconds:
                break
            outcome["cases"].append(exact(*case))
            outcome["summary"] = summary(outcome["cases"])
            write(outcome, path)
        outcome["failures"] = list(_exact_failures(outcome["summary"], 1.0 if options.cards else WITHIN_SHARE))
        tables = [_exact_table(outcome["summary"])]
    path = options.output or FOLDER / f"{name}.json"
    write(outcome, path)
    (_draw_growth if options.what == "growth" else _draw_exact)(outcome, path.with_suffix(".png"))
    if options.json:
        print(json.dumps(outcome))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        for part in (*tables, *(f"NOT MET: {failure}" for failure in outcome["failures"])):
            console.print(part)
    progress.print(f"written to {path}")
    return 1 if outcome["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("growth", "exact"):
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        command.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
        if name == "growth":
            command.add_argument("--sizes", type=int, nargs="+", default=_SIZES)
            command.add_argument("--repeats", type=int, default=3, help="searches of every size; the median counts")
        else:
            command.add_argument("--count", type=int, default=200, help="random clusters")
            command.add_argument(
                "--seconds", type=float, default=float("inf"), help="CPU time after which none is begun"
            )
            command.add_argument("--cards", action="store_true", help="of cards of the catalogue, two to eight of them")
            command.add_argument("--devices", type=int, nargs="+", choices=_RANKS_OF_CARDS, help="of a cluster")
            command.add_argument("--cost-model", choices=sorted(COST_MODELS), default="calibrated")
    return parser


# --- growth -----------------------------------------------------------------------------------------


def growth(num_devices: int, repeats: int) -> dict[str, Any]:
    """Run one size of HexiSeq's simulation 3: 1 H100 : 1 A100 : 3 A800 : 3 L40S in nodes of eight, 13B, 4K tokens."""
    cluster, model = growth_cluster(num_devices), load_model("gpt-13b")
    row: dict[str, Any] = {"devices": num_devices, "published_s": SCHEDULER_S.get(num_devices)}
    for cost_model in ("published", "calibrated"):
        work = Workload(seq_len=TOKENS_PER_DEVICE * num_devices, causal=cost_model == "calibrated")
        planned = [plan(cluster, model, work, cost_model=cost_model) for _ in range(repeats)]
        problem, _ = make_problem(make_cost_model(cost_model, cluster, model, work))
        budget = EvaluationBudget.for_ranks(num_devices)
        budget.left_s *= MORE_BUDGET
        longer = search(problem, budget)[0].time_s
        row[cost_model] = {
            "search_s": [schedule.search_s for schedule in planned],
            "of_bound": planned[0].of_bound,
            "over_longer_search": planned[0].prediction.block_s / longer,
            "gain": planned[0].gain,
            "groups": planned[0].schedule.ring_size,
        }
    return row


def growth_cluster(num_devices: int) -> Cluster:
    """Return the cluster of HexiSeq's simulation 3 at another size; below 64 devices a node has an eighth of them."""
    size = min(8, num_devices // 8)
    kinds = (("H100-SXM-80GB", 450, 1), ("A100-SXM-80GB", 300, 1), ("A800-SXM-80GB", 200, 3), ("L40S", 32, 3))
    nodes = [
        {
            "name": device,
            "device": device,
            "count": size,
            "link": {"bandwidth_gb_per_s": link},
            "repeat": eighths * num_devices // 8 // size,
        }
        for device, link, eighths in kinds
    ]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 200, "latency_us": 10}})


def _growth_failures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the search times that are above `TIME_TARGETS`."""
    for row in rows:
        limit = TIME_TARGETS.get(row["devices"], float("inf"))
        for cost_model in ("published", "calibrated"):
            seconds = median(row[cost_model]["search_s"])
            if seconds > limit:
                yield f"{row['devices']} devices, {cost_model}: {seconds:.2f} s, the target is {limit:g} s"


def _growth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of `growth`."""
    table = Table("devices", "HexiSeq", "target", title="Search: median seconds, and is the plan as good?")
    for cost_model in ("published", "calibrated"):
        for heading in ("s", "of the bound", f"over {MORE_BUDGET} x budget", "over baseline"):
            table.add_column(f"{cost_model}: {heading}", justify="right")
    for row in rows:
        published = f"{row['published_s']:.0f}" if row["published_s"] else ""
        limit = f"{TIME_TARGETS[row['devices']]:g}" if row["devices"] in TIME_TARGETS else ""
        cells = []
        for cost_model in ("published", "calibrated"):
            each = row[cost_model]
            gain = f"{each['gain']:.2f} x" if each["gain"] else "-"
            cells += [f"{median(each['search_s']):.2f}", f"{each['of_bound']:.1%}"]
            cells += [f"{each['over_longer_search'] - 1:+.2%}", gain]
        table.add_row(f"{row['devices']:,}", published, limit, *cells)
    return table


def _draw_growth(outcome: dict[str, Any], path: Path) -> None:
    """Draw the chart of `growth`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    devices = [row["devices"] for row in outcome["sizes"]]
    for cost_model, marker in (("published", "o"), ("calibrated", "s")):
        left.plot(devices, [median(row[cost_model]["search_s"]) for row in outcome["sizes"]], marker, label=cost_model)
        left.lines[-1].set_linestyle("-")
        right.plot(devices, [row[cost_model]["of_bound"] for row in outcome["sizes"]], marker, label=cost_model)
        right.lines[-1].set_linestyle("-")
    left.plot(list(SCHEDULER_S), list(SCHEDULER_S.values()), "k^--", label="HexiSeq, as published")
    left.plot(list(TIME_TARGETS), list(TIME_TARGETS.values()), "r_", markersize=14, label="target")
    left.set_yscale("log")
    left.set_ylabel("seconds on one core")
    right.set_ylabel("share of total work / sum of speeds")
    right.set_ylim(0, 1.02)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("devices")
        axis.legend()
    figure.savefig(path, dpi=120)


# --- exact ------------------------------------------------------------------------------------------


def _cases(
    cost_model: str, count: int, sizes: Sequence[int], *, of_catalogue: bool = False
) -> Iterator[tuple[int, int, Case]]:
    """Yield ``count`` cases, whose numbers of devices alternate over ``sizes``."""
    cases_by_size = [random_cases(count, num_ranks, cost_model, of_catalogue=of_catalogue) for num_ranks in sizes]
    for i in range(count):
        yield sizes[i % len(sizes)], i // len(sizes), next(cases_by_size[i % len(sizes)])


def exact(num_ranks: int, index: int, case: Case) -> dict[str, Any]:
    """Return how much slower each search's result is than the optimum in the case's coarse units.

    A plan in whole tokens may be faster than the optimum in coarse units: its gap is then negative. Above
    `MAX_SAME_UNITS` devices the solver looks for schedules that are faster than the plan by more than `WITHIN`; a gap
    of 0 says that there is none.
    """
    problem, _ = make_problem(case.cost, token_unit=case.token_unit)
    fine, _ = make_problem(case.cost)
    times: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, run in (
        ("search", lambda: search(problem)[:1]),
        ("whole_tokens", lambda: search(fine)[:1]),
        ("algorithm_1", lambda: [result for result in [algorithm_1(problem)] if result is not None]),
    ):
        if name == "search" and num_ranks > MAX_SAME_UNITS:
            continue
        begin = time.perf_counter()
        times[name] = min((result.time_s for result in run()), default=float("inf"))
        seconds[name] = time.perf_counter() - begin
    coarse_s = min((times[name] for name in ("search", "algorithm_1") if name in times), default=float("inf"))
    baselines = [
        _time_s(fine, case.cost, each.schedule)
        for each in Baselines.under(case.cost).candidates
        if each.prediction.feasible
    ]
    for name in ("whole_tokens", "algorithm_1"):
        times[name] = min([times[name], *baselines])
    known_s = coarse_s if num_ranks <= MAX_SAME_UNITS else times["whole_tokens"]
    beaten_s = known_s if num_ranks <= MAX_SAME_UNITS else known_s / (1 + WITHIN)
    begin = time.perf_counter()
    solved = solve_exact(problem, upper_bound_s=beaten_s, most=MAX_EVALUATIONS)
    seconds["exact"] = time.perf_counter() - begin
    best_s = solved.best.time_s if solved.best else known_s
    return {
        "cost_model": case.cost_model,
        "devices": num_ranks,
        "case": index,
        "exact_s": best_s if best_s < float("inf") else None,
        "gaps": {name: found_s / best_s - 1 if found_s < float("inf") else None for name, found_s in times.items()},
        "seconds": seconds,
        "combinations": solved.combinations,
        "evaluated": solved.evaluated,
        "proven": solved.complete,
    }


def _time_s(problem: Problem, cost: CostModel, schedule: Schedule) -> float:
    """Return the time that the search minimizes, with head and embedding, which `Prediction.block_s` lacks."""
    grouping, tokens_D, heads_D = cost.arrays(schedule)
    return float(problem.time_s(grouping, tokens_D[None], heads_D[None])[0])


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by cost model, number of devices and search: the share within 1 %, mean and worst gap.

    Cases in which no plan fits are left out. A search without a plan where one fits counts as outside of every limit. A
    case whose optimum is not proven counts only if a better schedule was found, because no optimum would change that.
    """
    summary_rows = []
    for cost_model, num_ranks in dict.fromkeys((row["cost_model"], row["devices"]) for row in rows):
        rows_of_kind = [row for row in rows if (row["cost_model"], row["devices"]) == (cost_model, num_ranks)]
        fits = [row for row in rows_of_kind if row["exact_s"] is not None]
        solved = [row for row in fits if row["proven"] or _gap(row["gaps"]["whole_tokens"]) > 0]
        for name in [name for name in SEARCHES if name in rows_of_kind[0]["gaps"]]:
            gaps = [row["gaps"][name] for row in solved if row["gaps"][name] is not None]
            summary_rows.append(
                {
                    "cost_model": cost_model,
                    "devices": num_ranks,
                    "search": name,
                    "cases": len(solved),
                    "fit_nowhere": len(rows_of_kind) - len(fits),
                    "not_proven": len(fits) - len(solved),
                    "found_nothing": len(solved) - len(gaps),
                    "within": sum(gap <= WITHIN for gap in gaps) / max(len(solved), 1),
                    "mean": mean(gaps or [0.0]),
                    "worst": max(gaps, default=0.0),
                    "seconds": mean(row["seconds"][name] for row in rows_of_kind),
                    "exact_seconds": mean(row["seconds"]["exact"] for row in rows_of_kind),
                }
            )
    return summary_rows


def _gap(gap: float | None) -> float:
    """Return a gap to the optimum; infinite if no plan was found."""
    return float("inf") if gap is None else gap


def _exact_failures(rows: Sequence[dict[str, Any]], least: float = WITHIN_SHARE) -> Iterator[str]:
    """Yield the searches that miss the targets of `exact`."""
    ours = [row for row in rows if row["search"] != "algorithm_1"]
    for key in dict.fromkeys((row["cost_model"], row["search"]) for row in ours):
        rows_of_search = [row for row in ours if (row["cost_model"], row["search"]) == key]
        within = sum(row["within"] * row["cases"] for row in rows_of_search) / max(
            sum(row["cases"] for row in rows_of_search), 1
        )
        worst = max(row["worst"] for row in rows_of_search)
        label = f"{key[0]}, {SEARCHES[key[1]]}"
        if within < least or any(row["found_nothing"] for row in rows_of_search):
            yield f"{label}: within {WITHIN:.0%} of the optimum in {within:.1%} of the clusters"
        if worst > WORST:
            yield f"{label}: once {worst:.1%} slower than the optimum"


def _exact_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of `exact`."""
    table = Table(title="Slower than the exact optimum in coarse units; random clusters")
    if any(row["devices"] > MAX_SAME_UNITS for row in rows):
        table.caption = (
            f"more than {MAX_SAME_UNITS} devices: all coarse schedules that could be faster than the plan by more than "
            f"{WITHIN:.0%} were looked at; +0.00 % is a plan that none of them beats by that"
        )
    for heading in ("cost model", "devices", "clusters", "search", "within 1 %", "mean", "worst", "seconds", "exact"):
        table.add_column(heading, justify="left" if heading in ("cost model", "search") else "right")
    for row in rows:
        numbers = f"{row['within']:.1%}", f"{row['mean']:+.2%}", f"{row['worst']:+.1%}"
        seconds = f"{row['seconds']:.2f}", f"{row['exact_seconds']:.2f}"
        name = SEARCHES[row["search"]] + (f", {row['found_nothing']} without plan" if row["found_nothing"] else "")
        clusters = str(row["cases"]) + (f", {row['not_proven']} not proven" if row["not_proven"] else "")
        table.add_row(row["cost_model"], str(row["devices"]), clusters, name, *numbers, *seconds)
    return table


def _draw_exact(outcome: dict[str, Any], path: Path) -> None:
    """Draw the distribution of the gaps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    rows = [row for row in outcome["cases"] if row["exact_s"] is not None]
    for name, label in SEARCHES.items():
        of_search = [row["gaps"][name] for row in rows if name in row["gaps"]]
        gaps = sorted(100 * gap for gap in of_search if gap is not None)
        axis.step(gaps, [(i + 1) / len(of_search) for i in range(len(gaps))], where="post", label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.axvline(100 * WITHIN, color="gray", linestyle=":")
    devices = sorted({row["devices"] for row in rows})
    axis.set_title(f"{len(rows)} random clusters, {devices[0]} to {devices[-1]} devices, {rows[0]['cost_model']} costs")
    axis.set_xlabel("% slower than the exact optimum in coarse units")
    axis.set_ylabel("share of clusters")
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
