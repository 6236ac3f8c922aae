"""Change the plan of a running job when another plan is predicted to be faster.

Rank 0 searches at the measured speeds and decides; all ranks apply its decision between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ds_hetero.common.announce import announce
from ds_hetero.common.reading import JsonDict, JsonObject, shortened
from ds_hetero.decision.decide import JobStart
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.job.job_times import JobTimes, observation_of
from ds_hetero.job.start import World
from ds_hetero.planner.replan.planned import Replanner
from ds_hetero.planner.replan.policy import Observation
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.schedule import Schedule

logger = logging.getLogger(__name__)


class PlanChange(Protocol):
    """One change of the plan in a running job."""

    event: ClassVar[str]
    """Event as a clause, for people: "the schedule changed"."""

    @property
    def step(self) -> int:
        """Optimizer steps that this process had done before the change."""

    def applied_to(self, plan: Plan) -> Plan:
        """Return the changed plan."""

    def to_dict(self) -> JsonDict:
        """Return the entry of ``run.json``."""


class PlanSearch(Protocol):
    """Search for a faster plan at the measured speeds; on rank 0."""

    def propose(self, step: int, plan: Plan, job_times: JobTimes) -> Sequence[PlanChange]:
        """Return the best changes of the plan at the measured times; none if they gain too little.

        Args:
            step: optimizer steps that this process has done.
            job_times: of the steps since the last observation.
        """

    def predicted_gain(self, plan: Plan, job_times: JobTimes) -> float | None:
        """Return the share of a step's time that the best other plan would save; None if it cannot be predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChange:
    """A change of one replica's schedule in a running job."""

    step: int  # optimizer steps that this process had done before the change
    replica: int  # index of the replica
    schedule: Schedule  # from now on
    gain: float  # share of a step's time that the change is predicted to save
    event: ClassVar[str] = "the schedule changed"

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with this schedule."""
        schedules = list(plan.schedules)
        schedules[self.replica] = self.schedule
        return plan.with_schedules(schedules)

    def __str__(self) -> str:
        return (
            f"replica {self.replica} goes on under another schedule, predicted to save {self.gain:.1%} of a step: "
            f"{self.schedule.to_json()}"
        )

    def to_dict(self) -> JsonDict:
        """Return the entry of ``run.json``."""
        return {"step": self.step, "replica": self.replica, "schedule": self.schedule.to_dict(), "gain": self.gain}


def has_schedules_to_change(plan: Plan) -> bool:
    """Return whether some replica has several ranks, so that work can move between them."""
    return any(schedule.sp_size > 1 for schedule in plan.schedules)


class ScheduleSearch:
    """Proposes other schedules of replicas; on rank 0, which has the forecasts."""

    def __init__(self, start: JobStart) -> None:
        self._replanner = Replanner(
            len(start.plan.schedules),
            [forecast.cost for forecast in start.forecasts],
            start.section.replan.min_gain,
            start.section.layout,
            start.facts.model.causal,
            start.section.token_unit,
        )

    def propose(self, step: int, plan: Plan, job_times: JobTimes) -> Sequence[ScheduleChange]:
        """See `PlanSearch`."""
        decisions = self._replanner.decide(plan.schedules, _observations(plan, job_times))
        return [
            ScheduleChange(step=step, replica=replica, schedule=decision.schedule, gain=decision.gain)
            for replica, decision in enumerate(decisions)
            if decision is not None
        ]

    def predicted_gain(self, plan: Plan, job_times: JobTimes) -> float | None:
        """See `PlanSearch`.

        If every replica is one rank, no schedule can change; the gain is then that of replicas whose numbers of samples
        are proportional to their speeds.
        """
        if has_schedules_to_change(plan):
            try:
                gains = self._replanner.gains(plan.schedules, _observations(plan, job_times))
            except Exception:  # a failed prediction must not end a training
                logger.exception("the gain of re-planning cannot be predicted")
                return None
            return max((gain for gain in gains if gain is not None), default=None)
        compute_s = [rank.own_median_s for rank in job_times.ranks]
        if not all(compute_s):
            return None
        balanced_s = len(compute_s) / sum(1 / seconds for seconds in compute_s)  # harmonic mean: all end together
        return (max(compute_s) - balanced_s) / job_times.step_s


def _observations(plan: Plan, job_times: JobTimes) -> list[Observation]:
    """Return the observation of every replica."""
    return [observation_of([job_times.ranks[rank] for rank in schedule.ranks]) for schedule in plan.schedules]


class Replanning:
    """Re-planning of one model's training.

    Args:
        change_plan: called on every rank with the new plan.
        fits: called on every rank before ``change_plan``; returns whether all ranks have the memory for the plan, with
            the same result on every rank. If not, it has reported this to the search, which then proposes another plan.
            None if the search proposes only plans that fit.

    Attributes:
        changes: oldest first; the same on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        search: PlanSearch,
        change_plan: Callable[[Plan], None],
        fits: Callable[[Plan], bool] | None = None,
    ) -> None:
        self.plan, self.changes = plan, list[PlanChange]()
        self._world = World.current()
        self._change_plan, self._fits = change_plan, fits
        self._s_per_token_before: float | None = None  # before the latest change, until its effect is announced
        self._search = search if self._world.rank == 0 else None

    def observe(self, step: int, job_times: JobTimes) -> bool:
        """Change the plan if a faster one is found at these times; return whether it has changed.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`, and one more for every proposal that did not fit.
        """
        self._announce_effect(step, job_times)
        while True:  # ends: every proposal that does not fit makes the search narrower, see `BatchSearch.learn`
            changes = self._world.on_all_ranks(lambda: self._propose(step, job_times))[0]
            if not changes:
                return False
            plan = self.plan
            for change in changes:
                plan = change.applied_to(plan)
            if self._fits is None or self._fits(plan):
                break
        self.plan = plan
        for change in changes if self._world.rank == 0 else ():
            announce(f"step {step}: {change}")
        self.changes += changes
        self._change_plan(self.plan)
        self._s_per_token_before = _s_per_token(job_times)
        return True

    def resume(self, content: JsonObject) -> bool:
        """Go on with a checkpoint's changed plan, if it suits this job; return whether the plan has changed.

        Args:
            content: of a plan file of version 2; the same on every rank.

        Caller: every rank of the world, between two steps.
        """
        try:
            plan = read_plan(content)
            _expect_same_job(plan, self.plan)
        except HeteroError as error:
            self._announce(f"the job cannot use the changed plan, and goes on with its own: {error}")
            return False
        if plan.fingerprint == self.plan.fingerprint:
            return False
        changes_batches = plan.batch_split != self.plan.batch_split
        plan_text = str(plan.batch_split) if changes_batches else plan.schedules[0].to_json()
        self._announce(f"goes on with the changed plan: {plan_text}")
        self.plan = plan
        self._change_plan(plan)
        return True

    def _announce(self, text: str) -> None:
        """Announce on rank 0 what this job does with a checkpoint's changed plan."""
        if self._world.rank == 0:
            announce(f"the checkpoint is of a job that changed its plan; {text}")

    def _propose(self, step: int, job_times: JobTimes) -> Sequence[PlanChange]:
        """Return the changes that the search proposes, on rank 0; an empty sequence on other ranks."""
        if self._search is None:
            return []
        try:
            return self._search.propose(step, self.plan, job_times)
        except Exception:  # training can go on without a new plan
            logger.exception(
                "re-planning failed and is off for the rest of this job; training goes on with the present plan"
            )
            self._search = None
            return []

    def _announce_effect(self, step: int, job_times: JobTimes) -> None:
        """Announce the measured effect of the latest change, once, at the first observation after it."""
        before_s = self._s_per_token_before
        self._s_per_token_before = None
        if before_s is not None and self._world.rank == 0:
            ratio = _s_per_token(job_times) / before_s
            unit = "token" if any(rank.tokens for rank in job_times.ranks) else "step"
            announce(f"step {step}: since {self.changes[-1].event}, a {unit} takes {ratio:.1%} of the time it took")


