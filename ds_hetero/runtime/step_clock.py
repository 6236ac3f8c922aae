"""Clock of a step: where its time goes on this rank, measured without making the device wait.

A step has passes, forward and backward of its micro-batches, and a pass has phases. A replica of one stage runs its
passes in the engine's forward and backward:

    with clock.forward(True):                        around the engine's forward
    with clock.backward():                           around its backward
    clock.note_gradients()                           inside: the gradients have been computed

and a stage of a pipeline says when a pass begins and how far it is:

    clock.start_pass(FORWARD, 3)                     the rank asks for what the pass needs
    clock.mark()                                     it is there
    clock.mark()                                     the pass has been computed
    clock.mark()                                     its result is on its way
    clock.join()                                     all ranks have ended their passes

Alike in both:

    with clock.phase(ATTENTION, "attention"):        names a range in a torch profiler's trace, and times it
    with clock.optimizer_step():                     around the engine's step
    clock.end_step()                                 after each optimizer step
    clock.pop_finished()                             returns the `StepTimes` of the steps that the device has finished
    clock.latest_ranges()                            returns the ranges of the last one of them, by name

On CUDA a moment is an event on the current stream, read after it has happened, so waiting for another rank counts
where the stream waits. Elsewhere it is the wall clock of the computing thread. A phase inside another one, or on a
stream other than the forward's, gets its name in the trace but no time of its own. Moments of different ranks are on
clocks of their own; `ds_hetero.job.pipeline_times` brings them together.
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

ATTENTION = "attention"  # kernels, and the merging of what they return
ALL_TO_ALL = "all_to_all"  # packing, moving, and waiting for the slowest of the group
RING_WAIT = "ring_wait"  # waiting for KV or its gradient to arrive, or to be sent
IDLE = "idle"  # waiting in any other collective
SYNC = "sync"  # gradients of pipelines to their owners, new values back

RANGE_PREFIX = "ds_hetero."  # of the names in a torch profiler's trace
_IN_BLOCK = (ATTENTION, ALL_TO_ALL, RING_WAIT)
_KEPT_STEPS = 256  # older ones that were not popped are dropped
_MOMENTS = 4  # of a pass
_COMPUTING = 2  # moments of a pass that is being computed

_Mark = Any  # a moment: perf_counter's seconds, or a CUDA event


class PassTimes(NamedTuple):
    """One pass of one micro-batch; seconds since the step began on this rank."""

    kind: str  # `ds_hetero.values.plans.timetable.FORWARD` or ``BACKWARD``
    micro_batch: int  # its number
    asked_s: float  # the rank was ready for it
    begin_s: float
    end_s: float  # it was computed; a backward of a replica, up to its last exchange
    sent_s: float  # its result was on its way, and the rank was free
    layers_s: float = 0.0  # seconds of a forward in the layers of a stage, without what is before and after them


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One optimizer step on one rank.

    Args:
        model_s: of passes outside those phases: the rank's work that grows with its tokens. The rest of `step_s` is the
            optimizer, the loader, the host, and collectives that run on streams of their own.
    """

    number: int = 0  # of the step, since the clock was made; the same on every rank
    step_s: float  # since the end of the step before
    joined_s: float = 0.0  # from the same moment, until all ranks had ended their passes; 0 where that is not awaited
    attention_s: float  # in the phases of kind `ATTENTION`
    all_to_all_s: float  # in the phases of kind `ALL_TO_ALL`
    ring_wait_s: float  # in the phases of kind `RING_WAIT`
    idle_s: float  # in the phases of kind `IDLE`
    sync_s: float = 0.0  # in the phases of kind `SYNC`
    model_s: float
    attention_flops: int  # per pair, head and element of a head: 4 in a forward, 10 in the backward
    attention_backward_flops: int  # the backward's part of them
    tokens: int  # held by this rank, of all rows and micro-batches
    length: int  # tokens of the longest sequence over all ranks
    passes: tuple[PassTimes, ...] = ()  # in the order in which they ran


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One range of a step, as a torch profiler's trace shows it."""

    name: str  # with `RANGE_PREFIX`
    start_s: float  # since the step began on this rank
    stop_s: float


class Clock:
    """Names phases for a profiler and measures nothing."""

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Name the range inside: one of this module's constants, and in the trace ``ds_hetero.`` and the name."""
        return _named(name)

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count operations of attention; see `StepTimes`."""

    def count_batch(self, rows: int, tokens: int, length: int) -> None:
        """Count a micro-batch of ``rows`` sequences of ``length`` tokens, of which this rank holds ``tokens`` each."""

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""

    def mark(self) -> None:
        """Take the next moment of the pass that was started last."""

    def enter_layers(self) -> None:
        """Take note that the first layer of the stage begins."""

    def leave_layers(self) -> None:
        """Take note that the last layer of the stage has ended."""


UNTIMED = Clock()
_UNNAMED = nullcontext()


def _named(name: str) -> AbstractContextManager[object]:
    """Return the range of a name in torch's profiler; nothing where none runs, since naming takes 6 us."""
    return record_function(RANGE_PREFIX + name) if profiler._is_profiler_enabled else _UNNAMED


@dataclass
class _Pass:
    """Record of a pass; ``first`` and ``last`` are indices of the ranges in it."""

    kind: str
    micro_batch: int
    moments: list[_Mark]
    first: int = 0
    last: int = 0
    of_layers: list[_Mark] = field(default_factory=list)  # begin and end of the stage's layers


