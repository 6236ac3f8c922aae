"""``ds-hetero replicas``: a schedule and micro-batches for every replica, so that all finish together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_hetero.cli.plan_files import scenario_dict, write_plan
from ds_hetero.cli.printing import check_out, print_json
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.planner.micro_batches import ReplicasPlan, plan_replicas
from ds_hetero.plans import Plan
from ds_hetero.plans.reading import SCENARIO

__all__ = ["run"]


def run(scenarios: Sequence[Scenario], global_batch: int, layout: str | None, out: Path | None, as_json: bool) -> None:
    """Plan, print, and write the file of replicas if ``out`` is given; ``scenarios`` differ in their clusters only."""
    if out is not None:
        check_out(out)
    first = scenarios[0]
    planned = plan_replicas(
        [scenario.cluster for scenario in scenarios],
        first.model,
        first.workload,
        global_batch,
        cost_model=first.cost_model,
        layout=layout,
    )
    schedule = Plan.of_replicas(planned.schedules, planned.split).to_replicas_dict()
    clusters = [scenario.cluster for scenario in scenarios]
    described = scenario_dict(first.cost_model, first.model, first.workload, clusters)
    if out is not None:
        write_plan(out, schedule, described)
    if as_json:
        predicted = {"step_s": planned.step_s, "busy_s": planned.busy_s, "even_step_s": planned.even_s}
        print_json(
            {"schedule": schedule, "global_batch": planned.split.samples, "predicted": predicted, SCENARIO: described}
        )
        return
    _print(scenarios, planned)
    if out is not None:
        print(f"written to {out}")


def _print(scenarios: Sequence[Scenario], planned: ReplicasPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    split = planned.split
    table = Table("replica", "ranks", "schedule", "micro-batches", "samples", "busy", title=f"Replicas, {split}")
    for i, (plan, schedule) in enumerate(zip(planned.plans, planned.schedules, strict=True)):
        ranks = f"{schedule.ranks[0]}-{schedule.ranks[-1]}" if schedule.sp_size > 1 else str(schedule.ranks[0])
        batches = f"{split.micro_batches[i]} of {split.micro_batch_sizes[i]}"
        busy = f"{100 * planned.busy_s[i] / planned.step_s:.0f} %"
        table.add_row(str(i), ranks, plan.name, batches, str(split.samples_of[i]), busy)
    console = Console()
    console.print(table)
    rate = split.samples * scenarios[0].workload.seq_len / planned.step_s
    text = f"predicted:  {time_text(planned.step_s)} per optimizer step, {rate:,.0f} tokens/s"
    if planned.even_s is not None:
        text += f"; {planned.even_s / planned.step_s:.2f} x as fast as the same micro-batches on every replica"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
