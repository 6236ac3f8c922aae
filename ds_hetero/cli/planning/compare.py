"""``ds-hetero compare``: predicts every strategy, or every planner of pipelines, on one cluster, in one table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from ds_hetero.cli.options import AS_JSON, GLOBAL_BATCH, PARALLEL, batch_of_pipelines
from ds_hetero.cli.planning.job_headline import headline
from ds_hetero.cli.planning.scenario_jobs import best_beside
from ds_hetero.cli.printing import print_json, print_lines, print_table, term_shares
from ds_hetero.cli.scenario import Scenario, scenario_options
from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.text import time_text
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.price import price_of_prediction
from ds_hetero.errors import PlanError
from ds_hetero.planner.exact import solve_exact
from ds_hetero.planner.jobs.job import Job
from ds_hetero.planner.published.hetero_ring import fit_formula, read_table, table_of, table_text
from ds_hetero.planner.published.profile_table import ProfileTable
from ds_hetero.planner.published.registry import planners_of
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.planner.strategies import strategy
from ds_hetero.reporting.assumptions import assumed_line
from ds_hetero.values.baselines import STRATEGIES

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.results.pipelines import PlannedPipelines

# The exact solver divides tokens and heads into units. Index: number of ranks; value: number of units, chosen so that
# the solver takes seconds, at worst minutes.
TOKEN_UNITS = (1, 1, 24, 24, 24, 20, 12, 8, 6)
HEAD_UNITS = (1, 64, 16, 16, 12, 8, 8, 6, 4)


@click.command
@scenario_options()
@click.option("--exact", is_flag=True, help="Add the optimum in coarse units, up to 8 ranks.")
@click.option("--times", help="For lut and formula: a JSON file of lengths, speeds, and seconds by length and speed.")
@PARALLEL
@GLOBAL_BATCH
@AS_JSON
@click.pass_context
def compare(
    context: click.Context,
    scenario: Scenario,
    exact: bool,
    times: str | None,
    parallel: str,
    global_batch: int | None,
    as_json: bool,
) -> None:
    """All strategies, or all planners of pipelines, on one cluster, in one table."""
    samples = batch_of_pipelines(parallel, global_batch)
    if samples is None:
        job = best_beside(scenario, context)
        _strategies(scenario, job, exact, None if times is None else read_table(times), as_json)
    else:
        _pipelines(scenario, samples, as_json)


def _strategies(
    scenario: Scenario, job: Job | None, with_exact: bool, table: ProfileTable | None, as_json: bool
) -> None:
    """Predict the schedules of all strategies and published planners, and print them in one table.

    Args:
        job: the best job over all settings that are left open; None if it is unknown.
        with_exact: whether to add the exact optimum, which is computed in coarse units of tokens and heads.
        table: measured times for the planners that plan by a table; None: the cost model's times.
    """
    cost = scenario.cost
    rows: dict[str, JsonDict] = {}
    planner_names = [planner.name for planner in planners_of("schedule")]
    for name in dict.fromkeys((*STRATEGIES, *planner_names)):
        try:
            schedule = strategy(name, cost, table)
        except PlanError as error:
            rows[name] = {"reason": str(error), "schedule": None, "predicted": None}
            continue
        prediction = cost.predict(schedule)
        rows[name] = {"reason": prediction.reason, "schedule": schedule.to_dict(), "predicted": prediction}
    r_squared = fit_formula(table or table_of(cost)[0]).r_squared
    exact = _exact(scenario) if with_exact else None
    if as_json:
        strategies = {}
        for name, row in rows.items():
            strategies[name] = {**row, "predicted": row["predicted"] and row["predicted"].to_dict()}
        exact_key = {} if exact is None else {"exact": exact}
        job_key = {"job": job and job.to_dict()}
        print_json({"strategies": strategies, "formula_r_squared": r_squared, **exact_key, **job_key})
        return
    columns = ("strategy", "block", "tokens/s", "over uniform", "non-attn", "a2a", "ring", "MFU", "per M tokens")
    has_prices = all(device.price_per_hour is not None for device in scenario.cluster.devices)
    num_columns = len(columns) if has_prices else len(columns) - 1  # without the price, which is the last one
    print_table(columns[:num_columns], (row[:num_columns] for row in _strategy_rows(cost, rows)), "Strategies")
    print_lines("non-attn, a2a, ring: shares of a block's time outside attention, in all-to-alls and in ring steps")
    print_lines(*_remarks(rows), assumed_line(scenario), table_text(cost, table))
    if job is not None:
        planned: Prediction | None = rows["plan"]["predicted"]
        now_s = planned.iteration_s if planned is not None and planned.feasible else None
        print("\n".join(headline(job, now_s)))
    if exact is not None:
        gap = "found nothing" if exact["gap"] is None else f"is {100 * exact['gap']:.2f} % slower"
        print_lines(
            f"exact:      {time_text(exact['block_s'])} per block is the optimum in units of {exact['token_unit']} "
            f"tokens and {exact['head_unit']} heads; in these units the search {gap} "
            f"({exact['evaluated']:,} of {exact['combinations']:,} combinations evaluated)"
        )


def _exact(scenario: Scenario) -> JsonDict:
    """Return the exact optimum, and the result of the usual search in the same units, as data for ``--json``.

    Tokens and heads are divided in units so coarse that the exact solver can go through all combinations.

    Raises:
        PlanError: too many ranks for the exact solver, or no schedule in these units fits.
    """
    num_ranks = scenario.cluster.num_ranks
    if num_ranks >= len(TOKEN_UNITS):
        raise PlanError(
            f"--exact takes at most {len(TOKEN_UNITS) - 1} ranks, and the cluster has {num_ranks}. Leave --exact out."
        )
    heads = scenario.model.num_heads
    divisors = [unit for unit in range(1, heads + 1) if heads % unit == 0]
    head_unit = min(unit for unit in divisors if heads // unit <= HEAD_UNITS[num_ranks])
    token_unit = -(-scenario.workload.seq_len // TOKEN_UNITS[num_ranks])
    problem, rank_of = make_problem(scenario.cost, token_unit=token_unit, head_units=(head_unit,))
    searched = search(problem)
    # The solver looks only for schedules that are faster than those of the search, and returns None if there are none.
    searched_s = searched[0].time_s if searched else float("inf")
    solved = solve_exact(problem, upper_bound_s=searched_s)
    best = solved.best or (searched[0] if searched else None)
    if best is None:
        raise PlanError(
            f"no schedule of {scenario.model.name} fits in units of {token_unit} tokens and {head_unit} heads. "
            "Use shorter sequences, or leave --exact out."
        )
    return {
        "token_unit": token_unit,
        "head_unit": head_unit,
        "block_s": best.time_s,
        "search_block_s": searched_s if searched else None,
        "gap": searched_s / best.time_s - 1 if searched else None,
        "schedule": schedule_of(problem, best, rank_of).to_dict(),
        "combinations": solved.combinations,
        "evaluated": solved.evaluated,
    }


def _strategy_rows(cost: CostModel, rows: Mapping[str, JsonObject]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of strategies, with speeds relative to the best uniform schedule that fits."""
    uniform_speeds = []
    for name in ("ulysses", "ring", "usp"):
        prediction: Prediction | None = rows[name]["predicted"]
        if prediction is not None and prediction.feasible:
            uniform_speeds.append(prediction.tokens_per_s)
    best_uniform = max(uniform_speeds, default=None)
    for name, row in rows.items():
        prediction = row["predicted"]
        if prediction is None:
            yield name, *["-"] * 8
        else:
            gain = f"{prediction.tokens_per_s / best_uniform:.2f} x" if best_uniform else "-"
            rate = f"{prediction.tokens_per_s:,.0f}"
            price = price_of_prediction(cost, prediction)
            money = f"{price.per_million_tokens:,.3g}" if price.per_million_tokens is not None else "-"
            mfu = f"{100 * price.mfu:.1f} %"
            yield name, time_text(prediction.block_s), rate, gain, *term_shares(prediction), mfu, money


