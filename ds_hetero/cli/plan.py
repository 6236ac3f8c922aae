"""``ds-hetero plan``: search the best schedule and say why it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_hetero.cli.plan_files import scenario_dict, write_plan
from ds_hetero.cli.printing import check_out, print_json, terms_text
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.planner import PlannedSchedule, plan
from ds_hetero.planner.advice import FewerRanks, OtherStage, faster_with_fewer_ranks, faster_zero_stage
from ds_hetero.plans.reading import SCENARIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["ranks_text", "run", "schedule_table"]


def run(scenario: Scenario, layout: str | None, token_unit: int, out: Path | None, as_json: bool) -> None:
    """Search, print, and write the schedule file if ``out`` is given."""
    if out is not None:
        check_out(out)
    planned = plan(
        scenario.cluster,
        scenario.model,
        scenario.workload,
        cost_model=scenario.cost_model,
        layout=layout,
        token_unit=token_unit,
    )
    described = scenario_dict(scenario.cost_model, scenario.model, scenario.workload, [scenario.cluster])
    if out is not None:
        write_plan(out, planned.schedule.to_dict(), described)
    fewer = faster_with_fewer_ranks(scenario.cost, planned, layout)
    stage = faster_zero_stage(scenario.cost, planned)
    if as_json:
        advice = {"leave_out": fewer and fewer.to_dict(), "zero_stage": stage and stage.to_dict()}
        print_json({**planned.to_dict(), "advice": advice, SCENARIO: described})
        return
    from rich.console import Console

    _print(Console(), scenario, planned, _advice_lines(scenario, planned, fewer, stage))
    if out is not None:
        print(f"written to {out}")


def _advice_lines(
    scenario: Scenario, planned: PlannedSchedule, fewer: FewerRanks | None, stage: OtherStage | None
) -> list[str]:
    """What would be faster than this job, in words."""
    lines, now_s = [], planned.prediction.iteration_s
    if fewer is not None:
        names = [scenario.cluster.devices[rank].name for rank in fewer.left_out]
        devices = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        then_s = fewer.planned.prediction.iteration_s
        lines.append(
            f"leave out:  {ranks_text(fewer.left_out)} ({devices}): a job of the other devices alone takes "
            f"{time_text(then_s)} per iteration, {_less(then_s, now_s)}, for ZeRO's traffic goes over every rank of a "
            f"job, idle ones too. Its schedule: {fewer.planned.name}"
        )
        lines.append("            --parallel full says whether replicas or pipelines make use of all devices")
    if stage is not None:
        lines.append(
            f"ZeRO:       this schedule under stage {stage.stage} takes {time_text(stage.iteration_s)} per iteration, "
            f"{_less(stage.iteration_s, now_s)}, and fits"
        )
    return lines


def _less(then_s: float, now_s: float) -> str:
    return f"{100 * (1 - then_s / now_s):.0f} % less"


def _print(console: Console, scenario: Scenario, planned: PlannedSchedule, advice: list[str]) -> None:
    work, prediction = scenario.workload, planned.prediction
    console.print(schedule_table(scenario, planned))
    lines = [
        f"{scenario.model.name}, {work.seq_len} tokens x {work.micro_batch}, {'causal' if work.causal else 'full'}, "
        f"{scenario.cost_model} cost model; searched for {time_text(planned.search_s)}",
        f"chosen:     {planned.name}",
        f"predicted:  {time_text(prediction.block_s)} per block, {time_text(prediction.iteration_s)} per iteration, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)})",
        f"bottleneck: {prediction.bottleneck.text}",
        f"bound:      {100 * planned.of_bound:.1f} % of the speed at perfect balance with free communication",
    ]
    if planned.idle:
        lines.append(f"idle:       {ranks_text(planned.idle)}; over these links they would cost more than they add")
    console.print("\n".join(lines + advice), markup=False, highlight=False, soft_wrap=True)
    console.print(_baseline_table(planned))
    for rejected in planned.rejected:
        console.print(f"not {rejected.name}: {rejected.reason}", markup=False, highlight=False, soft_wrap=True)


def schedule_table(scenario: Scenario, planned: PlannedSchedule) -> Table:
    """Ranks that do the same in one row: group, device, tokens, heads, memory."""
    from rich.table import Table

    title = f"Schedule, {planned.schedule.layout}, ring order from top to bottom"
    table = Table("ring", "ranks", "device", "tokens", "heads", "memory GiB", "of", title=title)
    tokens = planned.schedule.tokens(scenario.workload.seq_len)
    capacity = scenario.cost.capacity_bytes_D
    for position, group in enumerate(planned.schedule.ring_groups):
        rows: dict[tuple[str, ...], list[int]] = {}
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            need = bytes_text(planned.prediction.memory_bytes[rank]), bytes_text(capacity[rank])
            share = scenario.cluster.devices[rank].name, str(tokens[rank]), str(heads)
            rows.setdefault((*share, *need), []).append(rank)
        for row, ranks in rows.items():
            table.add_row(str(position), ranks_text(ranks), *row)
    return table


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _baseline_table(planned: PlannedSchedule) -> Table:
    from rich.table import Table

    table = Table("baseline", "block", "tokens/s", "plan is faster by", title="Against uniform schedules")
    for kind, prediction in planned.baselines.items():
        if prediction is None:
            table.add_row(kind, "-", "-", planned.baseline_reasons[kind])
        else:
            faster = planned.prediction.tokens_per_s / prediction.tokens_per_s
            rate = f"{prediction.tokens_per_s:,.0f}"
            table.add_row(planned.baseline_names[kind], time_text(prediction.block_s), rate, f"{faster:.2f} x")
    return table
