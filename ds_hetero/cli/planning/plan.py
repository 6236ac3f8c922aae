"""``ds-hetero plan``: searches for the best schedule, or the best pipelines, and explains the choice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ds_hetero.cli.options import (
    AS_JSON,
    FILE,
    GLOBAL_BATCH,
    LAYOUT,
    PARALLEL,
    SEED,
    TRAINED_TOKENS,
    batch_of_pipelines,
    same_line,
)
from ds_hetero.cli.printing import (
    PLANS,
    check_out,
    prediction_lines,
    print_json,
    print_table,
    print_written,
    rank_ranges,
    write_plan,
)
from ds_hetero.cli.scenario import Scenario, scenario_options
from ds_hetero.common.reading import JsonObject
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.price import Price
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.errors import MemoryPlanError
from ds_hetero.planner import plan as plan_schedule
from ds_hetero.planner.fewer_ranks import FewerRanks, faster_with_fewer_ranks
from ds_hetero.planner.results.pipelines import PlannedPipelines
from ds_hetero.planner.results.planned import Planned
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.zero_stage import OtherStage, faster_zero_stage
from ds_hetero.reporting.assumptions import assumed_line, assumptions
from ds_hetero.values.plans.plan import SCENARIO

if TYPE_CHECKING:
    from ds_hetero.planner.documents.for_lengths import PlannedForLengths
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate

_LENGTHS_HELP = (
    "Plan for batches of documents: a JSON file of lengths, or arxiv, github or prolong64k; --seq-len is the length "
    "of a row."
)
_SAMPLED_BATCHES = 8  # drawn from a distribution of lengths; chosen, never measured


class _Answer(NamedTuple):
    """Result of a search."""

    plan: JsonObject  # content of the plan file
    scenario: Scenario  # of the plan
    data: Callable[[], JsonObject]  # returns the output for machines
    show: Callable[[], None]  # prints the output for people


@click.command
@scenario_options()
@LAYOUT
@click.option("--token-unit", type=int, default=1, help="Hand out tokens in multiples of this.")
@PARALLEL
@GLOBAL_BATCH
@click.option("--objective", default="time", help="For --parallel full: time, cost, energy, or pareto for all three.")
@click.option("--at-most-s", type=float, help="Longest step, for the objectives cost and energy.")
@TRAINED_TOKENS
@click.option("--planner", help="A published planner in the place of ours; an unknown name lists them.")
@click.option("--lengths", help=_LENGTHS_HELP)
@SEED
@click.option("--out", type=FILE, help="Plan file to write, .json, or a page of it, .html; for pareto a picture, .png.")
@AS_JSON
def plan(
    scenario: Scenario,
    layout: str | None,
    token_unit: int,
    parallel: str,
    global_batch: int | None,
    objective: str,
    at_most_s: float | None,
    trained: float,
    planner: str | None,
    lengths: str | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Search the best schedule, or the best pipelines, for a cluster, a model and a length, and say why."""
    work, samples = scenario.workload, batch_of_pipelines(parallel, global_batch)
    if samples is not None:
        if (work.micro_batch, work.micro_batches, layout, token_unit, lengths) != (1, 1, None, 1, None):
            raise click.UsageError(
                "--parallel full chooses micro-batches, layouts and tokens itself. Leave --micro-batch, "
                "--micro-batches, --layout, --token-unit and --lengths out."
            )
    elif lengths is not None and (layout, token_unit) != (None, 1):
        raise click.UsageError("--lengths chooses layouts and tokens itself. Leave --layout and --token-unit out.")
    if planner is not None and (lengths is not None or token_unit != 1):
        raise click.UsageError("--planner takes neither --lengths nor --token-unit.")
    if objective == "pareto":
        _front(scenario, samples, out, as_json, is_bound=at_most_s is not None or planner is not None)
        return
    check_out(out, endings=PLANS)
    if samples is not None:
        answer = _pipelines(scenario, samples, (objective, at_most_s), planner, trained, as_json)
    elif lengths is not None:
        answer = _for_lengths(scenario, lengths, seed)
    else:
        answer = _schedule(scenario, layout, token_unit, planner, trained)
    if out is not None:
        write_plan(out, answer.plan, answer.scenario.to_dict())
    if as_json:
        print_json(answer.data())
        return
    answer.show()
    print_written(out)


