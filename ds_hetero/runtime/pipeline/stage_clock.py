"""When a rank of a pipeline did what: the moments of every pass of a step, taken without making the device wait.

    clock.start_pass(FORWARD, 3)     the rank asks for what the pass needs
    clock.mark()                     it is there
    clock.mark()                     the pass has been computed
    clock.mark()                     its result is on its way
    clock.join()                     all ranks have ended their passes
    with clock.synchronizing():      gradients, norm and new values travel
    clock.end_step()                 after the optimizer's step
    clock.pop_finished()             returns the `StageStep` of the steps that the device has finished

On CUDA a moment is an event on the current stream, elsewhere the wall clock. Moments of different ranks are on clocks
of their own; `ds_hetero.job.pipeline_times` brings them together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ds_hetero.plans.timetable import FORWARD
from ds_hetero.runtime.step_clock import reading_of

__all__ = ["UNTIMED", "PassClock", "PassTimes", "StageClock", "StageStep"]

_KEPT_STEPS = 64  # older ones that nobody has popped are dropped
_MOMENTS = 4  # of a pass
_COMPUTING = 2  # moments of a pass that is being computed

_Mark = Any  # a moment: perf_counter's seconds, or a CUDA event


class PassTimes(NamedTuple):
    """One pass of one micro-batch; seconds since the step began on this rank.

    Args:
        kind: `ds_hetero.plans.timetable.FORWARD` or ``BACKWARD``.
        micro_batch: its number.
        asked_s: the rank was ready for it.
        begin_s: its input was there.
        end_s: it was computed.
        sent_s: its result was on its way, and the rank was free.
        layers_s: seconds of a forward that its layers took, without what the stage does before and after them.
    """

    kind: str
    micro_batch: int
    asked_s: float
    begin_s: float
    end_s: float
    sent_s: float
    layers_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStep:
    """One optimizer step on one rank.

    Args:
        number: of the step, since the clock was made; the same on every rank.
        step_s: since the end of the step before.
        joined_s: from the same moment, until all ranks had ended their passes.
        sync_s: exchanging gradients and new values.
        passes: in the order in which they ran; none on a rank that is idle.
    """

    number: int
    step_s: float
    joined_s: float
    sync_s: float
    passes: tuple[PassTimes, ...]


@dataclass
class _Pass:
    """What is recorded during a pass."""

    kind: str
    micro_batch: int
    moments: list[_Mark]
    of_layers: list[_Mark] = field(default_factory=list)  # begin and end of the stage's layers


@dataclass
class _Step:
    """What is recorded during a step."""

    number: int = 0
    begin: _Mark | None = None
    joined: _Mark | None = None
    end: _Mark | None = None
    passes: list[_Pass] = field(default_factory=list)
    syncs: list[tuple[_Mark, _Mark]] = field(default_factory=list)


class PassClock:
    """Is told of passes and measures nothing."""

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""

    def mark(self) -> None:
        """The next moment of the pass that was started last."""

    def enter_layers(self) -> None:
        """The first layer of the stage begins."""

    def leave_layers(self) -> None:
        """The last layer of the stage has ended."""


UNTIMED = PassClock()


class StageClock(PassClock):
    """Measures this rank's steps of a pipeline.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now, self._elapsed_s, self._is_over, _ = reading_of(device)
        self._step = _Step()
        self._pending: deque[_Step] = deque(maxlen=_KEPT_STEPS)

    def start_pass(self, kind: str, micro_batch: int) -> None:
        """Begin a pass; three calls of `mark` follow."""
        begin = self._now()
        if self._step.begin is None:
            self._step.begin = begin
        self._step.passes.append(_Pass(kind, micro_batch, [begin]))

    def mark(self) -> None:
        """The next moment of the pass that was started last."""
        self._step.passes[-1].moments.append(self._now())

    def enter_layers(self) -> None:
        """The first layer of the stage begins; layers that a backward computes again do not count."""
        if (current := self._forward) is not None:
            current.of_layers = [self._now()]

    def leave_layers(self) -> None:
        """The last layer of the stage has ended."""
        if (current := self._forward) is not None and len(current.of_layers) == 1:
            current.of_layers.append(self._now())

    @property
    def _forward(self) -> _Pass | None:
        """The forward that is being computed."""
        latest = self._step.passes[-1] if self._step.passes else None
        is_computing = latest is not None and latest.kind == FORWARD and len(latest.moments) == _COMPUTING
        return latest if is_computing else None

    def join(self) -> None:
        """All ranks have ended their passes."""
        self._step.joined = self._now()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Time an exchange of gradients or values."""
        begin = self._now()
        try:
            yield
        finally:
            self._step.syncs.append((begin, self._now()))

    def end_step(self) -> None:
        """End a step; the next one begins here. Passes that were broken off, and steps without a join, are dropped."""
        step, now = self._step, self._now()
        whole = all(len(each.moments) == _MOMENTS for each in step.passes)
        if step.begin is not None and step.joined is not None and whole:
            step.end = now
            self._pending.append(step)
        self._step = _Step(number=step.number + 1, begin=now)

    def restart(self) -> None:
        """Forget everything recorded so far."""
        self._pending.clear()
        self._step = _Step(number=self._step.number)

    def pop_finished(self) -> list[StageStep]:
        """Remove and return the steps that the device has finished, oldest first."""
        finished = []
        while self._pending and self._is_over(self._pending[0].end):
            finished.append(self._read(self._pending.popleft()))
        return finished

    def _read(self, step: _Step) -> StageStep:
        elapsed = self._elapsed_s
        return StageStep(
            number=step.number,
            step_s=elapsed(step.begin, step.end),
            joined_s=elapsed(step.begin, step.joined),
            sync_s=sum(elapsed(begin, end) for begin, end in step.syncs),
            passes=tuple(self._read_pass(step.begin, each) for each in step.passes),
        )

    def _read_pass(self, begin: _Mark, each: _Pass) -> PassTimes:
        asked_s, begin_s, end_s, sent_s = (self._elapsed_s(begin, moment) for moment in each.moments)
        layers_s = self._elapsed_s(*each.of_layers) if len(each.of_layers) == 2 else 0.0
        return PassTimes(each.kind, each.micro_batch, asked_s, begin_s, end_s, sent_s, layers_s)