def _remarks(rows: Mapping[str, JsonObject]) -> list[str]:
    """Return a line for each bottleneck, with the strategies that share it; and why others do not fit or do not exist.

    ``plan, lut: ring steps: compute of rank 0 (RTX-4090 on node)``.
    """
    names_of_remark: dict[str, list[str]] = {}
    without_schedule = []
    for name, row in rows.items():
        if row["predicted"] is None:
            without_schedule.append(row["reason"])
        else:
            does_not_fit = row["reason"] and f"does not fit: {row['reason']}"
            names_of_remark.setdefault(does_not_fit or row["predicted"].bottleneck.text, []).append(name)
    return [*(f"{', '.join(names)}: {remark}" for remark, names in names_of_remark.items()), *without_schedule]


def _pipelines(scenario: Scenario, global_batch: int, as_json: bool) -> None:
    """Predict the plans of all planners of pipelines under one cost model, and print them in one table."""
    from ds_hetero.planner.pipeline_search.balance_bound import balance_bound_s
    from ds_hetero.planner.pipelines.native_types import expect_trainable
    from ds_hetero.planner.pipelines.planning import plan_pipelines, recomputing_or_not

    cluster, model, work = scenario.cluster, scenario.model, scenario.workload
    expect_trainable(cluster.devices, work)
    calibrated = scenario.cost_model == "calibrated"
    models = recomputing_or_not(cluster, model, work) if calibrated else [scenario.stage_costs()]
    planned = plan_pipelines(cluster, model, work, global_batch, costs=None if calibrated else models[0])
    rows = [{"name": "ours", "step_s": planned.step_s, "search_s": planned.search_s}]
    rows += [baseline.to_dict() for baseline in planned.baselines.values()]
    rows += _other_searches(models, planned)
    bound_s = min(balance_bound_s(costs, global_batch) for costs in models)
    rows.append({"name": "bound: perfect balance, free communication", "step_s": bound_s})
    if as_json:
        print_json({"rows": rows, "plan": planned.plan.to_dict()})
        return
    columns = ("planner", "step", "tokens/s", "of our time", "search")
    print_table(columns, (_planner_row(row, planned) for row in rows), "Pipelines under one cost model")


def _other_searches(models: list[StageCosts], planned: PlannedPipelines) -> Iterator[JsonDict]:
    """Yield the results of published planners, each with or without recomputation, whichever is faster."""
    from ds_hetero.planner.pipelines.baselines import best_published
    from ds_hetero.planner.pipelines.planning import MICRO_BATCH_SIZES

    for planner in planners_of("pipelines"):
        started = time.perf_counter()
        baseline = best_published(planner, models, planned.objective, planned.global_batch, MICRO_BATCH_SIZES)
        yield {**baseline.to_dict(), "search_s": time.perf_counter() - started}


def _planner_row(row: JsonObject, planned: PlannedPipelines) -> tuple[str, ...]:
    """Return the cells of a planner, with its step relative to that of the project's planner."""
    search_time = time_text(row["search_s"]) if "search_s" in row else ""
    if row["step_s"] is None:
        return row["name"], "-", "-", str(row.get("reason")), search_time
    rate = planned.global_batch * planned.costs.seq_len / row["step_s"]
    over = f"{row['step_s'] / planned.step_s:.2f} x"
    return row["name"], time_text(row["step_s"]), f"{rate:,.0f}", over, search_time
