"""Looks at where the ranks' time goes, every few steps: for the monitors of the training, for people, for re-planning.

One observation is one small exchange of all ranks; re-planning adds one more. Nothing here waits for the device: steps
that it has not finished are observed next time.
"""

from __future__ import annotations

import atexit
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from ds_hetero.common.announce import announce
from ds_hetero.common.reading import JsonObject
from ds_hetero.decision.decide import JobStart
from ds_hetero.job.document_zones import DocumentZones
from ds_hetero.job.documents import CostRenewal
from ds_hetero.job.job_times import JobTimes, times_of_passes, utilizations
from ds_hetero.job.pipeline_times import common_steps
from ds_hetero.job.rank_times import RECENT_STEPS, RankTimes, peak_flops_per_s
from ds_hetero.job.replanning import Replanning
from ds_hetero.job.run_record import RunRecord, Snapshot
from ds_hetero.job.start import World
from ds_hetero.job.stragglers import Stragglers, scores
from ds_hetero.job.times_report import events, times_table
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.runtime.collectives import all_gather_bytes
from ds_hetero.runtime.devices import default_device, possible_growth
from ds_hetero.runtime.peers.board import before_forced_exit
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_clock import StepClock, StepTimes
from ds_hetero.values.plans import Plan

WARM_UP = 2  # steps at the start that are not observed: first calls of kernels, libraries that load late
AFTER_CHANGE = 1  # the same after a change of schedule: tables and buffers of the new one
USUAL_INTERVAL = 10  # steps between observations, where neither the section nor the configuration says otherwise


class EventWriter(Protocol):
    """Writer of numbers to the monitors of a training, such as DeepSpeed's."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write (name, value, samples so far) for each event."""


@dataclass(frozen=True)
class DocumentObserver:
    """Observer where batches are placed by documents."""

    zones: DocumentZones  # where their tokens lie
    renewal: CostRenewal | None  # gives the placing new costs; None without re-planning


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who is given the observations of one model."""

    replanning: Replanning | None = None  # changes the plan; None where the section does not ask for it
    documents: DocumentObserver | None = None  # of placed documents; None where batches are cut by their length
    stragglers: Stragglers | None = None  # on rank 0, names slow ranks; None where the section does not ask for it
    record: RunRecord | None = None  # on rank 0, writes ``run.json``; None where the section does not ask for it


def steps_between(steps_per_print: float | None) -> int:
    """Steps between observations without re-planning: those of the configuration's prints, if it has some."""
    return int(steps_per_print) if steps_per_print and isfinite(steps_per_print) else USUAL_INTERVAL