def _front(scenario: Scenario, samples: int | None, out: Path | None, as_json: bool, *, is_bound: bool) -> None:
    """Search for the Pareto front of time, money and energy.

    Args:
        is_bound: whether the options name a planner or a longest step, which the front does not take.
    """
    if samples is None or is_bound:
        raise click.UsageError(
            "--objective pareto is for --parallel full, without --at-most-s and --planner. "
            "Give --parallel full and leave the other two out, or choose another objective."
        )
    from ds_hetero.cli.planning.pareto import show_front

    show_front(scenario, samples, out, as_json=as_json)


def _schedule(scenario: Scenario, layout: str | None, token_unit: int, planner: str | None, trained: float) -> _Answer:
    """Search for the best schedule of one replica, or for that of a published planner."""
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
            f"{error} This says which changes are enough, and what they cost: {same_line(fit)}"
        ) from None
    fewer: FewerRanks | None = None
    stage: OtherStage | None = None
    if planner is None:  # a published planner's schedule is shown as it is
        fewer = faster_with_fewer_ranks(scenario.cost, planned, layout)
        stage = faster_zero_stage(scenario.cost, planned.schedule, planned.prediction.iteration_s)
    advice = {"leave_out": fewer and fewer.to_dict(), "zero_stage": stage and stage.to_dict()}
    price = _price(scenario, planned)
    lines = [*price.lines(trained), assumed_line(scenario)]
    show = partial(_show_schedule, scenario, planned, lines, fewer, stage)
    return _answer(scenario, planned, planned.schedule.to_dict(), show, price=price.to_dict(trained), advice=advice)


def _answer(
    scenario: Scenario, planned: Planned, plan_file: JsonObject, show: Callable[[], None], **further: Any
) -> _Answer:
    def data() -> JsonObject:
        return {**planned.to_dict(), **further, "assumed": assumptions(scenario), SCENARIO: scenario.to_dict()}

    return _Answer(plan_file, scenario, data, show)


def _price(scenario: Scenario, planned: Planned) -> Price:
    work = scenario.workload
    flops = training_flops(scenario.model, work.seq_len, causal=work.causal)
    return planned.price(scenario.cluster.devices, flops)


def _show_schedule(
    scenario: Scenario,
    planned: PlannedSchedule,
    further: Sequence[str],
    fewer: FewerRanks | None,
    stage: OtherStage | None,
) -> None:
    work, layout = scenario.workload, planned.schedule.layout
    columns = ("ring", "ranks", "device", "tokens", "heads", "memory GiB", "of")
    print_table(columns, _ranks(scenario, planned), f"Schedule, {layout}, ring order from top to bottom")
    lines = [
        f"{scenario.model.name}, {work.seq_len} tokens x {work.micro_batch}, {'causal' if work.causal else 'full'}, "
        f"{scenario.cost_model} cost model; searched for {time_text(planned.search_s)}",
        f"chosen:     {planned.name}{_by(planned)}",
        *prediction_lines(planned.prediction),
        f"bound:      {100 * planned.of_bound:.1f} % of the speed at perfect balance with free communication",
    ]
    lines += further
    if planned.idle_ranks:
        lines.append(
            f"idle:       {rank_ranges(planned.idle_ranks)}; over these links they would cost more than they add"
        )
    print("\n".join((*lines, *_advice_lines(scenario, planned, fewer, stage))))
    if rows := list(_baselines(planned)):
        print_table(("baseline", "block", "tokens/s", "plan is faster by"), rows, "Against uniform schedules")
    names_of: dict[str, list[str]] = {}
    for rejected in planned.rejected:
        names_of.setdefault(rejected.reason, []).append(rejected.name)
    for reason, names in names_of.items():
        print(f"not {', '.join(dict.fromkeys(names))}: {reason}")


