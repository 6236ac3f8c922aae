"""Bars of a block and of a step on every rank: predicted by the cost model, or measured in a trace.

A bar is ``(kind, start_s, stop_s)``. The bars of a rank have no gaps between them, as waiting is one of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_hetero.cost import CostModel, Prediction, Span
from ds_hetero.reporting.run_file import TracedRange
from ds_hetero.values.schedule import Schedule

Bar = tuple[str, float, float]

KINDS = ("attention", "model", "all-to-all", "wait", "forward", "backward", "loss", "step")
MAX_SPANS = 200_000  # of a block; larger timelines take too long to compute; chosen, never measured
PREFIX = "ds_hetero."  # of the names of our ranges in a trace

_PREDICTED = {"non_attention": "model", "attention": "attention", "all_to_all": "all-to-all"}  # kind of each span
_EXCHANGES = ("gather_sequence", "scatter_sequence", "scatter_output", "gather_output_heads")
_CALLS = ("forward", "backward", "step")
# The first range of attention in a layer's forward, and in its backward. From one to the next is one block.
_FORWARD_MARK, _BACKWARD_MARK = "gather_sequence", "gather_output_heads"


def block_spans(cost: CostModel, schedule: Schedule) -> tuple[Span, ...]:
    """Return the computing and the transfers of every rank in a block; empty if the schedule is too large."""
    # About six spans for each rank and ring step: computing and transfers, forward and backward.
    num_spans = schedule.sp_size * schedule.ring_size * 6
    return cost.timeline(schedule) if num_spans <= MAX_SPANS else ()


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
    """Return the shares of a block's time of its forward and of its backward, with the recomputation in the latter."""
    spans = block_spans(cost, schedule)
    if not spans or any(span.phase == "both" for span in spans):
        return 1 / 3, 2 / 3  # a backward has twice the FLOPs of a forward
    forward_s = max(span.stop_s for span in spans if span.phase == "forward")
    share = forward_s / max(span.stop_s for span in spans)
    return share, 1 - share


def predicted_step(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return the bars of an optimizer step by rank; they end together at ``prediction.iteration_s``.

    A forward or backward is drawn as one bar of all its work, and one of all its waiting; the bars of a block show
    where the rank waits in between. The bar of the step is the optimizer, and ZeRO's traffic outside the blocks.
    """
    work = cost.workload
    blocks_s = prediction.block_s * cost.model.num_layers
    forward_share, backward_share = phase_shares(cost, schedule)
    micro_batch = (
        ("forward", forward_share * blocks_s),
        ("loss", prediction.parts_s.get("loss_s", 0.0)),
        ("backward", backward_share * blocks_s),
    )
    rows = []
    for busy_share in _busy_shares(cost, schedule, prediction):
        bars: list[Bar] = []
        now_s = 0.0
        for _ in range(work.micro_batches):
            for kind, seconds in micro_batch:
                busy_s = seconds if kind == "loss" else seconds * busy_share
                bars += [(kind, now_s, now_s + busy_s), ("wait", now_s + busy_s, now_s + seconds)]
                now_s += seconds
        bars.append(("step", now_s, prediction.iteration_s))
        rows.append([(kind, start_s, stop_s) for kind, start_s, stop_s in bars if stop_s > start_s])
    return rows


def _busy_shares(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[float]:
    """Share of a block, by rank, in which the rank does not wait."""
    block = predicted_block(cost, schedule, prediction)
    if not block:  # a schedule too large for a timeline
        return [busy_s / prediction.block_s for busy_s in prediction.busy_s]
    shares = []
    for bars in block:
        waits_s = sum(stop_s - start_s for kind, start_s, stop_s in bars if kind == "wait")
        shares.append(1 - waits_s / prediction.block_s)
    return shares


def measured_block(trace: Sequence[Sequence[TracedRange]]) -> list[list[Bar]]:
    """Return the bars of one block in the middle of a traced step, forward and backward, by rank.

    A block reaches from the begin of one layer's attention to that of the next. The result is empty if a rank's trace
    lacks two layers.
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
        for name, call_start_s, call_stop_s in calls:
            waited_s = 0.0
            for start_s, stop_s in waits:
                if call_start_s <= start_s < call_stop_s:
                    waited_s += min(stop_s, call_stop_s) - start_s
            busy_s = max(call_stop_s - call_start_s - waited_s, 0.0)
            bars.append((name, call_start_s, call_start_s + busy_s))
            bars.append(("wait", call_start_s + busy_s, call_stop_s))
        rows.append([(kind, start_s, stop_s) for kind, start_s, stop_s in bars if stop_s > start_s])
    return rows


def _between_marks(ranges: Sequence[TracedRange], call: str, mark: str) -> list[Bar]:
    """Return the bars between two neighbouring marks, in the middle of the first call of that name.

    The middle, because the first and the last layers of a model often differ from the others.
    """
    named = list(_named(ranges))
    call_range = next(((start, stop) for name, start, stop in named if name == call), None)
    if call_range is None:
        return []
    call_start, call_stop = call_range
    marks = [start for name, start, _ in named if name == mark and call_start <= start < call_stop]
    if len(marks) < 2:
        return []
    middle = (len(marks) - 2) // 2
    begin_s, end_s = marks[middle], marks[middle + 1]
    phases = []
    for name, start_s, stop_s in named:
        if name not in _CALLS and begin_s <= start_s < end_s:
            phases.append((_kind(name), start_s - begin_s, min(stop_s, end_s) - begin_s))
    return _filled(phases, 0.0, end_s - begin_s, gap="model")


def _kind(name: str) -> str:
    """Kind of the bar of a traced range: every range of ours that is no work is a wait."""
    if name in _EXCHANGES:
        return "all-to-all"
    if name.startswith("attention"):
        return "attention"
    return name if name in _CALLS else "wait"


def _named(ranges: Iterable[TracedRange]) -> Iterable[Bar]:
    return ((name.removeprefix(PREFIX), start_s, stop_s) for name, start_s, stop_s in ranges)


def _filled(bars: Sequence[Bar], begin_s: float, end_s: float, gap: str = "wait") -> list[Bar]:
    """Return the bars in order, gaps filled with bars of kind ``gap``, and neighbours of one kind joined.

    From 0 to 4, (a, 0, 1), (a, 1, 2) and (b, 3, 4) become (a, 0, 2), (wait, 2, 3) and (b, 3, 4).
    """
    joined: list[Bar] = []

    def add(kind: str, start_s: float, stop_s: float) -> None:
        if stop_s <= start_s:
            return
        if joined and joined[-1][0] == kind:
            _, joined_start_s, _ = joined[-1]
            joined[-1] = (kind, joined_start_s, stop_s)
        else:
            joined.append((kind, start_s, stop_s))

    now_s = begin_s
    for kind, start_s, stop_s in sorted(bars, key=lambda bar: bar[1]):
        add(gap, now_s, start_s)
        add(kind, max(start_s, now_s), stop_s)
        now_s = max(now_s, stop_s)
    add(gap, now_s, end_s)
    return joined