@dataclass
class _Step:
    """Record of a step."""

    number: int = 0
    begin: _Mark | None = None
    joined: _Mark | None = None
    end: _Mark | None = None
    ranges: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of ranges
    calls: list[tuple[str, _Mark, _Mark]] = field(default_factory=list)  # forwards, backwards and steps of the engine
    passes: list[_Pass] = field(default_factory=list)
    is_training: bool = True
    attention_flops: int = 0
    attention_backward_flops: int = 0
    tokens: int = 0
    length: int = 0

    def add_pass(self, kind: str, begin: _Mark, end: _Mark, first: int, last: int) -> None:
        """Record a pass that waits for no message and sends none."""
        micro_batch = sum(one.kind == kind for one in self.passes)
        self.passes.append(_Pass(kind, micro_batch, [begin, begin, end, end], first, last))


class StepClock(Clock):
    """Measures this rank's steps. ``device``: where this rank computes."""

    def __init__(self, device: torch.device) -> None:
        self._now, self._elapsed_s, self._is_over, self._stream = _events() if device.type == "cuda" else _wall_clock()
        self._main_stream = 0
        self._step = _Step()
        self._pending: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._inside = False
        self._gradients: tuple[_Mark, int] | None = None  # moment and ranges when those of a backward were computed
        self._latest: _Step | None = None

    def phase(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Name and time the range inside; see `Clock.phase`."""
        return _Phase(self, kind, name)

    def begin_phase(self) -> _Mark | None:
        """Return the moment at which a phase begins; None for one that takes no time of its own."""
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
            exchanges: between its layers. Then it is timed up to the last of them: what follows may be a wait for
                gradients of other ranks. Without, up to `note_gradients`, less the collectives on this stream.
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
                    moment, last = gradients
                    step.add_pass(BACKWARD, begin, moment, first, last)
                step.calls.append(("backward", begin, end))

    def note_gradients(self) -> None:
        """Take note that the backward that runs has computed its gradients; what it does next is to exchange them."""
        self._gradients = self._now(), len(self._step.ranges)

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""
        begin, step = self._now(), self._step
        self._main_stream = self._stream()
        step.begin = begin if step.begin is None else step.begin
        step.passes.append(_Pass(kind, micro_batch, [begin]))

    def mark(self) -> None:
        """Take the next moment of the pass that was started last."""
        current, num_ranges = self._step.passes[-1], len(self._step.ranges)
        current.moments.append(self._now())
        if len(current.moments) == _COMPUTING:
            current.first = current.last = num_ranges
        elif len(current.moments) == _COMPUTING + 1:
            current.last = num_ranges
            name = "forward" if current.kind == FORWARD else "backward"
            self._step.calls.append((name, current.moments[-2], current.moments[-1]))

    def enter_layers(self) -> None:
        """Take note that the first layer begins; layers that a backward computes again do not count."""
        if (current := self._computed_forward) is not None:
            current.of_layers = [self._now()]

    def leave_layers(self) -> None:
        """Take note that the last layer has ended."""
        if (current := self._computed_forward) is not None and len(current.of_layers) == 1:
            current.of_layers.append(self._now())

    @property
    def _computed_forward(self) -> _Pass | None:
        """The forward that is being computed."""
        latest = self._step.passes[-1] if self._step.passes else None
        is_computing = latest is not None and latest.kind == FORWARD and len(latest.moments) == _COMPUTING
        return latest if is_computing else None

    def join(self) -> None:
        """Take note that all ranks have ended their passes."""
        self._step.joined = self._now()

    def drop_step(self) -> None:
        """Drop the step that runs: an evaluation in it says nothing about training."""
        self._step.is_training = False

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
        """Let `running_clock` return this clock inside, for code that a framework calls and not we."""
        global _running
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before

    def end_step(self) -> None:
        """End a step; the next one begins here. Steps with a pass that was broken off are dropped."""
        step, now = self._step, self._now()
        if step.begin is not None and step.is_training and all(len(one.moments) == _MOMENTS for one in step.passes):
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
        """Return the ranges of the step that was popped last, by their begin; none before the first one."""
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
        elapsed = self._elapsed_s
        seconds = [elapsed(begin, end) for _, begin, end in step.ranges]
        total = dict.fromkeys((*_IN_BLOCK, IDLE, SYNC), 0.0)
        for (kind, _, _), second in zip(step.ranges, seconds, strict=True):
            total[kind] += second
        model_s = sum(elapsed(*one.moments[1:3]) - sum(seconds[one.first : one.last]) for one in step.passes)
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
            passes=tuple(self._read_pass(step.begin, one) for one in step.passes),
        )

    def _read_pass(self, begin: _Mark, one: _Pass) -> PassTimes:
        asked_s, begin_s, end_s, sent_s = (self._elapsed_s(begin, moment) for moment in one.moments)
        layers_s = self._elapsed_s(*one.of_layers) if len(one.of_layers) == 2 else 0.0
        return PassTimes(one.kind, one.micro_batch, asked_s, begin_s, end_s, sent_s, layers_s)


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
    """Return the clock of the engine that is in a forward, a backward or a step; `UNTIMED` outside."""
    return _running


_Reading = tuple[Callable[[], _Mark], Callable[[_Mark, _Mark], float], Callable[[_Mark], bool], Callable[[], int]]
"""How to take the time, the seconds between two moments, whether one is over, and the stream that work goes to."""


def _wall_clock() -> _Reading:
    return time.perf_counter, lambda begin, end: float(end - begin), lambda mark: True, lambda: 0


def _events() -> _Reading:
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