def _ranks(scenario: Scenario, planned: PlannedSchedule) -> Iterator[tuple[str, ...]]:
    """Rows of the table of ranks; equal ranks of a group are one row."""
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


def _baselines(planned: PlannedSchedule) -> Iterator[tuple[str, ...]]:
    """Rows of the baselines that exist and fit; the others are listed as rejected, with their reasons."""
    for kind, prediction in planned.baselines.items():
        if prediction is not None:
            faster = planned.prediction.tokens_per_s / prediction.tokens_per_s
            rate = f"{prediction.tokens_per_s:,.0f}"
            yield planned.baseline_names[kind], time_text(prediction.block_s), rate, f"{faster:.2f} x"


def _advice_lines(
    scenario: Scenario, planned: PlannedSchedule, fewer: FewerRanks | None, stage: OtherStage | None
) -> list[str]:
    """Lines of advice for a faster job."""
    lines, now_s = [], planned.prediction.iteration_s
    if fewer is not None:
        names = [scenario.cluster.devices[rank].name for rank in fewer.left_out]
        devices = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        then_s = fewer.planned.prediction.iteration_s
        lines.append(
            f"leave out:  {rank_ranges(fewer.left_out)} ({devices}): a job of the other devices alone takes "
            f"{time_text(then_s)} per iteration, {_less(then_s, now_s)}, for ZeRO's traffic goes over every rank of a "
            f"job, idle ones too. Its schedule: {fewer.planned.name}"
        )
        lines.append("            --parallel full says whether replicas or pipelines make use of all devices")
    if stage is not None:
        lines.append(
            f"ZeRO:       this schedule under stage {stage.name} takes {time_text(stage.iteration_s)} per iteration, "
            f"{_less(stage.iteration_s, now_s)}, and fits"
        )
    return lines


def _less(then_s: float, now_s: float) -> str:
    return f"{100 * (1 - then_s / now_s):.0f} % less"


def _for_lengths(scenario: Scenario, source: str, seed: int) -> _Answer:
    """Choose the schedule that is fastest for batches of documents, drawn from the distribution ``source``."""
    from ds_hetero.cli.options import draw_batches, read_distribution
    from ds_hetero.planner.documents.for_lengths import plan_for_lengths

    distribution, work = read_distribution(source), scenario.workload
    batches = draw_batches(distribution, work.seq_len, _SAMPLED_BATCHES, seed)
    planned = plan_for_lengths(scenario.cost_of_documents, batches)
    blocks_s = (planned.best.block_s or 1.0) * scenario.model.num_layers
    tokens_per_s = work.seq_len * work.micro_batch / blocks_s
    schedule = planned.best.schedule.to_dict()
    data = {
        "schedule": schedule,
        "predicted": {**planned.best.to_dict(), "tokens_per_s": tokens_per_s},
        "candidates": [candidate.to_dict() for candidate in planned.candidates],
        "lengths": {"distribution": distribution.name, "batches": planned.batches, "seed": seed},
    }
    show = partial(_show_for_lengths, scenario, planned, distribution.name, tokens_per_s)
    return _Answer(schedule, replace(scenario, lengths=tuple(batches[0])), lambda: data, show)


def _show_for_lengths(scenario: Scenario, planned: PlannedForLengths, distribution: str, tokens_per_s: float) -> None:
    columns = ("schedule", "block", "over ideal", "as a stream")
    print_table(columns, _candidates(planned), "Schedules for batches of documents")
    print(
        f"{scenario.model.name}, rows of {scenario.workload.seq_len} tokens, documents as in {distribution}, "
        f"{planned.batches} batches\n"
        f"chosen:     {planned.best.name}\n"
        f"predicted:  {time_text(planned.best.block_s or 0.0)} per block, "
        f"{tokens_per_s:,.0f} tokens/s through all blocks"
    )


