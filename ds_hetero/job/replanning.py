"""Changes the plan of a running job when another one is predicted to be faster; rank 0 decides for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hetero.common.reading import shortened
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.job.rank_times import RankTimes, observation_of
from ds_hetero.job.report import announce
from ds_hetero.job.start import JobStart, World
from ds_hetero.planner.replan.observation import Observation
from ds_hetero.planner.replan.planned import Replanner
from ds_hetero.planner.replan.policy import Decision
from ds_hetero.plans import Plan, read_plan
from ds_hetero.schedule import Schedule

__all__ = ["Replanning", "ScheduleChange", "make_replanner", "predicted_gain", "wants_replanning"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChange:
    """One change of schedule in a running job.

    Args:
        step: optimizer steps that this process has done before it.
        replica: index of the replica whose schedule changed.
        schedule: its new schedule.
        gain: share of a step's time that the change was predicted to save.
    """

    step: int
    replica: int
    schedule: Schedule
    gain: float


def wants_replanning(start: JobStart) -> bool:
    """Whether the section asks for re-planning and there is something to change."""
    return start.section.replan.enabled and any(schedule.sp_size > 1 for schedule in start.plan.schedules)


def make_replanner(start: JobStart) -> Replanner:
    """Return what looks for other schedules; on rank 0, which has the forecasts."""
    return Replanner(
        len(start.plan.schedules),
        [forecast.cost for forecast in start.forecasts],
        start.section.replan.min_gain,
        start.section.layout,
        start.facts.model.causal,
    )


def predicted_gain(replanner: Replanner, plan: Plan, times: Sequence[RankTimes]) -> float | None:
    """Return the share of a step that other shares of work would save; None where nothing can be said.

    Where every replica is one rank there is no schedule to change; there it is what replicas would save that take
    samples in proportion to their speeds.

    Args:
        replanner: of rank 0.
        plan: that the ranks run.
        times: of all ranks.
    """
    if any(schedule.sp_size > 1 for schedule in plan.schedules):
        try:
            gains = replanner.gains(plan.schedules, _observations(plan, times))
        except Exception:  # training goes on
            logger.exception("what re-planning would save is not known")
            return None
        return max((gain for gain in gains if gain is not None), default=None)
    own_s = [rank.own_median_s for rank in times]
    if not all(own_s):
        return None
    balanced_s = len(own_s) / sum(1 / seconds for seconds in own_s)
    return (max(own_s) - balanced_s) / max(rank.step_s / rank.steps for rank in times)


def _observations(plan: Plan, times: Sequence[RankTimes]) -> list[Observation]:
    return [observation_of([times[rank] for rank in schedule.ranks]) for schedule in plan.schedules]


class Replanning:
    """Re-planning of one model's training.

    Args:
        start: what the ranks agreed on for the model.
        change_plan: called on every rank with the new plan.

    Attributes:
        changes: of the schedules, oldest first; the same on every rank.
    """

    def __init__(self, start: JobStart, change_plan: Callable[[Plan], None]) -> None:
        self.changes: list[ScheduleChange] = []
        self._world = World.current()
        self._plan = self._first = start.plan
        self._change_plan = change_plan
        self._s_per_token_before: float | None = None  # of the latest change, until it has been judged
        self._replanner: Replanner | None = None
        if self._world.rank == 0:
            self._replanner = make_replanner(start)

    def observe(self, step: int, times: Sequence[RankTimes]) -> bool:
        """Change the plan if these times call for it.

        Args:
            step: optimizer steps so far.
            times: of all ranks since the last observation.

        Returns:
            Whether the plan has changed.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        self._judge_latest_change(step, times)
        decisions = self._world.on_all_ranks(lambda: self._decide(times))[0]
        if not decisions:
            return False
        schedules = list(self._plan.schedules)
        for replica, decision in decisions.items():
            schedules[replica] = decision.schedule
            change = ScheduleChange(step=step, replica=replica, schedule=decision.schedule, gain=decision.gain)
            self.changes.append(change)
            if self._world.rank == 0:
                announce(
                    f"step {step}: replica {replica} goes on under another schedule, predicted to save "
                    f"{decision.gain:.1%} of a step: {decision.schedule.to_json()}"
                )
        self._plan = self._plan.with_schedules(schedules)
        self._change_plan(self._plan)
        self._s_per_token_before = _s_per_token(times)
        return True

    @property
    def changed_plan(self) -> Plan | None:
        """The plan, if it is not the one that the job began with."""
        return None if self._plan.fingerprint == self._first.fingerprint else self._plan

    def resume(self, content: Mapping[str, Any]) -> bool:
        """Go on with a changed plan of an earlier run, if it is one for these ranks and this model.

        Args:
            content: as in a file of version 2; the same on every rank.

        Returns:
            Whether the plan has changed.

        Caller: every rank of the world, between two steps.
        """
        try:
            plan = read_plan(content)
            _expect_same_job(plan, self._plan)
        except HeteroError as error:
            self._announce(f"the plan that re-planning had come to is left, and the job goes on with its own: {error}")
            return False
        if plan.fingerprint == self._plan.fingerprint:
            return False
        self._announce(f"goes on with the plan that re-planning had come to: {plan.schedules[0].to_json()}")
        self._plan = plan
        self._change_plan(plan)
        return True

    def _announce(self, text: str) -> None:
        if self._world.rank == 0:
            announce(f"the checkpoint is of a job that changed its plan; {text}")

    def _decide(self, times: Sequence[RankTimes]) -> dict[int, Decision]:
        """The decisions by replica; none on ranks other than 0."""
        if self._replanner is None:
            return {}
        try:
            decisions = self._replanner.decide(self._plan.schedules, _observations(self._plan, times))
        except Exception:  # training can go on without a new schedule
            logger.exception("re-planning failed; the schedule stays from now on")
            self._replanner = None
            return {}
        return {replica: decision for replica, decision in enumerate(decisions) if decision is not None}

    def _judge_latest_change(self, step: int, times: Sequence[RankTimes]) -> None:
        before, self._s_per_token_before = self._s_per_token_before, None
        if before is not None and self._world.rank == 0:
            part = _s_per_token(times) / before
            announce(f"step {step}: since the schedule changed, a token takes {part:.1%} of the time it took")


def _expect_same_job(saved: Plan, plan: Plan) -> None:
    """Refuse a plan that is not for the ranks, batches and model of ``plan``.

    Raises:
        PlanError: names what differs.
    """
    ranks, saved_ranks = ([pipeline.ranks for pipeline in of.pipelines] for of in (plan, saved))
    if not saved.is_replicas or ranks != saved_ranks:
        raise PlanError(f"it is for other replicas, of the ranks {shortened(saved_ranks)}.")
    if saved.batch_split != plan.batch_split:
        raise PlanError(f"its replicas take other batches, {saved.batch_split}.")
    heads, saved_heads = ((s.num_heads, s.num_kv_heads) for s in (plan.schedules[0], saved.schedules[0]))
    if heads != saved_heads:
        raise PlanError(f"its model has num_heads={saved_heads[0]}, num_kv_heads={saved_heads[1]}.")


def _s_per_token(times: Sequence[RankTimes]) -> float:
    return max(rank.step_s for rank in times) / sum(rank.tokens for rank in times)