class StepMonitor:
    """Observes the steps of one model; rank 0 reports them.

    Args:
        interval: steps between two observations; rank 0's is used.
        writer: of the events that each observation makes.

    Caller: every rank of the world.
    Collectives: one `all_gather_bytes`.
    """

    def __init__(
        self, start: JobStart, clock: StepClock, observers: Observers, interval: int, writer: EventWriter
    ) -> None:
        self._start, self._has_record = start, start.section.report is not None
        self.replanning, self._documents = observers.replanning, observers.documents
        self._stragglers = observers.stragglers
        self._record = observers.record
        self._clock, self._writer = clock, writer
        self._world = World.current()
        self._model, self._peaks = start.facts.model.spec, [0.0] * self._world.size  # of described devices, by rank
        for forecast in start.forecasts:
            for rank, device in zip(forecast.schedule.ranks, forecast.cost.cluster.devices, strict=True):
                self._peaks[rank] = device.peak_flops_per_s
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._device = default_device()
        (of_rank_0, *_), _ = all_gather_bytes([interval], b"")
        self._interval = of_rank_0[0]
        self._steps, self._steps_to_skip, self._num_observations = 0, WARM_UP, 0
        self._totals: list[RankTimes] = []
        self._latest = JobTimes([])
        if self._world.rank == 0:
            atexit.register(self.report)
        self._forget_forced_exit = None if self._record is None else before_forced_exit(self._record.end)

    @functools.cached_property
    def _unit_costs(self) -> RankUnitCosts:
        return RankUnitCosts()

    def keep_events(self, events: Sequence[JsonObject]) -> None:
        """Let the record have the events of an elastic job, which are added as they come."""
        if self._record is not None:
            self._record.events = events

    def record_step(self, samples: int) -> None:
        """Count an optimizer step on every rank, after ``samples`` in all; observe the ranks' times if it is due."""
        self._clock.end_step()
        self._steps += 1
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            self._clock.pop_finished()
        elif self._steps % self._interval == 0 or (self._has_record and not self._totals):
            self._observe(samples)

    @waiting_for_peers("comparing the times of the ranks")
    def _observe(self, samples: int) -> None:
        steps = self._clock.pop_finished()
        for step in steps:
            self._unit_costs.add(step)
            self._recent_s.append(step.attention_s + step.model_s)
        seen = self._all_ranks(steps)
        if seen is None:  # evaluating, or a device that is far behind
            return
        times, self._latest = seen.ranks, seen
        self._totals = [a + b for a, b in zip(self._totals, times, strict=True)] if self._totals else list(times)
        self._num_observations += 1
        self._keep(seen)
        if self._stragglers is not None:
            for line in self._stragglers.observe(self._steps, seen):
                announce(line)
        if self.replanning is not None and self.replanning.observe(self._steps, seen):
            self._begin_anew()
        if self._documents is not None and self._documents.renewal is not None:
            self._documents.renewal.observe(self._steps, times)
        self._write_events(seen, samples)

    def _all_ranks(self, steps: Sequence[StepTimes]) -> JobTimes | None:
        """Return what all ranks say of their steps; None if one has none to speak of."""
        growth, peak = possible_growth(self._device), peak_flops_per_s(self._device)
        own = RankTimes.of(steps, self._unit_costs, growth, peak, self._recent_s)
        of_passes = self._start.is_of_pipelines
        times, with_passes = zip(*self._world.on_all_ranks(lambda: (own, steps if of_passes else ())), strict=True)
        if not of_passes:
            return JobTimes(times) if all(rank.steps for rank in times) else None
        common = common_steps(with_passes)
        return times_of_passes(self._plan, times, common) if common else None

    @property
    def _plan(self) -> Plan:
        return self._start.plan if self.replanning is None else self.replanning.plan

    def _keep(self, seen: JobTimes) -> None:
        """Let the record keep an observation; at the 1st, 2nd, 4th, 8th ... one, a trace of every rank too."""
        if not self._has_record:
            return
        if self._num_observations & (self._num_observations - 1) == 0:
            own = Snapshot.take(self._device, self._clock.latest_ranges())
            _, snapshots = all_gather_bytes([], own.to_bytes())
            if self._record is not None:
                self._record.add_snapshots(self._steps, list(map(Snapshot.from_bytes, snapshots)))
        if self._record is not None:
            self._record.add(self._steps, seen, self._totals)

    @property
    def changed_plan(self) -> Plan | None:
        """The plan from re-planning; None while it runs what it began with."""
        return None if self._plan.fingerprint == self._start.plan.fingerprint else self._plan

    def resume(self, plan: JsonObject) -> None:
        """Go on with a checkpoint's changed plan, if it fits this job; on every rank, between two steps."""
        if self.replanning is not None and self.replanning.resume(plan):
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what was observed under another plan."""
        self._clock.restart()
        self._unit_costs.restart()
        self._recent_s.clear()
        if self._stragglers is not None:
            self._stragglers.restart()
        self._steps_to_skip = AFTER_CHANGE

    def _write_events(self, seen: JobTimes, samples: int) -> None:
        shares = {} if self._documents is None else self._documents.zones.take_shares()
        if self._world.rank > 0:
            return
        if self._documents is not None:
            self._documents.zones.announce_once(shares)
        if self._writer.enabled:
            of_zones = [(f"Heterogeneity/zone_{zone}_share", share, samples) for zone, share in shares.items()]
            of_job = events(seen, self._plan, utilizations(seen, self._model, self._peaks), self._num_changes, samples)
            self._writer.write_events([*of_job, *of_zones, *self._straggler_events(seen.ranks, samples)])

    def _straggler_events(self, times: Sequence[RankTimes], samples: int) -> list[tuple[str, float, int]]:
        if self._stragglers is None:
            return []
        out = []
        for number, (rank, score) in enumerate(zip(times, scores([one.own_median_s for one in times]), strict=True)):
            values = {"min": rank.own_min_s, "median": rank.own_median_s, "max": rank.own_max_s}
            out += [
                (f"Heterogeneity/rank{number}/computing_{name}_s", value, samples) for name, value in values.items()
            ]
            out.append((f"Heterogeneity/rank{number}/straggler_score", score, samples))
        return out

    @property
    def _num_changes(self) -> int:
        return 0 if self.replanning is None else len(self.replanning.changes)

    def report(self) -> None:
        """Show the table on rank 0, once; steps after the last observation are not in it."""
        atexit.unregister(self.report)
        if self._totals and self._world.rank == 0:
            seen = JobTimes(self._totals, self._latest.pipelines)
            utilization = utilizations(seen, self._model, self._peaks)
            announce("\n" + times_table(seen, self._plan, utilization, self._num_changes))
        if self._record is not None and self._forget_forced_exit is not None:
            self._forget_forced_exit()
            self._record.end()
        self._record, self._totals = None, []
