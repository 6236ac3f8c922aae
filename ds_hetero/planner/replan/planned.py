"""Another schedule for a job that is running: the planner on devices as fast as they turned out to be.

Rank 0 decides for all replicas, since it alone has read the cluster; see `ds_hetero.planner.replan.policy` for when a
schedule changes. Where the cluster or the model has no cost model, shares follow the measured costs alone.
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
from ds_hetero.values.schedule import Schedule

logger = logging.getLogger(__name__)


class Replanner:
    """Re-planning policies, one per replica. Only rank 0 has a `Replanner`.

    Args:
        costs: the cost model of every replica; none where the cluster is not known.
    """

    def __init__(
        self, num_replicas: int, costs: Sequence[CostModel], min_gain: float, layout: str | None, causal: bool
    ) -> None:
        self._estimates: list[Callable[[Schedule, Observation], GainEstimate]] = []
        if costs:
            self._estimates += [PlannedEstimates(cost, layout) for cost in costs]
        else:
            self._estimates += [partial(ProportionalEstimate, causal=causal)] * num_replicas
        self._policies = [Policy(estimate, min_gain) for estimate in self._estimates]

    def decide(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[ProposedChange | None]:
        """Return the decision for every replica; None where its schedule stays."""
        decisions = []
        for policy, schedule, observation in zip(self._policies, schedules, observations, strict=True):
            can_change = schedule.sp_size > 1
            decisions.append(policy.decide(schedule, observation) if can_change else None)
        return decisions

    def gains(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[float | None]:
        """Return the share of a step that the best schedule of every replica would save; None where there is none."""
        gains = []
        for estimate, schedule, observation in zip(self._estimates, schedules, observations, strict=True):
            can_change = schedule.sp_size > 1
            gains.append(_best_gain(estimate(schedule, observation)) if can_change else None)
        return gains


def _best_gain(estimate: GainEstimate) -> float | None:
    best = estimate.best()
    return None if best is None else estimate.gain(best)


class PlannedEstimates:
    """Makes a `PlannedEstimate` of every observation of one replica, and remembers the speeds of ranks without work."""

    def __init__(self, cost: CostModel, layout: str | None) -> None:
        self._cost, self._layout = cost, layout
        self._speeds = [1.0] * cost.cluster.num_ranks

    def __call__(self, schedule: Schedule, observation: Observation) -> PlannedEstimate:
        """Make the estimate of one observation under ``schedule``."""
        estimate = PlannedEstimate(schedule, observation, self._cost, self._layout, self._speeds)
        self._speeds = estimate.speeds
        return estimate


class PlannedEstimate:
    """The cost model with every device as fast as it was measured to be under the present schedule.

    Args:
        cost: of the replica's cluster as it is described.
        before: speeds of the ranks as far as they were known.

    Attributes:
        speeds: of every rank, over what the cluster's description makes of it.
    """

    def __init__(
        self, schedule: Schedule, observation: Observation, cost: CostModel, layout: str | None, before: Sequence[float]
    ) -> None:
        self._schedule, self._layout = schedule, layout
        # The workload that was observed: micro-batches of the length and the number that a step had.
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
        """The share of a step's time that ``candidate`` is predicted to save."""
        return 1 - self._iteration_s(candidate) / self._present_s

    def best(self) -> Schedule | None:
        """The planner's choice; None where no schedule fits into memory."""
        started = time.perf_counter()
        try:
            plan = planning.plan(
                self._cost.cluster,
                self._cost.model,
                self._cost.workload,
                cost_model=self._cost.name,
                layout=self._layout,
            )
        except HeteroError as error:
            logger.warning("no other schedule is looked for: %s", error)
            return None
        logger.debug("searched another schedule for %s", time_text(time.perf_counter() - started))
        return plan.schedule.shifted(self._schedule.ranks[0])

    def _iteration_s(self, schedule: Schedule) -> float:
        return self._cost.predict(schedule.shifted(0)).iteration_s
