"""A step as a trace in Chrome's format, which Perfetto and chrome://tracing show: predicted, and measured beside it.

Format: "Trace Event Format" (Google, 2016), JSON object form: ``traceEvents`` with complete events (``"ph": "X"``,
``ts`` and ``dur`` in microseconds) and metadata events that name processes and threads. A process is a rank, once
predicted and once measured; names of ranges are those of a torch profiler's trace of the job (see
`ds_hetero.runtime.step_clock`).

The predicted thread "compute" of a rank has no gaps: its innermost spans add up to the predicted step, waiting
included. The thread "network" has what travels meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import CostModel
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.pipelines_sections import judged, pipeline_bars
from ds_hetero.reporting.run_file import RunFile, TracedRange
from ds_hetero.reporting.timelines import PREFIX, Bar, block_spans, phase_shares, predicted_block
from ds_hetero.values.schedule import Schedule

MAX_EVENTS = 400_000  # of longer steps, blocks after the first of a pass are one span each
COMPUTE, NETWORK = 0, 1

# What a predicted span is called, by its kind, in the forward (also where it is computed again) and in the backward.
# Both exchanges of a pass are pooled in the prediction and have the name of the first.
_NAMES = {
    "attention": ("attention", "attention_backward"),
    "all-to-all": ("gather_sequence", "gather_output_heads"),
    "wait": ("ring_wait", "ring_wait"),
    "model": ("model", "model_backward"),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A rank in the trace."""

    pid: int  # its number
    name: str  # for people
    order: int  # place from above

    def metadata(self, threads: Sequence[str]) -> Iterator[JsonDict]:
        """Events that name the process and its threads."""
        yield _meta(self.pid, 0, "process_name", {"name": self.name})
        yield _meta(self.pid, 0, "process_sort_index", {"sort_index": self.order})
        for tid, thread in enumerate(threads):
            yield _meta(self.pid, tid, "thread_name", {"name": thread})

    def span(self, tid: int, name: str, start_s: float, stop_s: float, **args: Any) -> JsonDict:
        """One complete event."""
        event = {"ph": "X", "cat": "ds_hetero", "name": name, "pid": self.pid, "tid": tid}
        return {**event, "ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6, **({"args": args} if args else {})}


def trace_of(described: DescribedPlan, run: RunFile | None = None) -> JsonDict:
    """The trace of a predicted step; below it stand the ranks of a job that ran the plan, if there was one."""
    events: list[JsonDict] = []
    if described.num_replicas:
        for replica in range(described.num_replicas):
            first = described.plan.schedules[replica].ranks[0]
            events += _predicted_replica(described.cost_of(replica), described.schedule_of(replica), first)
    else:
        events += _predicted_pipelines(described)
    if run is not None:
        events += _measured(run)
    other = {"model": described.scenario.model.name, "cost_model": described.scenario.cost_model}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _predicted_replica(cost: CostModel, schedule: Schedule, first_rank: int) -> Iterator[JsonDict]:
    prediction, work = cost.predict(schedule), cost.workload
    blocks = predicted_block(cost, schedule, prediction)
    share, _ = phase_shares(cost, schedule)
    split_s, block_s = share * prediction.block_s, prediction.block_s
    transfers = [span for span in block_spans(cost, schedule) if span.stream == "network" and span.kind == "ring"]
    layers, loss_s = cost.model.num_layers, prediction.parts_s.get("loss_s", 0.0)
    num_bars = sum(map(len, blocks)) + len(transfers)
    detailed = layers if num_bars * layers * work.micro_batches <= MAX_EVENTS else 1
    for rank in schedule.ranks:
        name = f"predicted: rank {first_rank + rank} ({cost.cluster.devices[rank].name})"
        process = Process(first_rank + rank, name, 2 * (first_rank + rank))
        yield from process.metadata(("compute", "network"))
        block = blocks[rank] if blocks else [("model", 0.0, block_s)]
        parts = {"forward": _cut(block, 0.0, split_s), "backward": _cut(block, split_s, block_s)}
        own_transfers = [(span.start_s, span.stop_s) for span in transfers if span.rank == rank]
        now_s = 0.0
        for _ in range(work.micro_batches):
            for call, begin_s, end_s in (("forward", 0.0, split_s), ("backward", split_s, block_s)):
                length_s = (end_s - begin_s) * layers
                yield process.span(COMPUTE, PREFIX + call, now_s, now_s + length_s)
                for layer in range(layers):
                    offset_s = now_s + layer * (end_s - begin_s) - begin_s
                    if layer >= detailed:
                        yield process.span(COMPUTE, PREFIX + "block", offset_s + begin_s, offset_s + end_s)
                        continue
                    for kind, start_s, stop_s in parts[call]:
                        name = PREFIX + _NAMES[kind][call == "backward"]
                        yield process.span(COMPUTE, name, offset_s + start_s, offset_s + stop_s)
                    for start_s, stop_s in own_transfers:
                        if begin_s <= start_s < end_s:
                            yield process.span(NETWORK, PREFIX + "ring", offset_s + start_s, offset_s + stop_s)
                now_s += length_s
                if call == "forward" and loss_s:
                    yield process.span(COMPUTE, PREFIX + "loss", now_s, now_s + loss_s)
                    now_s += loss_s
        if prediction.iteration_s > now_s:
            yield process.span(COMPUTE, PREFIX + "step", now_s, prediction.iteration_s)


def _predicted_pipelines(described: DescribedPlan) -> Iterator[JsonDict]:
    """Bars of 1F1B. A published model has a formula for the end and no bars: these are stretched to end there."""
    costs, finished = judged(described)
    for number, pipeline in enumerate(described.plan.pipelines):
        rows = pipeline_bars(finished, number, finished.candidate.micro_batches[number])
        stretch = finished.pipeline_s[number] / rows[0][-1][2]
        for stage, bars in zip(pipeline.stages, rows, strict=True):
            for rank in stage.ranks:
                text = f"predicted: rank {rank} ({costs.cluster.devices[rank].name}), pipeline {number}"
                process = Process(rank, text, 2 * rank)
                yield from process.metadata(("compute",))
                for kind, start_s, stop_s in bars:
                    name = "wait" if kind == "wait" else kind
                    yield process.span(COMPUTE, PREFIX + name, start_s * stretch, stop_s * stretch)
                end_s = finished.pipeline_s[number]
                if finished.step_s > end_s:
                    yield process.span(COMPUTE, PREFIX + "step", end_s, finished.step_s)


def _measured(run: RunFile) -> Iterator[JsonDict]:
    for rank, ranges in enumerate(run.trace):
        device = run.ranks[rank].device
        process = Process(len(run.ranks) + rank, f"measured: rank {rank} ({device})", 2 * rank + 1)
        yield from process.metadata(("compute",))
        for name, start_s, stop_s in _nested(ranges):
            yield process.span(COMPUTE, name, start_s, stop_s, step=run.traced_step)


def _nested(ranges: Sequence[TracedRange]) -> Iterator[TracedRange]:
    """Ranges that begin and end inside the one that they began in, as the format asks of one thread."""
    ends: list[float] = []
    for name, start_s, stop_s in sorted(ranges, key=lambda one: (one[1], -one[2])):
        while ends and ends[-1] <= start_s:
            ends.pop()
        stop_s = min([stop_s, *ends[-1:]])
        ends.append(stop_s)
        yield name, start_s, stop_s


def _cut(bars: Sequence[Bar], begin_s: float, end_s: float) -> list[Bar]:
    """Return the parts of bars inside an interval."""
    cut = [(kind, max(start_s, begin_s), min(stop_s, end_s)) for kind, start_s, stop_s in bars]
    return [bar for bar in cut if bar[2] > bar[1]]


def _meta(pid: int, tid: int, name: str, args: JsonDict) -> JsonDict:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
