"""Looks at where the ranks' time goes, every few steps: tells the monitor, keeps a table, changes schedules.

A look is one small all_gather; where re-planning is on, rank 0 then decides and tells the others, which is one more.
Nothing here waits for the device: steps that it has not finished are looked at next time.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Protocol

import torch.distributed as dist

from ds_hetero.job.rank_times import (
    RankTimes,
    UnitCosts,
    events,
    gather,
    observation_of,
    peak_flops_per_s,
    possible_growth,
    table,
)
from ds_hetero.job.report import announce
from ds_hetero.job.start import JobStart
from ds_hetero.models import ModelSpec
from ds_hetero.plan import Plan
from ds_hetero.planner.replan.planned import Replanner
from ds_hetero.runtime.collectives import all_gather_bytes, message_device
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.schedule import Schedule

__all__ = ["Change", "EventWriter", "Watch"]

logger = logging.getLogger(__name__)

WARM_UP = 2  # steps at the start that are not looked at: first calls of kernels, libraries that load late
AFTER_CHANGE = 1  # the same after a change of schedule: tables and buffers of the new one
USUAL_INTERVAL = 10  # steps between looks, where neither the section nor steps_per_print says otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of schedule in a running job.

    Args:
        step: optimizer steps that this process has done before it.
        replica: whose schedule changed, to which, and what it was predicted to save of a step's time.
    """

    step: int
    replica: int
    schedule: Schedule
    gain: float


class EventWriter(Protocol):
    """What writes numbers to the monitors of a training, such as DeepSpeed's."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write (name, value, samples so far) for each event."""


class Watch:
    """Looks after one engine.

    Args:
        steps_per_print: of the engine's configuration; None or infinite, as accelerate sets it, if it does not say.
        clock: of the model that the engine trains.
        agreed: what the ranks agreed on for the model.
        change: called on every rank with the new plan when a schedule has changed.
        writer: of the events that each look makes.

    Attributes:
        changes: of the schedules, oldest first; the same on every rank.

    Caller: every rank of the world.
    """

    def __init__(
        self,
        steps_per_print: float | None,
        clock: StepClock,
        agreed: JobStart,
        change: Callable[[Plan], None],
        writer: EventWriter,
    ) -> None:
        self.changes: list[Change] = []
        self._clock, self._agreed, self._change, self._writer = clock, agreed, change, writer
        self._plan = agreed.plan
        self._paces = UnitCosts()
        self._device = default_device()
        self._peak = peak_flops_per_s(self._device)
        self._control_device = message_device()
        replan = agreed.section.replan
        self._replans = replan.enabled and any(schedule.sp_size > 1 for schedule in self._plan.schedules)
        printed = int(steps_per_print) if steps_per_print and isfinite(steps_per_print) else USUAL_INTERVAL
        interval = replan.interval_steps if self._replans else printed
        (of_rank_0, *_), _ = all_gather_bytes([interval], b"")
        self._interval = of_rank_0[0]
        self._steps, self._skip = 0, WARM_UP
        self._totals: list[RankTimes] = []
        self._replanner: Replanner | None = None
        self._shape: ModelSpec | None = None
        self._peaks = [0.0] * dist.get_world_size()
        self._before_change = nan
        if dist.get_rank() == 0:
            self._know_what_is_trained()

    def _know_what_is_trained(self) -> None:
        """Rank 0 does the sums."""
        forecasts, section, model = self._agreed.forecasts, self._agreed.section, self._agreed.facts.model
        self._shape = model.spec
        if model.spec is None:
            logger.debug("no MFU: %s", model.no_spec_reason)
        for forecast in forecasts:
            for rank, device in zip(forecast.schedule.ranks, forecast.cost.cluster.devices, strict=True):
                self._peaks[rank] = device.peak_flops_per_s
        if self._replans:
            self._replanner = Replanner(
                len(self._plan.schedules),
                [forecast.cost for forecast in forecasts],
                section.replan.min_gain,
                section.layout,
                model.causal,
            )
        atexit.register(self.conclude)

    def stepped(self, samples: int) -> None:
        """Count an optimizer step, and look at the ranks' times if it is due.

        Args:
            samples: of all optimizer steps so far, the abscissa of the monitor's events.

        Caller: every rank of the world, after each optimizer step.
        """
        self._clock.end_step()
        self._steps += 1
        if self._skip:
            self._skip -= 1
            self._clock.pop_finished()
        elif self._steps % self._interval == 0:
            self._look(samples)

    # --- looking ------------------------------------------------------------------------------------

    def _look(self, samples: int) -> None:
        steps = self._clock.pop_finished()
        for step in steps:
            self._paces.add(step)
        mine = RankTimes.of(steps, self._paces, possible_growth(self._device), self._peak)
        everyone = gather(mine, self._control_device)
        if not all(rank.steps for rank in everyone):  # evaluating, or a device that is far behind
            return
        self._totals = [a + b for a, b in zip(self._totals, everyone, strict=True)] if self._totals else everyone
        if self._replans:
            self._say_what_a_change_brought(everyone)
            self._replan(everyone)
        if self._writer.enabled and dist.get_rank() == 0:
            told = events(everyone, self._shape, self._peaks, len(self.changes), samples)
            self._writer.write_events(told)

    def _replan(self, everyone: Sequence[RankTimes]) -> None:
        payload = b""
        if self._replanner is not None:
            looks = [observation_of([everyone[rank] for rank in schedule.ranks]) for schedule in self._plan.schedules]
            try:
                decisions = self._replanner.decide(self._plan.schedules, looks)
            except Exception:  # the other ranks wait for an answer, and training can go on without a new schedule
                logger.exception("re-planning failed; the schedule stays from now on")
                self._replanner, decisions = None, []
            told = {i: [d.schedule.to_dict(), d.gain] for i, d in enumerate(decisions) if d is not None}
            payload = json.dumps(told).encode() if told else b""
        _, payloads = all_gather_bytes([], payload)
        if not payloads[0]:
            return
        schedules = list(self._plan.schedules)
        for replica, (data, gain) in json.loads(payloads[0]).items():
            schedules[int(replica)] = Schedule.from_dict(data)
            self.changes.append(
                Change(step=self._steps, replica=int(replica), schedule=schedules[int(replica)], gain=gain)
            )
            if dist.get_rank() == 0:
                announce(
                    f"step {self._steps}: replica {replica} goes on under another schedule, predicted to save "
                    f"{gain:.1%} of a step: {json.dumps(data)}"
                )
        self._plan = self._plan.with_schedules(schedules)
        self._change(self._plan)
        self._before_change = _s_per_token(everyone)
        self._clock.restart()
        self._paces.restart()
        self._skip = AFTER_CHANGE

    def _say_what_a_change_brought(self, everyone: Sequence[RankTimes]) -> None:
        if dist.get_rank() == 0 and self._before_change == self._before_change:
            part = _s_per_token(everyone) / self._before_change
            announce(f"step {self._steps}: since the schedule changed, a token takes {part:.1%} of the time it took")
        self._before_change = nan

    # --- the end ------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Rank 0 shows the table, once; what came after the last look is not in it."""
        atexit.unregister(self.conclude)
        if self._totals and dist.is_initialized() and dist.get_rank() == 0:
            announce("\n" + table(self._totals, self._shape, self._peaks, len(self.changes)))
        self._totals = []


def _s_per_token(everyone: Sequence[RankTimes]) -> float:
    return max(rank.step_s for rank in everyone) / sum(rank.tokens for rank in everyone)
