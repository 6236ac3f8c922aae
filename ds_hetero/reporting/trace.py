"""Make the trace of a predicted step and of a measured one, in Chrome's format, for Perfetto and chrome://tracing.

Format: "Trace Event Format" (Google, 2016), JSON object form: ``traceEvents`` with complete events (``"ph": "X"``,
``ts`` and ``dur`` in microseconds) and metadata events that name processes and threads. Every rank is a process, once
predicted and once measured. Ranges have the names of a torch profiler's trace of the job (see
`ds_hetero.runtime.step_clock`).

The thread "compute" of a predicted rank has no gaps: its innermost spans, waits included, add up to the predicted step.
The thread "network" has the transfers of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import CostModel
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.pipelines_sections import pipeline_bars, predict_pipelines
from ds_hetero.reporting.run_file import RunFile, TracedRange
from ds_hetero.reporting.timelines import PREFIX, Bar, block_spans, phase_shares, predicted_block
from ds_hetero.values.schedule import Schedule

MAX_EVENTS = 400_000  # with more, only the first block of a pass is shown in detail; chosen, never measured
COMPUTE, NETWORK = 0, 1

# Names of predicted spans by kind, in the forward (also when it is recomputed) and in the backward. The prediction adds
# up both all-to-alls of a pass, which have the name of the first.
_NAMES = {
    "attention": ("attention", "attention_backward"),
    "all-to-all": ("gather_sequence", "gather_output_heads"),
    "wait": ("ring_wait", "ring_wait"),
    "model": ("model", "model_backward"),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the trace: a rank, predicted or measured."""

    pid: int  # number of the process, unique in the trace
    name: str  # name that viewers show
    order: int  # viewers show processes in ascending order

    def metadata(self, threads: Sequence[str]) -> Iterator[JsonDict]:
        """Yield the events that name the process and its threads."""
        yield _meta(self.pid, 0, "process_name", {"name": self.name})
        yield _meta(self.pid, 0, "process_sort_index", {"sort_index": self.order})
        for tid, thread in enumerate(threads):
            yield _meta(self.pid, tid, "thread_name", {"name": thread})

    def span(self, tid: int, name: str, start_s: float, stop_s: float, **args: Any) -> JsonDict:
        """Make one complete event of thread ``tid``."""
        event: JsonDict = {"ph": "X", "cat": "ds_hetero", "name": name, "pid": self.pid, "tid": tid}
        event |= {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
        if args:
            event["args"] = args
        return event


def trace_of(described: DescribedPlan, run: RunFile | None = None) -> JsonDict:
    """Return the trace of a predicted step, and of the measured step of ``run``, if that is given."""
    events: list[JsonDict] = []
    if described.num_replicas:
        for replica in range(described.num_replicas):
            first = described.plan.schedules[replica].ranks[0]
            events += _predicted_replica(described.cost_of(replica), described.schedule_of(replica), first)
    else:
        events += _predicted_pipelines(described)
    if run is not None:
        events += _measured(run)
    metadata = {"model": described.scenario.model.name, "cost_model": described.scenario.cost_model}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def _predicted_replica(cost: CostModel, schedule: Schedule, first_rank: int) -> Iterator[JsonDict]:
    """Yield the events of one replica's ranks: forward, loss and backward of every micro-batch, then the step.

    The prediction has one block, whose backward follows its forward. It is drawn once for every layer.
    """
    prediction, work = cost.predict(schedule), cost.workload
    blocks = predicted_block(cost, schedule, prediction)
    forward_share, _ = phase_shares(cost, schedule)
    block_s = prediction.block_s
    forward_s = forward_share * block_s  # the block's forward ends here, and its backward begins
    transfers = [span for span in block_spans(cost, schedule) if span.stream == "network" and span.kind == "ring"]
    layers, loss_s = cost.model.num_layers, prediction.parts_s.get("loss_s", 0.0)
    num_bars = sum(map(len, blocks)) + len(transfers)
    detailed_layers = layers if num_bars * layers * work.micro_batches <= MAX_EVENTS else 1
    for rank in schedule.ranks:
        name = f"predicted: rank {first_rank + rank} ({cost.cluster.devices[rank].name})"
        process = Process(first_rank + rank, name, 2 * (first_rank + rank))
        yield from process.metadata(("compute", "network"))
        block = blocks[rank] if blocks else [("model", 0.0, block_s)]
        parts = {"forward": _clipped(block, 0.0, forward_s), "backward": _clipped(block, forward_s, block_s)}
        rank_transfers = [(span.start_s, span.stop_s) for span in transfers if span.rank == rank]
        now_s = 0.0
        for _ in range(work.micro_batches):
            for call, begin_s, end_s in (("forward", 0.0, forward_s), ("backward", forward_s, block_s)):
                call_s = (end_s - begin_s) * layers
                yield process.span(COMPUTE, PREFIX + call, now_s, now_s + call_s)
                for layer in range(layers):
                    # Add this to times in the block to get times in the step.
                    offset_s = now_s + layer * (end_s - begin_s) - begin_s
                    if layer >= detailed_layers:
                        yield process.span(COMPUTE, PREFIX + "block", offset_s + begin_s, offset_s + end_s)
                        continue
                    for kind, start_s, stop_s in parts[call]:
                        forward_name, backward_name = _NAMES[kind]
                        name = PREFIX + (forward_name if call == "forward" else backward_name)
                        yield process.span(COMPUTE, name, offset_s + start_s, offset_s + stop_s)
                    for start_s, stop_s in rank_transfers:
                        if begin_s <= start_s < end_s:
                            yield process.span(NETWORK, PREFIX + "ring", offset_s + start_s, offset_s + stop_s)
                now_s += call_s
                if call == "forward" and loss_s:
                    yield process.span(COMPUTE, PREFIX + "loss", now_s, now_s + loss_s)
                    now_s += loss_s
        if prediction.iteration_s > now_s:
            yield process.span(COMPUTE, PREFIX + "step", now_s, prediction.iteration_s)


def _predicted_pipelines(described: DescribedPlan) -> Iterator[JsonDict]:
    """Yield the events of 1F1B on all ranks.

    Published cost models predict the time of a pipeline by a formula, without times of its passes. The bars of 1F1B are
    stretched so that they end at that time.
    """
    costs, finished = predict_pipelines(described)
    for number, pipeline in enumerate(described.plan.pipelines):
        rows = pipeline_bars(finished, number, finished.candidate.micro_batches[number])
        _, _, last_stop_s = rows[0][-1]
        stretch = finished.pipeline_s[number] / last_stop_s
        for stage, bars in zip(pipeline.stages, rows, strict=True):
            for rank in stage.ranks:
                text = f"predicted: rank {rank} ({costs.cluster.devices[rank].name}), pipeline {number}"
                process = Process(rank, text, 2 * rank)
                yield from process.metadata(("compute",))
                for kind, start_s, stop_s in bars:
                    yield process.span(COMPUTE, PREFIX + kind, start_s * stretch, stop_s * stretch)
                end_s = finished.pipeline_s[number]
                if finished.step_s > end_s:
                    yield process.span(COMPUTE, PREFIX + "step", end_s, finished.step_s)


def _measured(run: RunFile) -> Iterator[JsonDict]:
    """Yield the events of the traced step of a run."""
    for rank, ranges in enumerate(run.trace):
        device = run.ranks[rank].device
        process = Process(len(run.ranks) + rank, f"measured: rank {rank} ({device})", 2 * rank + 1)
        yield from process.metadata(("compute",))
        for name, start_s, stop_s in _nested(ranges):
            yield process.span(COMPUTE, name, start_s, stop_s, step=run.traced_step)


def _nested(ranges: Sequence[TracedRange]) -> Iterator[TracedRange]:
    """Yield the ranges, each shortened to end inside the range in which it begins.

    The format requires the events of a thread to be nested. (a, 0, 5) and (b, 3, 6) become (a, 0, 5) and (b, 3, 5).
    """
    open_ends_s: list[float] = []  # ends of the ranges around the current one, the innermost last
    for name, start_s, stop_s in sorted(ranges, key=lambda traced: (traced[1], -traced[2])):
        while open_ends_s and open_ends_s[-1] <= start_s:
            open_ends_s.pop()
        nested_stop_s = min(stop_s, open_ends_s[-1]) if open_ends_s else stop_s
        open_ends_s.append(nested_stop_s)
        yield name, start_s, nested_stop_s


def _clipped(bars: Sequence[Bar], begin_s: float, end_s: float) -> list[Bar]:
    """Return the bars from ``begin_s`` to ``end_s``, cut off at both ends."""
    clipped = []
    for kind, bar_start_s, bar_stop_s in bars:
        start_s, stop_s = max(bar_start_s, begin_s), min(bar_stop_s, end_s)
        if stop_s > start_s:
            clipped.append((kind, start_s, stop_s))
    return clipped


def _meta(pid: int, tid: int, name: str, args: JsonDict) -> JsonDict:
    """Make a metadata event, which names a process or a thread."""
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