def _expect_same_job(saved: Plan, plan: Plan) -> None:
    """Refuse a plan that is not for the ranks, batches and model of ``plan``. Raises `PlanError`: the difference."""
    ranks = [pipeline.ranks for pipeline in plan.pipelines]
    saved_ranks = [pipeline.ranks for pipeline in saved.pipelines]
    if not saved.is_replicas or ranks != saved_ranks:
        raise PlanError(
            f"its replicas have the ranks {shortened(saved_ranks)}; those of this job have {shortened(ranks)}."
        )
    if _fixed_batches(saved) != _fixed_batches(plan):
        raise PlanError(
            f"its replicas take batches of {_batches_text(saved)}; those of this job take {_batches_text(plan)}."
        )
    schedule, saved_schedule = plan.schedules[0], saved.schedules[0]
    heads = schedule.num_heads, schedule.num_kv_heads
    saved_heads = saved_schedule.num_heads, saved_schedule.num_kv_heads
    if heads != saved_heads:
        raise PlanError(
            f"its model has {_heads_text(saved_schedule)}; the model of this job has {_heads_text(schedule)}."
        )


def _batches_text(plan: Plan) -> str:
    """Return the batches of a plan for a message."""
    return "equal size" if plan.batch_split is None else str(plan.batch_split)


def _heads_text(schedule: Schedule) -> str:
    """Return the heads of a schedule for a message."""
    return f"num_heads={schedule.num_heads}, num_kv_heads={schedule.num_kv_heads}"


def _fixed_batches(plan: Plan) -> object:
    """Return what re-planning keeps of a plan's batches: two plans of the same job have equal results.

    If a replica has several ranks, re-planning changes only schedules, so the result is the whole batch split. If every
    replica is one rank, re-planning moves samples between ranks, so the result has their sum and the micro-batches.
    """
    split = plan.batch_split
    if split is None or has_schedules_to_change(plan):
        return split
    return split.samples, split.micro_batches


def _s_per_token(job_times: JobTimes) -> float:
    """Return the seconds of the slowest rank per token of the job; per step if tokens are not counted."""
    seconds = max(rank.step_s for rank in job_times.ranks)
    tokens = sum(rank.tokens for rank in job_times.ranks)
    return seconds / (tokens or job_times.ranks[0].steps)
