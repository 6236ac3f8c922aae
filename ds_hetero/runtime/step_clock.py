"""Where the time of a step goes on this rank, measured without making the device wait.

    with clock.phase(ATTENTION, "attention"):        names a range in a torch profiler's trace, and times it
    with clock.forward(True):                        around the engine's forward
    with clock.backward():                           around its backward
    with clock.optimizer_step():                     around its step
    clock.end_step()                                 after each optimizer step
    clock.pop_finished()                             returns the `StepTimes` of the steps that the device has finished
    clock.latest_ranges()                            returns the ranges of the last one of them, by name

On CUDA a phase is two events on the current stream, read after they have happened, so waiting for another rank counts
where the stream waits. Elsewhere it is the wall clock of the computing thread. A phase inside another one, or on a
stream other than the forward's, gets its name in the trace but no time of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

__all__ = [
    "ALL_TO_ALL",
    "ATTENTION",
    "IDLE",
    "RANGE_PREFIX",
    "RING_WAIT",
    "UNTIMED",
    "Clock",
    "NamedRange",
    "Reading",
    "StepClock",
    "StepTimes",
    "reading_of",
    "running_clock",
]

ATTENTION = "attention"  # kernels, and the merging of what they return
ALL_TO_ALL = "all_to_all"  # packing, moving, and waiting for the slowest of the group
RING_WAIT = "ring_wait"  # waiting for KV or its gradient to arrive, or to be sent
IDLE = "idle"  # waiting in any other collective

RANGE_PREFIX = "ds_hetero."  # of the names in a torch profiler's trace
_IN_BLOCK = (ATTENTION, ALL_TO_ALL, RING_WAIT)
_KEPT_STEPS = 256  # older ones that nobody has popped are dropped

_Mark = Any  # a moment: perf_counter's seconds, or a CUDA event


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One optimizer step on one rank.

    Args:
        step_s: since the end of the step before.
        attention_s: in the phases of kind `ATTENTION`.
        all_to_all_s: in the phases of kind `ALL_TO_ALL`.
        ring_wait_s: in the phases of kind `RING_WAIT`.
        idle_s: in the phases of kind `IDLE`.
        model_s: of forward and backward outside those phases, up to the last exchange of a backward: the rank's work
            that grows with its tokens. The rest of `step_s` is the optimizer, the loader, the host, and collectives
            that run on streams of their own.
        attention_flops: operations of this rank's attention per pair of query and key, head and element of a head: 4
            for each forward, 10 for the backward.
        attention_backward_flops: the backward's part of them.
        tokens: held by this rank, of all rows and micro-batches.
        length: tokens of the longest sequence over all ranks.
    """

    step_s: float
    attention_s: float
    all_to_all_s: float
    ring_wait_s: float
    idle_s: float
    model_s: float
    attention_flops: int
    attention_backward_flops: int
    tokens: int
    length: int


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One range of a step, as a torch profiler's trace shows it.

    Args:
        name: with `RANGE_PREFIX`.
        start_s: since the step began on this rank.
        stop_s: likewise.
    """

    name: str
    start_s: float
    stop_s: float


class Clock:
    """Names phases for a profiler and measures nothing."""

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Name the range inside.

        Args:
            kind: one of this module's constants.
            name: in the trace, after the prefix ``ds_hetero.``.
        """
        return _named(name)

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count operations of attention; see `StepTimes`."""

    def count_batch(self, rows: int, tokens: int, length: int) -> None:
        """Count a micro-batch of ``rows`` sequences of ``length`` tokens, of which this rank holds ``tokens`` each."""


UNTIMED = Clock()
_UNNAMED = nullcontext()


def _named(name: str) -> AbstractContextManager[object]:
    """The range of a name in the trace of torch's profiler; nothing where none runs, since naming takes 6 us."""
    return record_function(RANGE_PREFIX + name) if profiler._is_profiler_enabled else _UNNAMED


@dataclass
class _Step:
    """What is recorded during a step."""

    begin: _Mark | None = None
    end: _Mark | None = None
    ranges: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of ranges
    calls: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)  # forwards, backwards and steps of the engine
    passes: list[tuple[int, int, _Mark, _Mark]] = field(default_factory=list)  # first and last range, begin, end
    is_training: bool = True
    attention_flops: int = 0
    attention_backward_flops: int = 0
    tokens: int = 0
    length: int = 0


