"""Bars of a block and of a step on every rank, as the cost model predicts them and as a trace has them.

A bar is ``[kind, start_s, stop_s]``; the bars of a rank follow one another without gaps, and waiting is one of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_hetero.cost import CostModel, Prediction, Span
from ds_hetero.reporting.run_file import TracedRange
from ds_hetero.values.schedule import Schedule

Bar = tuple[str, float, float]

KINDS = ("attention", "model", "all-to-all", "wait", "forward", "backward", "loss", "step")
MAX_SPANS = 200_000  # of a block; larger timelines take longer than anybody waits
PREFIX = "ds_hetero."

_PREDICTED = {"non_attention": "model", "attention": "attention", "all_to_all": "all-to-all"}
_EXCHANGES = ("gather_sequence", "scatter_sequence", "scatter_output", "gather_output_heads")
_CALLS = ("forward", "backward", "step")
_FORWARD_MARK, _BACKWARD_MARK = "gather_sequence", "gather_output_heads"  # with which attention begins in a block


def block_spans(cost: CostModel, schedule: Schedule) -> tuple[Span, ...]:
    """Return what every rank computes and transfers in a block; nothing for schedules that are too large."""
    return cost.timeline(schedule) if schedule.sp_size * schedule.ring_size * 6 <= MAX_SPANS else ()


def predicted_block(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return the bars of one block, forward and backward, by rank; they end together at ``prediction.block_s``."""
    spans = block_spans(cost, schedule)
    if not spans:
        return []
    by_rank: list[list[Bar]] = [[] for _ in schedule.ranks]
    for span in spans:
        if span.kind in _PREDICTED:
            by_rank[span.rank].append((_PREDICTED[span.kind], span.start_s, span.stop_s))
    return [_filled(bars, 0.0, prediction.block_s) for bars in by_rank]


def phase_shares(cost: CostModel, schedule: Schedule) -> tuple[float, float]:
    """Return the shares of a block's time in its forward and in its backward, recomputation included."""
    spans = block_spans(cost, schedule)
    if not spans or any(span.phase == "both" for span in spans):
        return 1 / 3, 2 / 3  # a backward computes twice what a forward does
    forward_s = max(span.stop_s for span in spans if span.phase == "forward")
    share = forward_s / max(span.stop_s for span in spans)
    return share, 1 - share


def predicted_step(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return the bars of an optimizer step by rank; they end together at ``prediction.iteration_s``.

    Of a forward or backward a rank computes or exchanges first and waits afterwards; where it waits in between is in
    the bars of a block. ZeRO's traffic outside the blocks and the optimizer are the step.
    """
    work, parts = cost.workload, prediction.parts_s
    blocks_s = prediction.block_s * cost.model.num_layers
    calls_s = [share * blocks_s for share in phase_shares(cost, schedule)]
    block = predicted_block(cost, schedule, prediction)
    waits = [sum(stop - start for kind, start, stop in bars if kind == "wait") for bars in block]
    busy = [1 - wait_s / prediction.block_s for wait_s in waits] or [
        busy_s / prediction.block_s for busy_s in prediction.busy_s
    ]
    rows = []
    for share in busy:
        bars: list[Bar] = []
        now_s = 0.0
        for _ in range(work.micro_batches):
            for kind, seconds in (
                ("forward", calls_s[0]),
                ("loss", parts.get("loss_s", 0.0)),
                ("backward", calls_s[1]),
            ):
                own_s = seconds if kind == "loss" else seconds * share
                bars += [(kind, now_s, now_s + own_s), ("wait", now_s + own_s, now_s + seconds)]
                now_s += seconds
        bars.append(("step", now_s, prediction.iteration_s))
        rows.append([bar for bar in bars if bar[2] > bar[1]])
    return rows


def measured_block(trace: Sequence[Sequence[TracedRange]]) -> list[list[Bar]]:
    """Return the bars of one block in the middle of a traced step, forward and backward, by rank.

    A block reaches from the beginning of one layer's attention to that of the next. Empty where the trace shows no two
    layers.
    """
    rows = []
    for ranges in trace:
        forward = _between_marks(ranges, "forward", _FORWARD_MARK)
        backward = _between_marks(ranges, "backward", _BACKWARD_MARK)
        if not (forward and backward):
            return []
        forward_s = forward[-1][2]
        rows.append([*forward, *((kind, start + forward_s, stop + forward_s) for kind, start, stop in backward)])
    return rows


def measured_step(trace: Sequence[Sequence[TracedRange]]) -> list[list[Bar]]:
    """Return the bars of a traced step by rank: forwards, backwards, steps, and waiting."""
    rows = []
    for ranges in trace:
        calls = [(name, start, stop) for name, start, stop in _named(ranges) if name in _CALLS]
        waits = [(start, stop) for name, start, stop in _named(ranges) if _kind(name) == "wait"]
        bars: list[Bar] = []
        for name, start_s, stop_s in calls:
            waited_s = sum(
                min(stop, stop_s) - max(start, start_s) for start, stop in waits if start_s <= start < stop_s
            )
            own_s = max(stop_s - start_s - waited_s, 0.0)
            bars += [(name, start_s, start_s + own_s), ("wait", start_s + own_s, stop_s)]
        rows.append([bar for bar in bars if bar[2] > bar[1]])
    return rows


def _between_marks(ranges: Sequence[TracedRange], call: str, mark: str) -> list[Bar]:
    """Return the bars from one mark inside the first call of that name to the next mark, in the call's middle."""
    named = list(_named(ranges))
    inside = next(((start, stop) for name, start, stop in named if name == call), None)
    if inside is None:
        return []
    marks = [start for name, start, _ in named if name == mark and inside[0] <= start < inside[1]]
    if len(marks) < 2:
        return []
    begin_s, end_s = marks[(len(marks) - 2) // 2], marks[(len(marks) - 2) // 2 + 1]
    phases = [
        (_kind(name), start - begin_s, min(stop, end_s) - begin_s)
        for name, start, stop in named
        if name not in _CALLS and begin_s <= start < end_s
    ]
    return _filled(phases, 0.0, end_s - begin_s, gap="model")


def _kind(name: str) -> str:
    if name in _EXCHANGES:
        return "all-to-all"
    if name.startswith("attention"):
        return "attention"
    return name if name in _CALLS else "wait"


def _named(ranges: Iterable[TracedRange]) -> Iterable[Bar]:
    return ((name.removeprefix(PREFIX), start_s, stop_s) for name, start_s, stop_s in ranges)


def _filled(bars: Sequence[Bar], begin_s: float, end_s: float, gap: str = "wait") -> list[Bar]:
    """Return the bars in order, neighbours of one kind joined, with bars of kind ``gap`` where there is none."""
    out: list[Bar] = []

    def add(kind: str, start_s: float, stop_s: float) -> None:
        if stop_s <= start_s:
            return
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1], stop_s)
        else:
            out.append((kind, start_s, stop_s))

    now_s = begin_s
    for kind, start_s, stop_s in sorted(bars, key=lambda bar: bar[1]):
        add(gap, now_s, start_s)
        add(kind, max(start_s, now_s), stop_s)
        now_s = max(now_s, stop_s)
    add(gap, now_s, end_s)
    return out
