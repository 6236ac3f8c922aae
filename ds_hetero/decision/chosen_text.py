"""What a job has chosen, in the few lines of 80 columns that rank 0 prints at the start.

The number of lines does not grow with the number of ranks: equal ranks share a row, and rows that are too many are
counted. `ds_hetero.decision.start_text` has every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ds_hetero.common.announce import PREFIX
from ds_hetero.common.terminal import fitted_text
from ds_hetero.common.text import bytes_text, rank_ranges, time_text
from ds_hetero.cost import Workload
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.decide_pipelines import SearchedPipelines
from ds_hetero.decision.forecast import Forecast
from ds_hetero.decision.start_text import against_baselines, equal_replicas, remark_lines
from ds_hetero.planner.results.sentences import describe
from ds_hetero.values.plans import Pipeline, Plan, Stage

WIDTH = 80  # columns of a terminal that nobody has made wider
START_TEXT_LINES = 10  # of a text here; with the line "ds_hetero: on, ..." and that of the measurement, 12
_LISTED_STAGES = 3  # stages of a pipeline that are listed; this and the next are chosen, never measured
_LISTED_RANGES = 4  # runs of ranks in a row


def chosen_schedules_text(forecasts: Sequence[Forecast]) -> str:
    """Return the shares of the ranks and the prediction of a job's schedules, in at most `START_TEXT_LINES` lines.

    The lines are: a title (``the schedule for 1 x 8,192 tokens, ZeRO-2``), one row for each set of equal ranks, the
    predicted time of the slowest replica, and its bottleneck.
    """
    kinds = equal_replicas(forecasts)
    slowest = max(forecasts, key=lambda forecast: forecast.prediction.iteration_s)
    first = f"the schedule for {_work_text(slowest.cost.workload)}"
    if len(kinds) == 1:
        numbers = ", ".join(map(str, kinds[0]))
        name = f"replica {numbers}: " if len(forecasts) > 1 else ""
        first_lines = [first, f"{name}{_shape(forecasts[0])}"]
        rows: list[str] = _rank_rows(forecasts[0])
    else:
        first_lines = [first]
        rows = [_replica_row(numbers, forecasts[numbers[0]]) for numbers in kinds]
    prediction = slowest.prediction
    last_lines = [
        f"predicted:  {time_text(prediction.iteration_s)} per step, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{100 * prediction.bound_s / prediction.block_s:.0f} % of perfect balance",
        f"bottleneck: {prediction.bottleneck.text}",
        *remark_lines(slowest),
    ]
    if slowest.planned is not None:
        search_time = time_text(slowest.planned.search_s)
        last_lines.append(f"gain:       {against_baselines(slowest.planned)}; the search took {search_time}")
    return _within_limit(first_lines, rows, last_lines, lambda number: f"  and {number} more: see handle.plan")


def kept_attention_lines(start: JobStart) -> Iterator[str]:
    """Yield what ``"keep_attention"`` does not do for this job; nothing if it is off or does all."""
    if not start.keeps_attention:
        return
    model = start.facts.model
    if not model.checkpointing:
        yield (
            f'"keep_attention" has no effect so far: no layer of {model.name} is checkpointed. Call '
            "model.activation_checkpointing_enable(), or leave the key out"
        )
    elif model.spec is not None and model.spec.recurrent is not None:
        yield (
            f'"keep_attention" keeps the {model.spec.attention_layers} attention layers of {model.name}; the backward '
            "computes its linear-attention or SSM layers again, with their messages"
        )


BF16_ROUNDOFF = 2.0**-8  # largest relative error of rounding to bfloat16, which has 8 significant bits


def ring_gradient_lines(start: JobStart) -> Iterator[str]:
    """Yield that ``"ring_gradients"`` rounds messages, and the error; nothing if they travel as they add up.

    The error is that of `ds_hetero.runtime.attention.lane_mail.GradientBlocks`. A ring of K groups has K - 1 hops.
    """
    value = start.section.ring_gradients
    if value == "fp32":
        return
    stages = chain.from_iterable(pipeline.stages for pipeline in start.plan.pipelines)
    hops = max((stage.schedule.ring_size for stage in stages if stage.schedule is not None), default=1) - 1
    if hops == 0:
        yield f'"ring_gradients": "{value}" has no effect: the schedule has no ring. Leave the key out'
        return
    percent = 100 * ((1 + BF16_ROUNDOFF) ** hops - 1)
    yield (
        f'"ring_gradients": "{value}" rounds gradients of keys and values on each of {hops} hops of a ring: an error '
        f'of at most {percent:.2g} % of the sum of their parts\' magnitudes. "fp32" is exact'
    )


def _work_text(work: Workload) -> str:
    """Return the tokens of a step and the settings of memory: ``4 micro-batches of 1 x 8,192 tokens, ZeRO-2``."""
    batches = f"{work.micro_batches} micro-batches of " if work.micro_batches > 1 else ""
    checkpointing = ", activation checkpointing" if work.activation_checkpointing else ""
    if work.keeps_attention:
        checkpointing = ", recomputed but attention"
    return f"{batches}{work.micro_batch} x {work.seq_len:,} tokens, ZeRO-{work.zero_stage}{checkpointing}"


def _shape(forecast: Forecast) -> str:
    """Return the groups and the layout of a replica: ``ring of 2 groups: 2 RTX-4090, 2 RTX-3090; zigzag``."""
    return f"{describe(forecast.schedule.shifted(0), forecast.cost.cluster)}; {forecast.schedule.layout}"


def _replica_row(numbers: Sequence[int], forecast: Forecast) -> str:
    """Return a line on equal replicas among others: ``replica 0, 1: 1.63 s per step, ring of ...``."""
    step_time = time_text(forecast.prediction.iteration_s)
    return f"replica {', '.join(map(str, numbers))}: {step_time} per step, {_shape(forecast)}"


def _rank_rows(forecast: Forecast) -> list[str]:
    """Return the head and the rows of a table of a replica's ranks, one for each set of equal ranks.

    Ranks are equal if device, tokens, heads and memory are, wherever they stand in the ring.
    """
    cost, schedule = forecast.cost, forecast.schedule
    first_rank, seq_len = schedule.ranks[0], cost.workload.seq_len
    tokens = schedule.tokens(seq_len)
    ranks_of_cells: dict[tuple[str, str, str, str], list[int]] = {}
    for group in schedule.ring_groups:
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            index = rank - first_rank  # in the replica's cluster, whose ranks begin at 0
            needed = bytes_text(forecast.prediction.memory_bytes[index])
            cells = (
                cost.cluster.devices[index].name,
                f"{tokens[rank]:,} ({100 * tokens[rank] / seq_len:.0f} %)",
                str(heads),
                f"{needed} of {bytes_text(cost.capacity_bytes_D[index])}",
            )
            ranks_of_cells.setdefault(cells, []).append(rank)
    table = [("ranks", "device", "tokens", "heads", "memory GiB")]
    table += [(_ranges(ranks), *cells) for cells, ranks in ranks_of_cells.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"  {'  '.join(padded)}".rstrip())
    return lines


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks with runs as ranges: ``0-3, 7``; more than `_LISTED_RANGES` of them end in "..."."""
    ranges = rank_ranges(ranks).split(", ")
    return ", ".join(ranges if len(ranges) <= _LISTED_RANGES else [*ranges[: _LISTED_RANGES - 1], "..."])


