"""Observe the times of all ranks every few steps: for monitors of the training, for people, for re-planning.

    record_step        counts a step; every ``interval`` steps:
      _observe           all ranks exchange their times: one collective
        record, stragglers, documents     take the times
        experts                           take the rows of divided experts
        replanning                        may change the plan: one collective more
        monitors                          get the times as events
    report             prints the table over the whole job

Nothing here waits for the device: steps that the device has not finished yet belong to the next observation.
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
from ds_hetero.job.expert_loads import ExpertLoads
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
from ds_hetero.runtime.peers.forced_exit import before_forced_exit
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_clock import StepClock, StepTimes
from ds_hetero.values.plans import Plan

WARM_UP_STEPS = 2  # not observed at the start: kernels are called first, and libraries load late
SKIPPED_STEPS_AFTER_CHANGE = 1  # not observed after a change of the plan: its tables and buffers are made
# Steps between observations, if neither section nor configuration sets them; chosen, not measured.
DEFAULT_INTERVAL = 10


class EventWriter(Protocol):
    """Writer of numbers to the monitors of a training, such as DeepSpeed's."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write (name, value, samples so far) for each event."""


@dataclass(frozen=True)
class DocumentObserver:
    """Parts of the monitor that only a job has whose batches are placed by documents."""

    zones: DocumentZones  # counts the tokens of each zone
    renewal: CostRenewal | None  # gives new costs to the placer; None without re-planning


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Objects to which a `StepMonitor` passes the times that it observes; None for each that the job lacks."""

    replanning: Replanning | None = None  # changes the plan; None if the section does not ask for it
    documents: DocumentObserver | None = None  # None if batches are sharded by length
    stragglers: Stragglers | None = None  # on rank 0, names slow ranks; None if the section does not ask for it
    record: RunRecord | None = None  # on rank 0, writes ``run.json``; None if the section does not ask for it
    experts: ExpertLoads | None = None  # on every rank; None if experts are not divided


def steps_between(steps_per_print: float | None) -> int:
    """Return how many steps an observation covers without re-planning: ``steps_per_print``, or a default."""
    return int(steps_per_print) if steps_per_print and isfinite(steps_per_print) else DEFAULT_INTERVAL


class StepMonitor:
    """Observes the steps of one model; rank 0 reports them.

    Args:
        interval: steps between two observations; rank 0's is used.
        writer: writes the events of each observation.

    Caller: every rank of the world.
    Collectives: one `all_gather_bytes`.
    """

    def __init__(
        self, start: JobStart, clock: StepClock, observers: Observers, interval: int, writer: EventWriter
    ) -> None:
        self._start = start
        self._has_record = start.section.report is not None  # on every rank, as all send snapshots
        self.replanning = observers.replanning
        self._documents = observers.documents
        self._stragglers = observers.stragglers
        self._record = observers.record
        self._experts = observers.experts
        if self._record is not None:
            self._record.experts = self._experts
        self._clock, self._writer = clock, writer
        self._world = World.current()
        self._model = start.facts.model.spec
        self._peaks = [0.0] * self._world.size  # FLOP/s by rank, of devices that a cluster file describes
        for forecast in start.forecasts:
            for rank, device in zip(forecast.schedule.ranks, forecast.cost.cluster.devices, strict=True):
                self._peaks[rank] = device.peak_flops_per_s
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._device = default_device()
        intervals, _ = all_gather_bytes([interval], b"")
        self._interval = intervals[0][0]  # ranks that observed at different steps would wait for each other forever
        self._steps, self._steps_to_skip, self._num_observations = 0, WARM_UP_STEPS, 0
        self._totals: list[RankTimes] = []  # by rank, over all observations
        self._latest = JobTimes([])
        if self._world.rank == 0:
            atexit.register(self.report)
        self._forget_forced_exit = None if self._record is None else before_forced_exit(self._record.end)

    @functools.cached_property
    def _unit_costs(self) -> RankUnitCosts:
        """Measures this rank's seconds per FLOP of attention and per token; made at the first observation."""
        return RankUnitCosts()

    def keep_events(self, events: Sequence[JsonObject]) -> None:
        """Let the record contain the events of an elastic job. ``events``: a list that grows while the job runs."""
        if self._record is not None:
            self._record.events = events

    def record_step(self, samples: int) -> None:
        """Count an optimizer step on every rank; observe the ranks' times if an observation is due.

        Args:
            samples: trained since the begin of the training.
        """
        self._clock.end_step()
        self._steps += 1
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            self._clock.pop_finished()  # drop its times
            if self._experts is not None:
                self._experts.take_rows()
        # A job that writes run.json observes its first step at once: it may end before the interval has passed.
        elif self._steps % self._interval == 0 or (self._has_record and not self._totals):
            self._observe(samples)

    @waiting_for_peers("comparing the times of the ranks")
    def _observe(self, samples: int) -> None:
        """Exchange the times of all ranks, and pass them to the observers and the writer."""
        steps = self._clock.pop_finished()
        for step in steps:
            self._unit_costs.add(step)
            self._recent_s.append(step.attention_s + step.model_s)
        job_times = self._all_ranks(steps)
        if job_times is None:  # evaluating, or a device that is far behind
            return
        self._latest = job_times
        times = job_times.ranks
        if self._totals:
            self._totals = [total + rank_times for total, rank_times in zip(self._totals, times, strict=True)]
        else:
            self._totals = list(times)
        self._num_observations += 1
        self._add_to_record(job_times)
        if self._stragglers is not None:
            for line in self._stragglers.observe(self._steps, job_times):
                announce(line)
        if self.replanning is not None and self.replanning.observe(self._steps, job_times):
            self._restart_observation()
        if self._documents is not None and self._documents.renewal is not None:
            self._documents.renewal.observe(self._steps, times)
        self._write_events(job_times, samples)

    def _all_ranks(self, steps: Sequence[StepTimes]) -> JobTimes | None:
        """Return the times of all ranks; None if a rank has finished no step, or no step is finished by all.

        Collectives: one `on_all_ranks`.
        """
        growth, peak = possible_growth(self._device), peak_flops_per_s(self._device)
        rank_times = RankTimes.from_steps(steps, self._unit_costs, growth, peak, self._recent_s)
        has_pipelines = self._start.is_of_pipelines
        passes = steps if has_pipelines else ()  # timestamps of every pass: only pipelines pay for sending them
        rows = [] if self._experts is None else self._experts.take_rows()
        by_rank = self._world.on_all_ranks(lambda: (rank_times, passes, rows))
        times_by_rank, steps_by_rank, rows_by_rank = zip(*by_rank, strict=True)
        if self._experts is not None and self._world.rank == 0:
            for line in self._experts.observe(self._steps, rows_by_rank):
                announce(line)
        if not has_pipelines:
            return JobTimes(times_by_rank) if all(times.steps for times in times_by_rank) else None
        finished_by_all = common_steps(steps_by_rank)
        return times_of_passes(self._plan, times_by_rank, finished_by_all) if finished_by_all else None

    @property
    def _plan(self) -> Plan:
        """The plan that the job runs now."""
        return self._start.plan if self.replanning is None else self.replanning.plan

    def _add_to_record(self, job_times: JobTimes) -> None:
        """Add an observation to the record; the 1st, 2nd, 4th, 8th ... with a trace of every rank.

        Collectives: at these, one `all_gather_bytes`, if the section asks for a record.
        """
        if not self._has_record:
            return
        is_power_of_two = self._num_observations & (self._num_observations - 1) == 0
        if is_power_of_two:
            snapshot = Snapshot.take(self._device, self._clock.latest_ranges())
            _, snapshots = all_gather_bytes([], snapshot.to_bytes())
            if self._record is not None:
                self._record.add_snapshots(self._steps, list(map(Snapshot.from_bytes, snapshots)))
        if self._record is not None:
            self._record.add(self._steps, job_times, self._totals)

    @property
    def changed_plan(self) -> Plan | None:
        """The plan that re-planning has changed to; None while the job runs its first plan."""
        return None if self._plan.fingerprint == self._start.plan.fingerprint else self._plan

    def resume(self, plan: JsonObject) -> None:
        """Continue with the changed plan of a checkpoint, if that plan fits this job.

        Caller: every rank, between two steps.
        """
        if self.replanning is not None and self.replanning.resume(plan):
            self._restart_observation()

    def _restart_observation(self) -> None:
        """Discard the measurements of an unfinished observation, which are of another plan."""
        self._clock.restart()
        self._unit_costs.restart()
        self._recent_s.clear()
        if self._stragglers is not None:
            self._stragglers.restart()
        self._steps_to_skip = SKIPPED_STEPS_AFTER_CHANGE

    def _write_events(self, job_times: JobTimes, samples: int) -> None:
        """Announce the zones of documents once, and send the observation to the writer; on rank 0."""
        shares = {} if self._documents is None else self._documents.zones.take_shares()
        if self._world.rank > 0:
            return
        if self._documents is not None:
            self._documents.zones.announce_once(shares)
        if self._writer.enabled:
            utilization = utilizations(job_times, self._model, self._peaks)
            job_events = events(job_times, self._plan, utilization, self._num_changes, samples)
            zone_events = [(f"Heterogeneity/zone_{zone}_share", share, samples) for zone, share in shares.items()]
            straggler_events = self._straggler_events(job_times.ranks, samples)
            self._writer.write_events([*job_events, *zone_events, *straggler_events])

    def _straggler_events(self, times: Sequence[RankTimes], samples: int) -> list[tuple[str, float, int]]:
        """Return computing times and score of every rank as events; none if the section does not ask for stragglers."""
        if self._stragglers is None:
            return []
        score_by_rank = scores([rank_times.own_median_s for rank_times in times])
        rank_events = []
        for rank, (rank_times, score) in enumerate(zip(times, score_by_rank, strict=True)):
            prefix = f"Heterogeneity/rank{rank}"
            rank_events.append((f"{prefix}/computing_min_s", rank_times.own_min_s, samples))
            rank_events.append((f"{prefix}/computing_median_s", rank_times.own_median_s, samples))
            rank_events.append((f"{prefix}/computing_max_s", rank_times.own_max_s, samples))
            rank_events.append((f"{prefix}/straggler_score", score, samples))
        return rank_events

    @property
    def _num_changes(self) -> int:
        """Number of changes of the plan so far; 0 without re-planning."""
        return 0 if self.replanning is None else len(self.replanning.changes)

    def report(self) -> None:
        """Print the table on rank 0, once; steps after the last observation are not in it."""
        atexit.unregister(self.report)
        if self._totals and self._world.rank == 0:
            job_times = JobTimes(self._totals, self._latest.pipelines)
            utilization = utilizations(job_times, self._model, self._peaks)
            announce("\n" + times_table(job_times, self._plan, utilization, self._num_changes))
        if self._record is not None and self._forget_forced_exit is not None:
            self._forget_forced_exit()
            self._record.end()
        self._record, self._totals = None, []
