"""Make timelines of a block and of a step on every rank, as bars, from a prediction or from a measured trace.

The bars of a rank have no gaps between them, since waiting is one of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_hetero.cost import CostModel, Prediction, Span
from ds_hetero.reporting.run_file import TracedRange
from ds_hetero.values.schedule import Schedule

Bar = tuple[str, float, float]
"""A bar of a timeline: kind, start and stop in seconds."""

KINDS = ("attention", "model", "all-to-all", "wait", "forward", "backward", "loss", "step")
MAX_SPANS = 200_000  # spans of a block up to which its timeline is computed; chosen, never measured
MAX_STEP_BARS = 4_000  # bars of all ranks of a step; above, layers are joined. Chosen, never measured
LEAST_WAIT = 1 / 2_000  # of a measured step; shorter waits would be less than a pixel wide, and are not drawn
PREFIX = "ds_hetero."  # prefix of the names of this package's ranges in a trace

# Kind of the bar for every kind of `Span` that is drawn.
_PREDICTED = {"non_attention": "model", "attention": "attention", "all_to_all": "all-to-all"}
_EXCHANGES = ("gather_sequence", "scatter_sequence", "scatter_output", "gather_output_heads")
_CALLS = ("forward", "backward", "step")
# The first range of attention in a layer's forward, and in its backward. From one to the next is one block.
_FORWARD_MARK, _BACKWARD_MARK = "gather_sequence", "gather_output_heads"


def block_spans(cost: CostModel, schedule: Schedule) -> tuple[Span, ...]:
    """Return when each rank computes and transfers during one block; empty if there are more than `MAX_SPANS` spans."""
    # About six spans for each rank and ring step: computing and transfers, forward and backward.
    num_spans = schedule.sp_size * schedule.ring_size * 6
    return cost.timeline(schedule) if num_spans <= MAX_SPANS else ()


def predicted_block(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return what each rank does during one block, forward and backward, as bars by rank.

    Gaps are filled with waiting, so that the bars of every rank end at ``prediction.block_s``. The result is empty if
    the schedule is too large for a timeline.
    """
    spans = block_spans(cost, schedule)
    if not spans:
        return []
    bars_by_rank: list[list[Bar]] = [[] for _ in schedule.ranks]
    for span in spans:
        if span.kind in _PREDICTED:
            bars_by_rank[span.rank].append((_PREDICTED[span.kind], span.start_s, span.stop_s))
    return [_filled(bars, 0.0, prediction.block_s) for bars in bars_by_rank]


def phase_shares(cost: CostModel, schedule: Schedule) -> tuple[float, float]:
    """Return the shares of forward and backward in a block's time; recomputation is part of the backward."""
    spans = block_spans(cost, schedule)
    if not spans or any(span.phase == "both" for span in spans):
        return 1 / 3, 2 / 3  # a backward has twice the FLOPs of a forward
    forward_s = max(span.stop_s for span in spans if span.phase == "forward")
    share = forward_s / max(span.stop_s for span in spans)
    return share, 1 - share


