"""Changes the plan of a running job when another one is predicted to be faster; rank 0 decides for all ranks."""

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
        """Optimizer steps that this process has done before it."""

    def applied_to(self, plan: Plan) -> Plan:
        """The changed plan."""

    def to_dict(self) -> JsonDict:
        """For ``run.json``."""


class PlanSearch(Protocol):
    """Search for a faster plan at the measured speeds; on rank 0."""

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[PlanChange]:
        """Changes that the times since the last observation call for; none where they gain too little."""

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """Return the share of a step that another plan would save; None where nothing can be said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChange:
    """One change of schedule in a running job."""

    step: int  # optimizer steps of this process before it
    replica: int  # its index
    schedule: Schedule
    gain: float  # share of a step's time that it was predicted to save
    event: ClassVar[str] = "the schedule changed"

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with this schedule."""
        schedules = list(plan.schedules)
        schedules[self.replica] = self.schedule
        return plan.with_schedules(schedules)

    def __str__(self) -> str:
        return (
            f"replica {self.replica} goes on under another schedule, predicted to save {self.gain:.1%} of a step: "
            f"{self.schedule.to_json()}"
        )

    def to_dict(self) -> JsonDict:
        """For ``run.json``."""
        return {"step": self.step, "replica": self.replica, "schedule": self.schedule.to_dict(), "gain": self.gain}


def has_schedules_to_change(plan: Plan) -> bool:
    """Whether a replica has ranks between which work can move."""
    return any(schedule.sp_size > 1 for schedule in plan.schedules)


class ScheduleSearch:
    """Looks for other schedules of replicas; on rank 0, which has the forecasts."""

    def __init__(self, start: JobStart) -> None:
        self._replanner = Replanner(
            len(start.plan.schedules),
            [forecast.cost for forecast in start.forecasts],
            start.section.replan.min_gain,
            start.section.layout,
            start.facts.model.causal,
        )

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[ScheduleChange]:
        """See `PlanSearch`."""
        decisions = self._replanner.decide(plan.schedules, _observations(plan, seen))
        return [
            ScheduleChange(step=step, replica=replica, schedule=decision.schedule, gain=decision.gain)
            for replica, decision in enumerate(decisions)
            if decision is not None
        ]

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """See `PlanSearch`.

        Where every replica is one rank there is no schedule to change; there it is what replicas would save that take
        samples in proportion to their speeds.
        """
        if has_schedules_to_change(plan):
            try:
                gains = self._replanner.gains(plan.schedules, _observations(plan, seen))
            except Exception:  # training goes on
                logger.exception("what re-planning would save is not known")
                return None
            return max((gain for gain in gains if gain is not None), default=None)
        own_s = [rank.own_median_s for rank in seen.ranks]
        if not all(own_s):
            return None
        balanced_s = len(own_s) / sum(1 / seconds for seconds in own_s)
        return (max(own_s) - balanced_s) / seen.step_s


def _observations(plan: Plan, seen: JobTimes) -> list[Observation]:
    return [observation_of([seen.ranks[rank] for rank in schedule.ranks]) for schedule in plan.schedules]


class Replanning:
    """Re-planning of one model's training.

    Args:
        change_plan: called on every rank with the new plan.
        fits: called on every rank before that: whether all have memory for it, which the search learns; None where it
            proposes nothing else.

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
        self._s_per_token_before: float | None = None  # of the latest change, until it has been judged
        self._search = search if self._world.rank == 0 else None

    def observe(self, step: int, seen: JobTimes) -> bool:
        """Change the plan if these times call for it; return whether it has changed.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`, and one more for every proposal that did not fit.
        """
        self._judge_latest_change(step, seen)
        while True:
            changes = self._world.on_all_ranks(lambda: self._propose(step, seen))[0]
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
        self._s_per_token_before = _s_per_token(seen)
        return True

    def resume(self, content: JsonObject) -> bool:
        """Go on with a changed plan of an earlier run, if it is one for this job; return whether it has changed.

        Args:
            content: as in a file of version 2; the same on every rank.

        Caller: every rank of the world, between two steps.
        """
        try:
            plan = read_plan(content)
            _expect_same_job(plan, self.plan)
        except HeteroError as error:
            self._announce(f"the plan that re-planning had come to is left, and the job goes on with its own: {error}")
            return False
        if plan.fingerprint == self.plan.fingerprint:
            return False
        came_to = str(plan.batch_split) if plan.batch_split != self.plan.batch_split else plan.schedules[0].to_json()
        self._announce(f"goes on with the plan that re-planning had come to: {came_to}")
        self.plan = plan
        self._change_plan(plan)
        return True

    def _announce(self, text: str) -> None:
        if self._world.rank == 0:
            announce(f"the checkpoint is of a job that changed its plan; {text}")

    def _propose(self, step: int, seen: JobTimes) -> Sequence[PlanChange]:
        """The changes that rank 0 proposes; none on other ranks."""
        if self._search is None:
            return []
        try:
            return self._search.propose(step, self.plan, seen)
        except Exception:  # training can go on without a new plan
            logger.exception("re-planning failed; the plan stays from now on")
            self._search = None
            return []

    def _judge_latest_change(self, step: int, seen: JobTimes) -> None:
        before, self._s_per_token_before = self._s_per_token_before, None
        if before is not None and self._world.rank == 0:
            part = _s_per_token(seen) / before
            unit = "token" if any(rank.tokens for rank in seen.ranks) else "step"
            announce(f"step {step}: since {self.changes[-1].event}, a {unit} takes {part:.1%} of the time it took")


def _expect_same_job(saved: Plan, plan: Plan) -> None:
    """Refuse a plan that is not for the ranks, batches and model of ``plan``. Raises `PlanError`: what differs."""
    ranks, saved_ranks = ([pipeline.ranks for pipeline in of.pipelines] for of in (plan, saved))
    if not saved.is_replicas or ranks != saved_ranks:
        raise PlanError(f"it is for other replicas, of the ranks {shortened(saved_ranks)}.")
    if _shape(saved) != _shape(plan):
        raise PlanError(f"its replicas take other batches, {saved.batch_split}.")
    heads, saved_heads = ((s.num_heads, s.num_kv_heads) for s in (plan.schedules[0], saved.schedules[0]))
    if heads != saved_heads:
        raise PlanError(f"its model has num_heads={saved_heads[0]}, num_kv_heads={saved_heads[1]}.")


def _shape(plan: Plan) -> object:
    """Part of the batches that stays: all of replicas that share sequences, the sum of those of one rank."""
    split = plan.batch_split
    if split is None or has_schedules_to_change(plan):
        return split
    return split.samples, split.micro_batches


def _s_per_token(seen: JobTimes) -> float:
    return max(rank.step_s for rank in seen.ranks) / (sum(rank.tokens for rank in seen.ranks) or seen.ranks[0].steps)
