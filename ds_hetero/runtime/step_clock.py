"""Measure how a step spends its time on this rank, without making the device wait.

A step has passes, forward and backward of its micro-batches, and a pass has phases. A replica of one stage runs its
passes in the engine's forward and backward:

    with clock.forward(True):                        around the engine's forward
    with clock.backward():                           around its backward
    clock.note_gradients()                           inside: the gradients have been computed

A stage of a pipeline calls these instead:

    clock.start_pass(FORWARD, 3)                     the rank is ready for the pass
    clock.mark()                                     the input of the pass has arrived
    clock.mark()                                     the pass has been computed
    clock.mark()                                     its result is being sent
    clock.join()                                     all ranks have ended their passes

Both call:

    with clock.phase(ATTENTION, "attention"):        names a range in a torch profiler's trace, and times it
    with clock.optimizer_step():                     around the engine's step
    clock.end_step()                                 after each optimizer step
    clock.pop_finished()                             returns the `StepTimes` of the steps that the device has finished
    clock.latest_ranges()                            returns the named ranges of the last of these steps

On CUDA a time mark is an event on the current stream, which is read after it has happened. So waiting for another rank
counts in the phase in which the stream waits. Elsewhere it is the wall clock of the computing thread. A phase inside
another phase, or on another stream than the forward's, has a name in the trace, but no time. Every rank has its own
clock; `ds_hetero.job.pipeline_times` aligns them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from ds_hetero.values.plans.timetable import BACKWARD, FORWARD

ATTENTION = "attention"  # kernels, and merging their results
ALL_TO_ALL = "all_to_all"  # packing, sending, and waiting for the slowest rank of the group
RING_WAIT = "ring_wait"  # waiting for KV or its gradient to arrive, or to be sent
IDLE = "idle"  # waiting in any other collective
SYNC = "sync"  # sending gradients of pipelines to their owners, and new values back

RANGE_PREFIX = "ds_hetero."  # of the names in a torch profiler's trace
_IN_BLOCK = (ATTENTION, ALL_TO_ALL, RING_WAIT)
_KEPT_STEPS = 256  # older steps that were not popped are dropped
_MARKS_OF_PASS = 4  # asked, begin, end, sent
_MARKS_COMPUTING = 2  # that a pass has while it is computed

_Mark = Any  # a time mark: perf_counter's seconds, or a CUDA event


class PassTimes(NamedTuple):
    """Times of one pass of one micro-batch, in seconds since the step began on this rank.

    Attributes:
        kind: `ds_hetero.values.plans.timetable.FORWARD` or ``BACKWARD``.
        micro_batch: its number.
        ready_s: when the rank was ready for the pass.
        begin_s: when its input had arrived.
        end_s: when it had been computed; for a backward of a replica, when its last exchange had ended.
        sent_s: when its result was being sent, and the rank was free.
        layers_s: seconds that a forward spent in the layers of a stage, without embedding and head.
    """

    kind: str
    micro_batch: int
    ready_s: float
    begin_s: float
    end_s: float
    sent_s: float
    layers_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times and counts of one optimizer step on one rank.

    Args:
        joined_s: time from the end of the step before until all ranks had ended their passes; 0 if ranks do not wait
            for that.
        model_s: time of passes outside the phases: the rank's work that grows with its tokens. The remaining part of
            ``step_s`` is the optimizer, the loader, the host, and collectives on other streams.
    """

    number: int = 0  # index of the step since the clock was made; the same on every rank
    step_s: float  # since the end of the step before
    joined_s: float = 0.0
    attention_s: float  # in the phases of kind `ATTENTION`
    all_to_all_s: float  # in the phases of kind `ALL_TO_ALL`
    ring_wait_s: float  # in the phases of kind `RING_WAIT`
    idle_s: float  # in the phases of kind `IDLE`
    sync_s: float = 0.0  # in the phases of kind `SYNC`
    model_s: float
    attention_flops: int  # for each pair of query and key, head and element of a head: 4 forward, 10 backward
    attention_backward_flops: int  # the backward's part of ``attention_flops``
    tokens: int  # of this rank, in all rows and micro-batches
    length: int  # tokens of the longest sequence over all ranks
    passes: tuple[PassTimes, ...] = ()  # in the order in which they ran


