"""Summarize times: which plan is fastest, the errors of predictions, and whether they order plans correctly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pipelines.plans import EQUAL, GRID, OURS
from benchmarks.pipelines.run import STOCK

CLEAR = 1.1  # pairs of plans whose measured times differ by less are not ranked
BUSY_CORES = 0.2  # of other processes, from which on a figure is marked


def summarize(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a contest: medians, errors of the predictions, pairs in the right order."""
    medians = {name: median(seconds) for name, seconds in measured["seconds"].items()}
    predicted = {name: plan["predicted_s"] for name, plan in measured["plans"].items()}
    errors = {name: predicted[name] / medians[name] - 1 for name in predicted}
    drift = [
        plan["predicted_s"] / plan["chosen_at_s"] - 1 for plan in measured["plans"].values() if "chosen_at_s" in plan
    ]
    pairs = [
        (a, b)
        for a, b in combinations(predicted, 2)
        if max(medians[a], medians[b]) > CLEAR * min(medians[a], medians[b])
    ]
    right = [(a, b) for a, b in pairs if (medians[a] < medians[b]) == (predicted[a] < predicted[b])]
    summary: dict[str, Any] = {
        "medians": medians,
        "errors": errors,
        "median_error": median(map(abs, errors.values())),
        "drift": median(drift) if drift else None,
        "pairs": len(pairs),
        "pairs_in_order": len(right),
        "wrong_pairs": [pair for pair in pairs if pair not in right],
    }
    grids = [name for name in medians if name.startswith(GRID)]
    if grids and OURS in medians:
        best = min(grids, key=medians.__getitem__)
        summary |= {
            "best_grid": best,
            "over_best_grid": _ratio(measured, best, OURS),
            "over_stock": _ratio(measured, STOCK, OURS),
            "fastest": min(medians, key=medians.__getitem__),
        }
    if EQUAL in medians:
        summary["stock_over_equal"] = _ratio(measured, STOCK, EQUAL)
    return summary


def _ratio(measured: Mapping[str, Any], slow: str, fast: str) -> float:
    """Return the median over the rounds of one contender's time over another's."""
    return median(a / b for a, b in zip(measured["seconds"][slow], measured["seconds"][fast], strict=True))


def summarize_memory(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured over predicted memory by plan and rank, minus one."""
    over = {
        name: {rank: plan["bytes"][rank] / predicted - 1 for rank, predicted in plan["predicted_bytes"].items()}
        for name, plan in measured["plans"].items()
    }
    return {"over_predicted": over, "worst": max(error for by_rank in over.values() for error in by_rank.values())}


def summarize_replan(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return when layers had moved, and the gain."""
    return {key: measured[key] for key in ("steps_until_moved", "gain", "loss_difference")} | {
        "layers": measured["layers"][-1]
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a result."""
    for case in result["cases"]:
        console.print(case["text"])
        if "medians" in case["summary"]:
            console.print(_times(case))
        elif "worst" in case["summary"]:
            console.print(_memory(case))
        else:
            summary = case["summary"]
            console.print(
                f"a rank at 40 %: layers {case['layers'][0]} -> {summary['layers']} after "
                f"{summary['steps_until_moved']} steps, {summary['gain']:.2f} x the plan that stays, "
                f"losses differ by {summary['loss_difference']:.1e}"
            )


def _memory(case: Mapping[str, Any]) -> Table:
    table = Table(title=f"memory: no rank above its plan's figure by more than {case['summary']['worst']:.1%}")
    for column in ("plan", "rank", "measured, MB", "predicted, MB", "over"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name, plan in case["plans"].items():
        for rank, predicted in plan["predicted_bytes"].items():
            over = case["summary"]["over_predicted"][name][rank]
            cells = (f"{plan['bytes'][rank] / 1e6:.1f}", f"{predicted / 1e6:.1f}", f"{over:+.1%}")
            table.add_row(name, str(rank), *cells)
    return table


def _times(case: Mapping[str, Any]) -> Table:
    """Return the table of times of a case."""
    summary = case["summary"]
    table = Table(title=_title(case, summary))
    for column in ("plan", "measured, s", "predicted, s", "error"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name, seconds in sorted(summary["medians"].items(), key=lambda item: item[1]):
        plan_row = case["plans"].get(name)
        cells = ("", "") if plan_row is None else (f"{plan_row['predicted_s']:.3f}", f"{summary['errors'][name]:+.1%}")
        table.add_row(name, f"{seconds:.3f}", *cells)
    return table


def _title(case: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the title of a case."""
    drift = summary.get("drift")
    slower = "" if drift is None else f"; the machine's speed since the profile moved predictions by {drift:+.1%}"
    busy = f"; others used {case['foreign_cores']:.1f} cores" if case["foreign_cores"] > BUSY_CORES else ""
    rounds = len(next(iter(case["seconds"].values())))
    text = (
        f"{case['name']}: {rounds} rounds, median error {summary['median_error']:.1%}, "
        f"{summary['pairs_in_order']} of {summary['pairs']} pairs in order"
    )
    if "best_grid" in summary:
        text += f", {summary['over_best_grid']:.2f} x the best uniform grid, {summary['over_stock']:.2f} x DeepSpeed's"
    if "stock_over_equal" in summary:
        text += f", {summary['stock_over_equal']:.3f} x DeepSpeed's"
    return text + slower + busy
