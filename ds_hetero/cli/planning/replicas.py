"""``ds-hetero replicas``: plans a schedule and micro-batches for every replica, so that all finish together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE, LAYOUT
from ds_hetero.cli.printing import PLANS, check_out, print_json, print_lines, print_table, print_written, write_plan
from ds_hetero.cli.scenario import CLUSTERS_OF_REPLICAS, Scenario, scenario_options
from ds_hetero.common.text import time_text
from ds_hetero.planner.micro_batches import ReplicasPlan, plan_replicas
from ds_hetero.values.plans import Plan
from ds_hetero.values.plans.plan import SCENARIO


@click.command
@scenario_options(CLUSTERS_OF_REPLICAS, batch=False)
@click.option("--global-batch", type=int, required=True, help="Sequences per optimizer step, over all replicas.")
@LAYOUT
@click.option("--out", type=FILE, help="Schedule file to write, .json, or a page of it, .html.")
@AS_JSON
def replicas(scenario: Scenario, global_batch: int, layout: str | None, out: Path | None, as_json: bool) -> None:
    """Schedules and micro-batches for replicas that differ, so that all finish together."""
    check_out(out, endings=PLANS)
    planned = plan_replicas(
        scenario.clusters,
        scenario.model,
        scenario.workload,
        global_batch,
        cost_model=scenario.cost_model,
        layout=layout,
    )
    schedule = Plan.of_replicas(planned.schedules, planned.split).to_replicas_dict()
    scenario_data = scenario.to_dict()
    if out is not None:
        write_plan(out, schedule, scenario_data)
    if as_json:
        predicted = {"step_s": planned.step_s, "busy_s": planned.busy_s, "even_step_s": planned.even_s}
        print_json(
            {
                "schedule": schedule,
                "global_batch": planned.split.samples,
                "predicted": predicted,
                SCENARIO: scenario_data,
            }
        )
        return
    columns = ("replica", "ranks", "schedule", "micro-batches", "samples", "busy")
    print_table(columns, _rows(planned), f"Replicas, {planned.split}")
    rate = planned.split.samples * scenario.workload.seq_len / planned.step_s
    text = f"predicted:  {time_text(planned.step_s)} per optimizer step, {rate:,.0f} tokens/s"
    if planned.even_s is not None:
        text += f"; {planned.even_s / planned.step_s:.2f} x as fast as the same micro-batches on every replica"
    print_lines(text)
    print_written(out)


def _rows(planned: ReplicasPlan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each replica: ranks, schedule, micro-batches, samples, and the share of the step it works."""
    split = planned.split
    for i, (plan, schedule) in enumerate(zip(planned.plans, planned.schedules, strict=True)):
        ranks = f"{schedule.ranks[0]}-{schedule.ranks[-1]}" if schedule.sp_size > 1 else str(schedule.ranks[0])
        batches = f"{split.micro_batches[i]} of {split.micro_batch_sizes[i]}"
        busy = f"{100 * planned.busy_s[i] / planned.step_s:.0f} %"
        yield str(i), ranks, plan.name, batches, str(split.samples_by_pipeline[i]), busy