def predicted_step(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return the bars of an optimizer step by rank; they end together at ``prediction.iteration_s``.

    Every layer of a forward or backward waits where its block does (`predicted_block`). If that would be more than
    `MAX_STEP_BARS` bars, several layers are drawn as one of their length. The bar of the step is the optimizer and
    ZeRO's traffic outside the blocks.
    """
    work, num_layers = cost.workload, cost.model.num_layers
    forward_s = phase_shares(cost, schedule)[0] * prediction.block_s
    loss_s = prediction.parts_s.get("loss_s", 0.0)
    layers = [_layer_bars(bars, forward_s) for bars in _blocks(cost, schedule, prediction)]
    bars_of_layer = max(sum(len(forward) + len(backward) for forward, backward in layers), 1)
    drawn_layers = max(1, min(num_layers, MAX_STEP_BARS // (bars_of_layer * work.micro_batches)))
    stretch = num_layers / drawn_layers
    rows = []
    for forward, backward in layers:
        bars: list[Bar] = []
        now_s = 0.0
        for _ in range(work.micro_batches):
            bars += _repeated(forward, drawn_layers, now_s, stretch)
            now_s += forward_s * num_layers
            bars.append(("loss", now_s, now_s + loss_s))
            now_s += loss_s
            bars += _repeated(backward, drawn_layers, now_s, stretch)
            now_s += (prediction.block_s - forward_s) * num_layers
        bars.append(("step", now_s, prediction.iteration_s))
        rows.append(_filled(bars, 0.0, prediction.iteration_s))
    return rows


def _blocks(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Bar]]:
    """Return the bars of a block by rank; of a schedule too large for them, one bar of work and one of waiting."""
    blocks = predicted_block(cost, schedule, prediction)
    if blocks:
        return blocks
    return [_filled([("model", 0.0, busy_s)], 0.0, prediction.block_s) for busy_s in prediction.busy_s]


def _layer_bars(block: Sequence[Bar], forward_s: float) -> tuple[list[Bar], list[Bar]]:
    """Return the bars of a layer's forward and of its backward, each from 0, from those of a block.

    ``forward``, ``backward`` and ``wait`` are their kinds. A bar across the end of the forward becomes two.
    """
    forward: list[Bar] = []
    backward: list[Bar] = []
    for kind, start_s, stop_s in block:
        is_wait = kind == "wait"
        if start_s < forward_s:
            forward.append(("wait" if is_wait else "forward", start_s, min(stop_s, forward_s)))
        if stop_s > forward_s:
            begin_s = max(start_s, forward_s) - forward_s
            backward.append(("wait" if is_wait else "backward", begin_s, stop_s - forward_s))
    return forward, backward


def _repeated(layer: Sequence[Bar], count: int, begin_s: float, stretch: float) -> list[Bar]:
    """Return the bars of ``count`` equal layers, each ``stretch`` times as long as ``layer``, from ``begin_s``."""
    bars: list[Bar] = []
    for number in range(count):
        layer_begin_s = begin_s + number * stretch * (layer[-1][2] if layer else 0.0)
        for kind, start_s, stop_s in layer:
            bars.append((kind, layer_begin_s + stretch * start_s, layer_begin_s + stretch * stop_s))
    return bars


def measured_block(trace: Sequence[Sequence[TracedRange]]) -> list[list[Bar]]:
    """Return the bars of one block in the middle of a traced step, forward and backward, by rank.

    A block extends from the begin of one layer's attention to the begin of the next layer's. The result is empty if the
    trace of a rank has fewer than two layers.
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
    """Return the bars of a traced step by rank: forwards, backwards, steps, and waiting where it was."""
    rows = []
    for ranges in trace:
        calls = [(name, start, stop) for name, start, stop in _named(ranges) if name in _CALLS]
        waits = [("wait", start, stop) for name, start, stop in _named(ranges) if _kind(name) == "wait"]
        bars: list[Bar] = []
        for name, call_start_s, call_stop_s in calls:
            inside: list[Bar] = []
            for kind, start_s, stop_s in waits:
                is_seen = stop_s - start_s >= LEAST_WAIT * (calls[-1][2] - calls[0][1])
                if is_seen and call_start_s <= start_s < call_stop_s:
                    inside.append((kind, start_s, min(stop_s, call_stop_s)))
            bars += _filled(inside, call_start_s, call_stop_s, gap=name)
        rows.append(bars)
    return rows


def _between_marks(ranges: Sequence[TracedRange], call: str, mark: str) -> list[Bar]:
    """Return the bars of one layer in the first ``call``: from one range named ``mark`` to the next, in the middle.

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
    """Return the kind (of `KINDS`) of a range's bar: an exchange, attention, or a call; any other range is a wait."""
    if name in _EXCHANGES:
        return "all-to-all"
    if name.startswith("attention"):
        return "attention"
    return name if name in _CALLS else "wait"


def _named(ranges: Iterable[TracedRange]) -> Iterable[Bar]:
    """Return the ranges as bars, whose names lack `PREFIX`: ``forward`` for ``ds_hetero.forward``."""
    return ((name.removeprefix(PREFIX), start_s, stop_s) for name, start_s, stop_s in ranges)


def _filled(bars: Sequence[Bar], begin_s: float, end_s: float, gap: str = "wait") -> list[Bar]:
    """Return the bars in order, gaps filled with bars of kind ``gap``, and neighbours of one kind joined.

    From 0 to 4, (a, 0, 1), (a, 1, 2) and (b, 3, 4) become (a, 0, 2), (wait, 2, 3) and (b, 3, 4).
    """
    joined: list[Bar] = []

    def add(kind: str, start_s: float, stop_s: float) -> None:
        """Append a bar, or extend the last bar if it has the same kind; do nothing for a bar of no length."""
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
