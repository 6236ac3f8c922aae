"""Answer of ``ds-hetero plan``: the best schedule of one replica under given settings, with its explanation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ds_hetero.cli.options import command_line_of
from ds_hetero.cli.planning.answer import Answer, answer_of, planner_text, price_of_plan
from ds_hetero.cli.printing import prediction_lines, print_lines, print_table, rank_ranges
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.errors import MemoryPlanError
from ds_hetero.planner import plan as plan_schedule
from ds_hetero.planner.expert_choice import OtherExperts, other_experts, other_experts_text
from ds_hetero.planner.fewer_ranks import FewerRanks, faster_with_fewer_ranks
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.zero_stage import OtherStage, faster_zero_stage
from ds_hetero.reporting.assumptions import assumed_line


def schedule_answer(
    scenario: Scenario, layout: str | None, token_unit: int, planner: str | None, trained: float
) -> Answer:
    """Search for the best schedule of one replica, or let a published planner search for its schedule."""
    try:
        planned = plan_schedule(
            scenario.cluster,
            scenario.model,
            scenario.workload,
            cost_model=scenario.cost_model,
            layout=layout,
            token_unit=token_unit,
            planner=planner,
        )
    except MemoryPlanError as error:
        from ds_hetero.cli.planning.fit import fit

        raise MemoryPlanError(
            f"{error} To see which changes are enough, and what they cost, run: {command_line_of(fit)}"
        ) from None
    fewer: FewerRanks | None = None
    stage: OtherStage | None = None
    experts: OtherExperts | None = None
    if planner is None:  # the schedule of a published planner is shown without advice
        fewer = faster_with_fewer_ranks(scenario.cost, planned, layout)
        stage = faster_zero_stage(scenario.cost, planned.schedule, planned.prediction.iteration_s)
        experts = other_experts(scenario.cost, planned.schedule)
    advice = {
        "leave_out": fewer and fewer.to_dict(),
        "zero_stage": stage and stage.to_dict(),
        "experts": experts and experts.to_dict(),
    }
    price = price_of_plan(scenario, planned)
    lines = [*price.lines(trained), assumed_line(scenario)]
    lines += [] if experts is None else [f"experts:    {other_experts_text(experts)}"]
    show = partial(show_schedule, scenario, planned, lines, fewer, stage)
    return answer_of(scenario, planned, planned.schedule.to_dict(), show, price=price.to_dict(trained), advice=advice)


def show_schedule(
    scenario: Scenario,
    planned: PlannedSchedule,
    further: Sequence[str],
    fewer: FewerRanks | None,
    stage: OtherStage | None,
) -> None:
    """Print a schedule with its prediction, advice, baselines, and the candidates that do not fit.

    Args:
        further: lines on the price and the assumptions.
        fewer: a faster job on fewer ranks; None if there is none.
        stage: a faster ZeRO stage; None if there is none.
    """
    work, layout = scenario.workload, planned.schedule.layout
    columns = ("ring", "ranks", "device", "tokens", "heads", "memory GiB", "of")
    print_table(columns, _rank_rows(scenario, planned), f"Schedule, {layout}, ring order from top to bottom")
    lines = [
        f"{scenario.model.name}, {work.seq_len} tokens x {work.micro_batch}, {'causal' if work.causal else 'full'}, "
        f"{scenario.cost_model} cost model; searched for {time_text(planned.search_s)}",
        f"chosen:     {planned.name}{planner_text(planned)}",
        *prediction_lines(planned.prediction),
        f"bound:      {100 * planned.of_bound:.1f} % of the speed at perfect balance with free communication",
    ]
    lines += further
    if planned.idle_ranks:
        lines.append(
            f"idle:       {rank_ranges(planned.idle_ranks)} compute nothing: over these links they would cost more "
            f"than they add{_memory_of_idle(planned)}"
        )
    print_lines(*lines, *_advice_lines(scenario, planned, fewer, stage))
    if rows := list(_baseline_rows(planned)):
        print_table(("baseline", "block", "tokens/s", "plan is faster by"), rows, "Against uniform schedules")
    names_by_reason: dict[str, list[str]] = {}
    for rejected in planned.rejected:
        names_by_reason.setdefault(rejected.reason, []).append(rejected.name)
    for reason, names in names_by_reason.items():
        print_lines(f"not {', '.join(dict.fromkeys(names))}: {reason}")


def _memory_of_idle(planned: PlannedSchedule) -> str:
    """Return a text on the largest memory of an idle rank, the end of a line; empty if idle ranks hold nothing.

    ``; each needs up to 12.5 GiB for its part of the model states``.
    """
    most_bytes = max(planned.prediction.memory_bytes[rank] for rank in planned.idle_ranks)
    return f"; each needs up to {bytes_text(most_bytes)} GiB for its part of the model states" if most_bytes else ""


def _rank_rows(scenario: Scenario, planned: PlannedSchedule) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of ranks, one for each set of equal ranks of a group."""
    tokens = planned.schedule.tokens(scenario.workload.seq_len)
    capacity = scenario.cost.capacity_bytes_D
    for position, group in enumerate(planned.schedule.ring_groups):
        ranks_of_row: dict[tuple[str, ...], list[int]] = {}
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            cells = (
                scenario.cluster.devices[rank].name,
                str(tokens[rank]),
                str(heads),
                bytes_text(planned.prediction.memory_bytes[rank]),
                bytes_text(capacity[rank]),
            )
            ranks_of_row.setdefault(cells, []).append(rank)
        for row, ranks in ranks_of_row.items():
            yield (str(position), rank_ranges(ranks), *row)


def _baseline_rows(planned: PlannedSchedule) -> Iterator[tuple[str, ...]]:
    """Yield a row for each uniform schedule that fits; `show_schedule` prints why the others do not."""
    for kind, prediction in planned.baselines.items():
        if prediction is not None:
            faster = planned.prediction.tokens_per_s / prediction.tokens_per_s
            rate = f"{prediction.tokens_per_s:,.0f}"
            yield planned.baseline_names[kind], time_text(prediction.block_s), rate, f"{faster:.2f} x"


def _advice_lines(
    scenario: Scenario, planned: PlannedSchedule, fewer: FewerRanks | None, stage: OtherStage | None
) -> list[str]:
    """Return lines that advise a job on fewer ranks or another ZeRO stage, if that is faster."""
    lines, now_s = [], planned.prediction.iteration_s
    if fewer is not None:
        names = [scenario.cluster.devices[rank].name for rank in fewer.left_out]
        devices = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        then_s = fewer.planned.prediction.iteration_s
        lines.append(
            f"leave out:  {rank_ranges(fewer.left_out)} ({devices}): a job of the other devices alone takes "
            f"{time_text(then_s)} per iteration, {_saving_text(then_s, now_s)}, for ZeRO's traffic goes over every "
            f"rank of a job, idle ones too. Its schedule: {fewer.planned.name}"
        )
        lines.append("            --parallel full says whether replicas or pipelines make use of all devices")
    if stage is not None:
        lines.append(
            f"ZeRO:       this schedule under stage {stage.name} takes {time_text(stage.iteration_s)} per iteration, "
            f"{_saving_text(stage.iteration_s, now_s)}, and fits"
        )
    return lines


def _saving_text(then_s: float, now_s: float) -> str:
    """Return by how much a time gets shorter: ``25 % less`` for 3 s instead of 4 s."""
    return f"{100 * (1 - then_s / now_s):.0f} % less"
