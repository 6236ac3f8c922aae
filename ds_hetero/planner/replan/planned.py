"""Find a better schedule for a running job: plan again with the speeds of the devices that were measured.

Rank 0 decides for all replicas, since it alone has read the cluster; see `ds_hetero.planner.replan.policy` for when a
schedule changes. If there is no cost model for the cluster or the model, tokens and heads are shared by measured costs
alone (`ds_hetero.planner.replan.proportional`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ds_hetero.common.text import time_text
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.errors import HeteroError
from ds_hetero.planner import planning
from ds_hetero.planner.replan.measured_speeds import at_speeds, measured_speeds, snapped_speeds
from ds_hetero.planner.replan.policy import GainEstimate, Observation, Policy, ProposedChange
from ds_hetero.planner.replan.proportional import ProportionalEstimate
from ds_hetero.planner.search.shares import apportion
from ds_hetero.values.schedule import Schedule

logger = logging.getLogger(__name__)


class Replanner:
    """Re-planning policies, one for every replica. Only rank 0 has a `Replanner`.

    Replicas of one rank have nothing to share; their schedules never change.

    Args:
        costs: cost model of every replica; empty if the cluster or the model has none.
        min_gain: share of a step's time that a change has to save.
        layout: layout that a new schedule must have; None for the planner's choice.
        causal: whether attention is causal.
        token_unit: every rank of a new schedule gets a multiple of so many tokens; with ``costs``.
    """

    def __init__(
        self,
        num_replicas: int,
        costs: Sequence[CostModel],
        min_gain: float,
        layout: str | None,
        causal: bool,
        token_unit: int | None = None,
    ) -> None:
        self._estimates: list[Callable[[Schedule, Observation], GainEstimate]] = []
        if costs:
            self._estimates += [PlannedEstimates(cost, layout, token_unit or 1) for cost in costs]
        else:
            self._estimates += [partial(ProportionalEstimate, causal=causal)] * num_replicas
        self._policies = [Policy(estimate, min_gain) for estimate in self._estimates]

    def decide(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[ProposedChange | None]:
        """Return the change for every replica, or None to keep its schedule.

        Args:
            schedules: present schedule of every replica.
            observations: costs of every replica's steps since the last call.
        """
        decisions = []
        for policy, schedule, observation in zip(self._policies, schedules, observations, strict=True):
            can_change = schedule.sp_size > 1
            decisions.append(policy.decide(schedule, observation) if can_change else None)
        return decisions

    def gains(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[float | None]:
        """Return the share of a step that the best schedule of every replica would save; None if it has no other."""
        gains = []
        for estimate, schedule, observation in zip(self._estimates, schedules, observations, strict=True):
            can_change = schedule.sp_size > 1
            gains.append(_best_gain(estimate(schedule, observation)) if can_change else None)
        return gains


def _best_gain(estimate: GainEstimate) -> float | None:
    """Return the gain of the best schedule; None if no other schedule can run."""
    best = estimate.best()
    return None if best is None else estimate.gain(best)


class PlannedEstimates:
    """Makes a `PlannedEstimate` of every observation of one replica, and remembers the speeds of its ranks.

    A rank without work in one observation keeps its speed of an earlier one.
    """

    def __init__(self, cost: CostModel, layout: str | None, token_unit: int = 1) -> None:
        self._cost, self._layout, self._token_unit = cost, layout, token_unit
        self._speeds = [1.0] * cost.cluster.num_ranks

    def __call__(self, schedule: Schedule, observation: Observation) -> PlannedEstimate:
        """Make the estimate of one observation under ``schedule``."""
        estimate = PlannedEstimate(schedule, observation, self._cost, self._layout, self._speeds, self._token_unit)
        self._speeds = estimate.speeds
        return estimate


class PlannedEstimate:
    """Gains by the cost model, with every device at the speed that was measured under the present schedule.

    Args:
        cost: cost model of the replica's cluster as the user describes it.
        layout: layout that a new schedule must have; None for the planner's choice.
        before: speeds from earlier observations, by rank.
        token_unit: every rank of a new schedule gets a multiple of so many tokens.

    Attributes:
        speeds: measured speed of every rank, relative to the description of the cluster: 0.8 is 20 % slower.
    """

    def __init__(
        self,
        schedule: Schedule,
        observation: Observation,
        cost: CostModel,
        layout: str | None,
        before: Sequence[float],
        token_unit: int = 1,
    ) -> None:
        self._schedule, self._layout, self._token_unit = schedule, layout, token_unit
        # The observed workload: micro-batches with the length and the number that a step had.
        sequences = sum(observation.tokens) / observation.length
        micro_batches = max(round(sequences / cost.workload.micro_batch), 1)
        workload = replace(cost.workload, seq_len=observation.length, micro_batches=micro_batches)
        described = make_cost_model(cost.name, cost.cluster, cost.model, workload)
        self.speeds = measured_speeds(described, schedule.shifted(0), observation, before)
        speeds = snapped_speeds(cost.cluster.devices, self.speeds, max(observation.error))
        cluster = at_speeds(cost.cluster, speeds)
        self._cost = make_cost_model(cost.name, cluster, cost.model, workload)
        self._present_s = self._iteration_s(schedule)

    def gain(self, candidate: Schedule) -> float:
        """Return the share of a step's time that ``candidate`` is predicted to save."""
        return 1 - self._iteration_s(candidate) / self._present_s

    def best(self) -> Schedule | None:
        """Return the planner's choice; None if no schedule fits into memory."""
        started = time.perf_counter()
        try:
            plan = planning.plan(
                self._cost.cluster,
                self._cost.model,
                self._cost.workload,
                cost_model=self._cost.name,
                layout=self._layout,
                token_unit=self._token_unit,
            )
        except HeteroError as error:
            logger.warning("the job keeps its schedule, since the planner found no other one: %s", error)
            return None
        finally:
            # Keys of this cache are speeds, and those of the next search are others: a job of many observations would
            # fill it with 65,536 entries that it never reads again, 12 KB per search.
            apportion.cache_clear()
        logger.debug("searched another schedule for %s", time_text(time.perf_counter() - started))
        return plan.schedule.shifted(self._schedule.ranks[0])

    def _iteration_s(self, schedule: Schedule) -> float:
        """Return the predicted time of a step; the replica's first rank counts as rank 0."""
        return self._cost.predict(schedule.shifted(0)).iteration_s