@dataclass(frozen=True, slots=True)
class NamedRange:
    """A named range of a step, as in a torch profiler's trace."""

    name: str  # with `RANGE_PREFIX`
    start_s: float  # since the step began on this rank
    stop_s: float


class Clock:
    """A clock that names phases for a profiler, and measures nothing."""

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Return a context that is a named range in a profiler's trace.

        Args:
            kind: kind of phase, one of this module's constants, such as `ATTENTION`.
            name: name of the range, to which the trace prepends ``ds_hetero.``.
        """
        return _named(name)

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count FLOPs of attention; see `StepTimes`."""

    def count_batch(self, rows: int, tokens: int, length: int) -> None:
        """Count a micro-batch of ``rows`` sequences of ``length`` tokens, of each of which this rank has ``tokens``."""

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""

    def mark(self) -> None:
        """Take the next time mark of the pass that was started last."""

    def enter_layers(self) -> None:
        """Note that the first layer of the stage begins."""

    def leave_layers(self) -> None:
        """Note that the last layer of the stage has ended."""


UNTIMED = Clock()
_UNNAMED = nullcontext()


def _named(name: str) -> AbstractContextManager[object]:
    """Return a range in torch's profiler; an empty context if no profiler runs, since a range takes 6 us."""
    return record_function(RANGE_PREFIX + name) if profiler._is_profiler_enabled else _UNNAMED


@dataclass
class _Pass:
    """Time marks of one pass, as `StepClock` takes them, and the named ranges that the pass contains."""

    kind: str
    micro_batch: int
    marks: list[_Mark]
    first: int = 0  # index of the first range in it
    last: int = 0  # index behind the last range in it
    layer_marks: list[_Mark] = field(default_factory=list)  # begin and end of the stage's layers


@dataclass
class _Step:
    """Time marks and counts of one step, as `StepClock` takes them; `StepTimes` is made from them."""

    number: int = 0
    begin: _Mark | None = None
    joined: _Mark | None = None
    end: _Mark | None = None
    ranges: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)  # (kind, begin, end) of each phase
    names: list[str] = field(default_factory=list)  # of the ranges
    # (name, begin, end) of forwards, backwards and steps of the engine
    calls: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)
    passes: list[_Pass] = field(default_factory=list)
    is_training: bool = True
    attention_flops: int = 0
    attention_backward_flops: int = 0
    tokens: int = 0
    length: int = 0

    def add_pass(self, kind: str, begin: _Mark, end: _Mark, first: int, last: int) -> None:
        """Record a pass that receives and sends no message; its ranges are [``first``, ``last``)."""
        micro_batch = sum(record.kind == kind for record in self.passes)
        self.passes.append(_Pass(kind, micro_batch, [begin, begin, end, end], first, last))