class StepClock(Clock):
    """Measures this rank's steps.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now, self._elapsed_s, self._is_over, self._stream = reading_of(device)
        self._main_stream = 0
        self._step = _Step()
        self._pending: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._inside = False
        self._latest: _Step | None = None

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Name and time the range inside; see `Clock.phase`."""
        return _Phase(self, kind, name)

    def begin_phase(self) -> _Mark | None:
        """The moment at which a phase begins; None for one that takes no time of its own."""
        if self._inside or self._stream() != self._main_stream:
            return None
        self._inside = True
        return self._now()

    def end_phase(self, kind: str, name: str, begin: _Mark) -> None:
        """End the phase that `begin_phase` has begun."""
        self._step.ranges.append((kind, begin, self._now()))
        self._step.names.append(name)
        self._inside = False

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count operations of attention."""
        self._step.attention_flops += flops
        self._step.attention_backward_flops += flops if backward else 0

    def count_batch(self, rows: int, tokens: int, length: int) -> None:
        """Count a micro-batch."""
        self._step.tokens += rows * tokens
        self._step.length = max(self._step.length, length)

    @contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """Time a forward; a step with an evaluation in it says nothing about training and is dropped."""
        with _named("forward"):
            self._main_stream = self._stream()
            step, begin = self._step, self._now()
            step.begin = begin if step.begin is None else step.begin
            step.is_training &= training
            first = len(step.ranges)
            try:
                yield
            finally:
                end = self._now()
                step.passes.append((first, len(step.ranges), begin, end))
                step.calls.append(("forward", begin, end))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward up to its last exchange; what follows may be a wait for gradients of other ranks."""
        with _named("backward"):
            step, begin = self._step, self._now()
            first = len(step.ranges)
            try:
                yield
            finally:
                in_block = [i for i in range(first, len(step.ranges)) if step.ranges[i][0] in _IN_BLOCK]
                if in_block:
                    step.passes.append((first, in_block[-1] + 1, begin, step.ranges[in_block[-1]][2]))
                step.calls.append(("backward", begin, self._now()))

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Name and time the engine's step, which is in no phase of its own."""
        with _named("step"):
            step, begin = self._step, self._now()
            try:
                yield
            finally:
                step.calls.append(("step", begin, self._now()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have `running_clock` return this clock inside, for code that a framework calls and not we."""
        global _running
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before

    def end_step(self) -> None:
        """End a step; the next one begins here. Call it after each optimizer step."""
        step, now = self._step, self._now()
        if step.begin is not None and step.is_training:
            step.end = now
            self._pending.append(step)
        self._step = _Step(begin=now)

    def restart(self) -> None:
        """Forget everything recorded so far."""
        self._pending.clear()
        self._step, self._latest = _Step(), None

    def pop_finished(self) -> list[StepTimes]:
        """Remove and return the steps that the device has finished, oldest first."""
        finished = []
        while self._pending and self._is_over(self._pending[0].end):
            self._latest = self._pending.popleft()
            finished.append(self._read(self._latest))
        return finished

    def latest_ranges(self) -> list[NamedRange]:
        """Return the ranges of the step that was popped last, by their begin; none before the first one."""
        step, elapsed = self._latest, self._elapsed_s
        if step is None:
            return []
        named = [(name, begin, end) for name, (_, begin, end) in zip(step.names, step.ranges, strict=True)]
        ranges = [
            NamedRange(RANGE_PREFIX + name, elapsed(step.begin, begin), elapsed(step.begin, end))
            for name, begin, end in (*step.calls, *named)
        ]
        return sorted(ranges, key=lambda each: (each.start_s, -each.stop_s))

    def _read(self, step: _Step) -> StepTimes:
        elapsed = self._elapsed_s
        seconds = [elapsed(begin, end) for _, begin, end in step.ranges]
        total = dict.fromkeys((*_IN_BLOCK, IDLE), 0.0)
        for (kind, _, _), second in zip(step.ranges, seconds, strict=True):
            total[kind] += second
        model_s = sum(elapsed(begin, end) - sum(seconds[first:last]) for first, last, begin, end in step.passes)
        return StepTimes(
            step_s=elapsed(step.begin, step.end),
            attention_s=total[ATTENTION],
            all_to_all_s=total[ALL_TO_ALL],
            ring_wait_s=total[RING_WAIT],
            idle_s=total[IDLE],
            model_s=max(model_s, 0.0),
            attention_flops=step.attention_flops,
            attention_backward_flops=step.attention_backward_flops,
            tokens=step.tokens,
            length=step.length,
        )


class _Phase:
    """A phase of a `StepClock`; a class, because layers of many documents have hundreds of them."""

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
    """The clock of the engine that is in a forward, a backward or a step; `UNTIMED` outside."""
    return _running


Reading = tuple[Callable[[], _Mark], Callable[[_Mark, _Mark], float], Callable[[_Mark], bool], Callable[[], int]]
"""How to take the time, the seconds between two moments, whether one is over, and the stream that work goes to."""


def reading_of(device: torch.device) -> Reading:
    """How to read the time where this rank computes, without making the device wait."""
    return _events() if device.type == "cuda" else _wall_clock()


def _wall_clock() -> Reading:
    return time.perf_counter, lambda begin, end: float(end - begin), lambda mark: True, lambda: 0


def _events() -> Reading:
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