def chosen_pipelines_text(plan: Plan, searched: SearchedPipelines | None, kept: str | None = None) -> str:
    """Return the pipelines of a job, and their prediction if the job searched for them, in about ten lines.

    Args:
        searched: result of the search; None if the plan was given.
        kept: line on the file of the plan; None without a file.
    """
    count = len(plan.pipelines)
    first = f"on, {len(plan.ranks)} ranks in {count} pipeline{'s' if count > 1 else ''}"
    rows = [f"  {_pipeline_text(pipeline)}" for pipeline in plan.pipelines]
    last_lines = [] if searched is None else _searched_lines(searched)
    if kept is not None:
        last_lines.append(kept)
    return _within_limit([first], rows, last_lines, lambda number: f"  and {number} more: see handle.plan")


def _searched_lines(searched: SearchedPipelines) -> list[str]:
    """Return lines on predicted time and memory, the bottleneck, and the gain over the baselines."""
    planned = searched.planned
    recomputed = "with" if searched.plan.activation_checkpointing else "without"
    lines = [
        f"predicted:  {time_text(planned.step_s)} per step, {planned.tokens_per_s:,.0f} tokens/s, {recomputed} "
        f"recomputation; {planned.global_batch} sequences of {planned.costs.seq_len:,} tokens",
    ]
    memory_bytes = (searched.plan.predicted or {}).get("memory_bytes", {})
    if memory_bytes:
        rank, needed_bytes = max(memory_bytes.items(), key=lambda item: item[1])
        lines.append(f"memory:     at most {bytes_text(needed_bytes)} GiB on a rank (rank {rank})")
    if planned.idle_ranks:
        lines.append(f"idle:       rank {_ranges(planned.idle_ranks)}: the step would not be shorter with them")
    if len(planned.reasons) > 1:
        lines.append(f"bottleneck: {planned.reasons[1]}")
    gains = [
        f"{baseline.value / planned.value:.2f} x {baseline.name}"
        for baseline in planned.baselines.values()
        if baseline.value is not None
    ]
    lines.append(
        f"gain:       {', '.join(gains) or 'no uniform plan fits'}; the search took {time_text(planned.search_s)}"
    )
    return lines


