"""``ds-hetero compare``: every strategy on one cluster, in one table."""

from __future__ import annotations

from typing import Any

from ds_hetero.baselines import STRATEGIES
from ds_hetero.cli.printing import print_json
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.cost.prediction import Prediction
from ds_hetero.errors import PlanError
from ds_hetero.planner.exact import solve_exact
from ds_hetero.planner.hetero_ring import fit_formula, profile_table
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.planner.strategies import strategy

__all__ = ["run"]

# Into how many units tokens and heads are cut for the exact solver, by number of ranks: seconds, at worst minutes.
TOKEN_UNITS = (1, 1, 24, 24, 24, 20, 12, 8, 6)
HEAD_UNITS = (1, 64, 16, 16, 12, 8, 8, 6, 4)


def run(scenario: Scenario, with_exact: bool, as_json: bool) -> None:
    """Compare and print."""
    cost = scenario.cost
    rows: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        try:
            schedule = strategy(name, cost)
        except PlanError as error:
            rows[name] = {"reason": str(error), "schedule": None, "predicted": None}
            continue
        prediction = cost.predict(schedule)
        rows[name] = {"reason": prediction.reason, "schedule": schedule.to_dict(), "predicted": prediction}
    report: dict[str, Any] = {"strategies": rows, "formula_r_squared": fit_formula(profile_table(cost)).r_squared}
    if with_exact:
        report["exact"] = _exact(scenario)
    if as_json:
        plain = {name: {**row, "predicted": _plain(row["predicted"])} for name, row in rows.items()}
        print_json({**report, "strategies": plain})
        return
    _print(report)


def _plain(prediction: Prediction | None) -> dict[str, Any] | None:
    return prediction.to_dict() if prediction is not None else None


def _exact(scenario: Scenario) -> dict[str, Any]:
    """The optimum in coarse units, and the best of the search in the same units."""
    num_ranks = scenario.cluster.num_ranks
    if num_ranks >= len(TOKEN_UNITS):
        raise PlanError(f"--exact takes at most {len(TOKEN_UNITS) - 1} ranks, the cluster has {num_ranks}.")
    heads = scenario.model.num_heads
    head_unit = min(
        unit for unit in range(1, heads + 1) if heads % unit == 0 and heads // unit <= HEAD_UNITS[num_ranks]
    )
    token_unit = -(-scenario.workload.seq_len // TOKEN_UNITS[num_ranks])
    problem, rank_of = make_problem(scenario.cost, token_unit=token_unit, head_units=(head_unit,))
    searched = search(problem)
    known_s = searched[0].time_s if searched else float("inf")
    solved = solve_exact(problem, upper_bound_s=known_s)
    best = solved.best or (searched[0] if searched else None)
    if best is None:
        raise PlanError(
            f"no schedule of {scenario.model.name} fits in units of {token_unit} tokens and {head_unit} heads."
        )
    return {
        "token_unit": token_unit,
        "head_unit": head_unit,
        "block_s": best.time_s,
        "search_block_s": known_s if searched else None,
        "gap": known_s / best.time_s - 1 if searched else None,
        "schedule": schedule_of(problem, best, rank_of).to_dict(),
        "combinations": solved.combinations,
        "evaluated": solved.evaluated,
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = report["strategies"]
    uniform = [rows[name]["predicted"] for name in ("ulysses", "ring", "usp")]
    best = max((p.tokens_per_s for p in uniform if p is not None and p.feasible), default=None)
    table = Table("strategy", "block", "tokens/s", "over uniform", "non-attn", "a2a", "ring", title="Strategies")
    remarks = []
    for name, row in rows.items():
        prediction = row["predicted"]
        if prediction is None:
            table.add_row(name, *["-"] * 6)
            remarks.append(row["reason"])
            continue
        gain = f"{prediction.tokens_per_s / best:.2f} x" if best else "-"
        terms = prediction.terms
        parts = (terms.non_attention_s, terms.all_to_all_s, terms.ring_steps_s)
        shares = (f"{100 * seconds / prediction.block_s:.0f} %" for seconds in parts)
        table.add_row(name, time_text(prediction.block_s), f"{prediction.tokens_per_s:,.0f}", gain, *shares)
        remarks.append(f"{name}: {'does not fit: ' + row['reason'] if row['reason'] else prediction.bottleneck.text}")
    console = Console()
    console.print(table)
    console.print("\n".join(remarks), markup=False, highlight=False, soft_wrap=True)
    console.print(f"formula: R^2 = {report['formula_r_squared']:.3f} on its profile table", highlight=False)
    if "exact" in report:
        e = report["exact"]
        gap = "found nothing" if e["gap"] is None else f"is {100 * e['gap']:.2f} % slower"
        console.print(
            f"exact: {time_text(e['block_s'])} per block is the optimum in units of {e['token_unit']} tokens and "
            f"{e['head_unit']} heads; in these units the search {gap} "
            f"({e['evaluated']:,} of {e['combinations']:,} combinations evaluated)",
            highlight=False,
            soft_wrap=True,
        )
