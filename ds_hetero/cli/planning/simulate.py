"""``ds-hetero simulate``: predicts the time and the memory of a given schedule or plan of pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, PLAN_FILE
from ds_hetero.cli.printing import prediction_lines, print_json, print_lines, print_table
from ds_hetero.cli.scenario import Scenario, predict_plan_file, read_schedule, scenario_options
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.planner.results.sentences import describe
from ds_hetero.values.schedule import Schedule


@click.command
@scenario_options()
@click.option("--schedule", help="Schedule file, output of plan --json, or a strategy's name.")
@PLAN_FILE
@AS_JSON
def simulate(scenario: Scenario, schedule: str | None, plan: Path | None, as_json: bool) -> None:
    """Predict time and memory of a given schedule or plan of pipelines."""
    if plan is not None:
        _pipelines(scenario, plan, as_json)
    elif schedule is not None:
        _schedule(scenario, schedule, as_json)
    else:
        raise click.UsageError("give --schedule or --plan.")


def _schedule(scenario: Scenario, source: str, as_json: bool) -> None:
    """Predict a schedule, and print the prediction, also if the schedule does not fit into memory."""
    cost = scenario.cost
    schedule = read_schedule(source, cost)
    prediction = cost.predict(schedule)
    if as_json:
        # Keys of the prediction are at the top, and again under "predicted", as in the output of plan.
        predicted = prediction.to_dict()
        print_json({**predicted, "predicted": predicted, "schedule": schedule.to_dict()})
        return
    columns = ("rank", "device", "tokens", "heads", "busy", "memory GiB", "of")
    print_table(columns, _rank_rows(cost, schedule, prediction), describe(schedule, scenario.cluster))
    bound = f"{100 * prediction.bound_s / prediction.block_s:.1f} % of the speed at perfect balance"
    lines = (*prediction_lines(prediction), f"bound:      {bound}", f"memory:     {prediction.reason or 'fits'}")
    print_lines(*lines)


def _rank_rows(cost: CostModel, schedule: Schedule, prediction: Prediction) -> Iterator[tuple[str, ...] | None]:
    """Yield the row of each rank, and None, which draws a line, after each group."""
    tokens = schedule.tokens(cost.workload.seq_len)
    for group in schedule.ring_groups:
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            busy = f"{100 * prediction.busy_s[rank] / prediction.block_s:.0f} %"
            needed, capacity = bytes_text(prediction.memory_bytes[rank]), bytes_text(cost.capacity_bytes_D[rank])
            row = (rank, cost.cluster.devices[rank].name, f"{tokens[rank]:,}", heads, busy, needed, capacity)
            yield tuple(map(str, row))
        yield None


def _pipelines(scenario: Scenario, path: Path, as_json: bool) -> None:
    """Predict a plan of pipelines, and print the prediction."""
    from ds_hetero.cli.printing import print_pipelines
    from ds_hetero.planner.pipeline_search.finish import memory_by_rank
    from ds_hetero.planner.pipelines.explain import reasons_of

    plan, costs, finished = predict_plan_file(scenario, path)
    reasons = reasons_of(costs, finished)
    if as_json:
        ranks = [[stage.ranks for stage in pipeline.stages] for pipeline in plan.pipelines]
        bytes_by_rank = {str(rank): needed for rank, needed in memory_by_rank(costs, finished, ranks).items()}
        predicted = {
            "cost_model": costs.name,
            "step_s": finished.step_s,
            "pipeline_s": list(finished.pipeline_s),
            "gradients_s": finished.candidate.gradients_s,
            "memory_bytes": bytes_by_rank,
        }
        print_json({"predicted": predicted, "plan": plan.to_dict(), "reasons": reasons})
        return
    print_pipelines(costs, finished)
    print_lines(f"predicted:  {time_text(finished.step_s)} per step", *(f"            {reason}" for reason in reasons))