def _pipeline_text(pipeline: Pipeline) -> str:
    """Return a pipeline in a line: ``3 x 1 samples: ranks 0-1 (tensor) layers 0-3, rank 2 layer 4``."""
    stages = [_stage_text(stage) for stage in pipeline.stages[:_LISTED_STAGES]]
    more = len(pipeline.stages) - _LISTED_STAGES
    if more > 0:
        stages.append(f"{more} more stages")
    return f"{pipeline.micro_batches} x {pipeline.micro_batch_size} samples: {', '.join(stages)}"


def _stage_text(stage: Stage) -> str:
    """Return a stage: ``ranks 0-1 (tensor) layers 0-3``."""
    ranks = f"rank {stage.ranks[0]}" if len(stage.ranks) == 1 else f"ranks {_ranges(stage.ranks)} ({stage.inner_text})"
    start, stop = stage.layers or (0, 0)
    return f"{ranks} layers {start}-{stop - 1}" if stop - start > 1 else f"{ranks} layer {start}"


def _within_limit(
    first_lines: Sequence[str], rows: Sequence[str], last_lines: Sequence[str], more: Callable[[int], str]
) -> str:
    """Join lines, wrapped to `WIDTH`, with as many rows as `START_TEXT_LINES` leaves room for; at least two.

    Args:
        more: returns the line that stands for the rows that are left out, by their number.
    """

    def fitted(lines: Sequence[str]) -> list[str]:
        return [part for line in lines for part in fitted_text(line, WIDTH).split("\n")]

    above = fitted([f"{PREFIX}{first_lines[0]}", *first_lines[1:]])
    above[0] = above[0].removeprefix(PREFIX)
    below = fitted(last_lines)
    room = max(2, START_TEXT_LINES - len(above) - len(below))
    if len(fitted(rows)) <= room:
        shown = fitted(rows)
    else:
        num_shown = len(rows) - 1
        while num_shown > 1 and len(fitted(rows[:num_shown])) + 1 > room:
            num_shown -= 1
        shown = [*fitted(rows[:num_shown]), more(len(rows) - num_shown)]
    return "\n".join([*above, *shown, *below])