class StepClock(Clock):
    """Measures this rank's steps.

    Args:
        device: on which this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now, self._elapsed_s, self._is_over, self._stream = _events() if device.type == "cuda" else _wall_clock()
        self._main_stream = 0
        self._step = _Step()
        self._pending: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._is_in_phase = False
        # The mark at which the gradients of the present backward were computed, and the number of ranges until then.
        self._gradients: tuple[_Mark, int] | None = None
        self._latest: _Step | None = None

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Name and time the range inside; see `Clock.phase`."""
        return _Phase(self, kind, name)

    def begin_phase(self) -> _Mark | None:
        """Return the mark at which a phase begins; None for a phase that is named only, and not timed."""
        if self._is_in_phase or self._stream() != self._main_stream:
            return None
        self._is_in_phase = True
        return self._now()

    def end_phase(self, kind: str, name: str, begin: _Mark) -> None:
        """End the phase that `begin_phase` has begun."""
        self._step.ranges.append((kind, begin, self._now()))
        self._step.names.append(name)
        self._is_in_phase = False

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count FLOPs of attention."""
        self._step.attention_flops += flops
        self._step.attention_backward_flops += flops if backward else 0

    def count_batch(self, rows: int, tokens: int, length: int) -> None:
        """Count a micro-batch; see `Clock.count_batch`."""
        self._step.tokens += rows * tokens
        self._step.length = max(self._step.length, length)

    @contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """Time a forward; a step with a forward of evaluation is dropped, since it shows nothing of training."""
        with _named("forward"):
            self._main_stream = self._stream()
            step, begin = self._step, self._now()
            step.begin = begin if step.begin is None else step.begin
            if not training:
                self.drop_step()
            first = len(step.ranges)
            try:
                yield
            finally:
                end = self._now()
                step.add_pass(FORWARD, begin, end, first, len(step.ranges))
                step.calls.append(("forward", begin, end))

    @contextmanager
    def backward(self, exchanges: bool = True) -> Iterator[None]:
        """Time a backward.

        Args:
            exchanges: whether its layers exchange messages. Then it is timed up to the last exchange, since it may wait
                for gradients of other ranks after that. Otherwise it is timed up to `note_gradients`, without the
                collectives on this stream.
        """
        with _named("backward"):
            step, begin = self._step, self._now()
            first = len(step.ranges)
            try:
                yield
            finally:
                end = self._now()
                gradients, self._gradients = self._gradients, None
                if exchanges:
                    in_block = [i for i in range(first, len(step.ranges)) if step.ranges[i][0] in _IN_BLOCK]
                    if in_block:
                        step.add_pass(BACKWARD, begin, step.ranges[in_block[-1]][2], first, in_block[-1] + 1)
                elif gradients is not None:
                    mark_of_gradients, last = gradients
                    step.add_pass(BACKWARD, begin, mark_of_gradients, first, last)
                step.calls.append(("backward", begin, end))

    def note_gradients(self) -> None:
        """Note that the present backward has computed its gradients, and will now exchange them."""
        self._gradients = self._now(), len(self._step.ranges)

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""
        begin, step = self._now(), self._step
        self._main_stream = self._stream()
        step.begin = begin if step.begin is None else step.begin
        step.passes.append(_Pass(kind, micro_batch, [begin]))

    def mark(self) -> None:
        """Take the next time mark of the pass that was started last."""
        current, num_ranges = self._step.passes[-1], len(self._step.ranges)
        current.marks.append(self._now())
        if len(current.marks) == _MARKS_COMPUTING:
            current.first = current.last = num_ranges
        elif len(current.marks) == _MARKS_COMPUTING + 1:
            current.last = num_ranges
            name = "forward" if current.kind == FORWARD else "backward"
            self._step.calls.append((name, current.marks[-2], current.marks[-1]))

    def enter_layers(self) -> None:
        """Note that the first layer begins, unless a backward computes the layers again."""
        if (current := self._computed_forward) is not None:
            current.layer_marks = [self._now()]

    def leave_layers(self) -> None:
        """Note that the last layer has ended."""
        if (current := self._computed_forward) is not None and len(current.layer_marks) == 1:
            current.layer_marks.append(self._now())

    @property
    def _computed_forward(self) -> _Pass | None:
        """The forward that is being computed, if any."""
        latest = self._step.passes[-1] if self._step.passes else None
        is_computing = latest is not None and latest.kind == FORWARD and len(latest.marks) == _MARKS_COMPUTING
        return latest if is_computing else None

    def join(self) -> None:
        """Note that all ranks have ended their passes."""
        self._step.joined = self._now()

    def drop_step(self) -> None:
        """Do not report the present step, since it has a forward of evaluation."""
        self._step.is_training = False

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Name and time the engine's step, which is not a phase."""
        with _named("step"):
            step, begin = self._step, self._now()
            try:
                yield
            finally:
                step.calls.append(("step", begin, self._now()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let `running_clock` return this clock inside the context, for code that a framework calls."""
        global _running
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before

    def end_step(self) -> None:
        """End a step, and begin the next one. A step with an unfinished pass is dropped."""
        step, now = self._step, self._now()
        is_complete = all(len(record.marks) == _MARKS_OF_PASS for record in step.passes)
        if step.begin is not None and step.is_training and is_complete:
            step.end = now
            self._pending.append(step)
        self._step = _Step(number=step.number + 1, begin=now)

    def restart(self) -> None:
        """Forget everything recorded so far."""
        self._pending.clear()
        self._step, self._latest = _Step(number=self._step.number), None

    def pop_finished(self) -> list[StepTimes]:
        """Remove and return the steps that the device has finished, oldest first."""
        finished = []
        while self._pending and self._is_over(self._pending[0].end):
            self._latest = self._pending.popleft()
            finished.append(self._read(self._latest))
        return finished

    def latest_ranges(self) -> list[NamedRange]:
        """Return the ranges of the step that was popped last, by their begin; [] before the first one."""
        step, elapsed = self._latest, self._elapsed_s
        if step is None:
            return []
        named = [(name, begin, end) for name, (_, begin, end) in zip(step.names, step.ranges, strict=True)]
        ranges = [
            NamedRange(RANGE_PREFIX + name, elapsed(step.begin, begin), elapsed(step.begin, end))
            for name, begin, end in (*step.calls, *named)
        ]
        return sorted(ranges, key=lambda named_range: (named_range.start_s, -named_range.stop_s))

    def _read(self, step: _Step) -> StepTimes:
        """Return the times between the marks of a step that the device has finished."""
        elapsed = self._elapsed_s
        seconds = [elapsed(begin, end) for _, begin, end in step.ranges]
        total = dict.fromkeys((*_IN_BLOCK, IDLE, SYNC), 0.0)
        for (kind, _, _), second in zip(step.ranges, seconds, strict=True):
            total[kind] += second
        model_s = 0.0
        for record in step.passes:
            ranges_s = sum(seconds[record.first : record.last])
            model_s += elapsed(*record.marks[1:3]) - ranges_s
        return StepTimes(
            number=step.number,
            step_s=elapsed(step.begin, step.end),
            joined_s=0.0 if step.joined is None else elapsed(step.begin, step.joined),
            attention_s=total[ATTENTION],
            all_to_all_s=total[ALL_TO_ALL],
            ring_wait_s=total[RING_WAIT],
            idle_s=total[IDLE],
            sync_s=total[SYNC],
            model_s=max(model_s, 0.0),
            attention_flops=step.attention_flops,
            attention_backward_flops=step.attention_backward_flops,
            tokens=step.tokens,
            length=step.length,
            passes=tuple(self._read_pass(step.begin, record) for record in step.passes),
        )

    def _read_pass(self, begin: _Mark, record: _Pass) -> PassTimes:
        """Return the times of a pass, relative to the mark ``begin`` of its step."""
        ready_s, begin_s, end_s, sent_s = (self._elapsed_s(begin, mark) for mark in record.marks)
        layers_s = self._elapsed_s(*record.layer_marks) if len(record.layer_marks) == 2 else 0.0
        return PassTimes(record.kind, record.micro_batch, ready_s, begin_s, end_s, sent_s, layers_s)


class _Phase:
    """A phase of a `StepClock`. A class is faster than a generator, and layers of many documents have hundreds."""

    __slots__ = ("_begin", "_clock", "_kind", "_name", "_named")

    def __init__(self, clock: StepClock, kind: str, name: str) -> None:
        self._clock, self._kind, self._name = clock, kind, name

    def __enter__(self) -> None:
        self._named = _named(self._name)
        self._named.__enter__()
        self._begin = self._clock.begin_phase()

    def __exit__(self, *error: Any) -> None:
        if self._begin is not None:
            self._clock.end_phase(self._kind, self._name, self._begin)
        self._named.__exit__(*error)


_running: Clock = UNTIMED


def running_clock() -> Clock:
    """Return the clock of the engine that is in a forward, a backward or a step; `UNTIMED` outside."""
    return _running


_Reading = tuple[Callable[[], _Mark], Callable[[_Mark, _Mark], float], Callable[[_Mark], bool], Callable[[], int]]
"""Functions that take a mark, measure the seconds between two, tell if one has happened, and return the stream."""


def _wall_clock() -> _Reading:
    """Return the functions that take and read time marks on a device without streams: seconds of perf_counter."""
    return time.perf_counter, lambda begin, end: float(end - begin), lambda mark: True, lambda: 0


def _events() -> _Reading:
    """Return the functions that take and read time marks on CUDA: events on the current stream."""

    def now() -> _Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return (
        now,
        lambda begin, end: float(begin.elapsed_time(end)) / 1e3,
        lambda mark: bool(mark.query()),
        lambda: int(torch.cuda.current_stream().cuda_stream),
    )