def _candidates(planned: PlannedForLengths) -> Iterator[tuple[str, ...]]:
    """One row per schedule: mean time of a block, over that at perfect balance, and as one stream of tokens."""
    ideal_s = planned.candidates[0].ideal_s
    for candidate in planned.candidates:
        if candidate.block_s is None or candidate.stream_s is None:
            yield candidate.name, "-", "-", str(candidate.reason)
        else:
            over = f"{candidate.block_s / ideal_s:.3f}"
            yield candidate.name, time_text(candidate.block_s), over, time_text(candidate.stream_s)


def _by(planned: Planned) -> str:
    return f", by planner {planned.planner}" if planned.planner is not None else ""


def _pipelines(
    scenario: Scenario,
    global_batch: int,
    goal: tuple[str, float | None],
    planner: str | None,
    trained: float,
    as_json: bool,
) -> _Answer:
    """Search for pipelines of unequal stages, or for those of a published planner.

    Args:
        goal: objective, and seconds of the longest step.
    """
    from ds_hetero.planner.pipelines.native_types import expect_trainable
    from ds_hetero.planner.pipelines.planning import plan_pipelines

    expect_trainable(scenario.cluster.devices, scenario.workload)
    costs = None if scenario.cost_model == "calibrated" else scenario.stage_costs()
    progress = _Progress(as_json)
    planned = plan_pipelines(
        scenario.cluster,
        scenario.model,
        scenario.workload,
        global_batch,
        costs=costs,
        objective=goal[0],
        at_most_s=goal[1],
        progress=progress,
        planner=planner,
    )
    progress.end()
    price = _price(scenario, planned)
    lines = [*price.lines(trained), assumed_line(scenario)]
    show = partial(_show_pipelines, scenario, planned, lines)
    return _answer(scenario, planned, planned.plan.to_dict(), show, price=price.to_dict(trained))


def _show_pipelines(scenario: Scenario, planned: PlannedPipelines, further: Sequence[str]) -> None:
    from ds_hetero.cli.printing import print_pipelines

    if planned.finished is not None:
        print_pipelines(planned.costs, planned.finished)
    else:
        print(f"one stage of sequence parallelism over ranks {planned.plan.ranks[0]} to {planned.plan.ranks[-1]}")
    recomputed = {True: "with", False: "without"}[bool(planned.plan.activation_checkpointing)]
    lines = [
        f"{scenario.model.name}, {planned.global_batch} sequences of {scenario.workload.seq_len} tokens per step, "
        f"{planned.costs.name} cost model; searched for {time_text(planned.search_s)}"
        f"{', then interrupted: the best plan so far' if planned.interrupted else ''}{_by(planned)}",
        f"predicted:  {time_text(planned.step_s)} per step, {planned.tokens_per_s:,.0f} tokens/s, {recomputed} "
        "recomputation",
    ]
    if planned.objective.name == "energy":
        lines.append(f"objective:  {planned.value:.4g} joules per token")
    lines += further
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(planned.reasons)]
    for rival in planned.rivals.values():
        if rival.value is None:
            lines.append(f"not {rival.name}: {rival.reason}")
        else:
            times = f"{rival.value / planned.value:.2f} x as much"
            lines.append(f"not {rival.name}: {times} ({time_text(rival.step_s or 0)} per step)")
    print("\n".join(lines))


class _Progress:
    """Line on stderr that shows the progress of a long search, if stderr is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._watched = not quiet and sys.stderr.isatty()
        self._shown = False

    def __call__(self, best: PlanCandidate, share: float) -> None:
        """Show the best step so far."""
        if self._watched:
            from ds_hetero.planner.pipelines.explain import shape_text

            self._shown = True
            step = f"{shape_text(best)}, {time_text(best.step_s)} per step"
            print(f"\r{100 * share:3.0f} %  {step} (Ctrl-C takes it)\033[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
