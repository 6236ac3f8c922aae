"""Predict the time and memory of a replica with the calibrated cost model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hetero.cluster import Cluster
from ds_hetero.cost import CostModel, Prediction, Workload, make_cost_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, planning
from ds_hetero.values.schedule import Schedule

COST_MODEL = "calibrated"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Prediction of the cost model for one replica."""

    schedule: Schedule  # in global ranks
    cost: CostModel  # for the replica's cluster (ranks begin at 0), model and workload
    prediction: Prediction  # of the schedule
    planned: PlannedSchedule | None  # the planner's result; None if the schedule was not searched for

    def iteration_s(self, schedule: Schedule, seq_len: int, micro_batch: int, micro_batches: int) -> float:
        """Return the predicted seconds of an optimizer step of another schedule with other batches."""
        workload = replace(self.cost.workload, seq_len=seq_len, micro_batch=micro_batch, micro_batches=micro_batches)
        cost = make_cost_model(self.cost.name, self.cost.cluster, self.cost.model, workload)
        return cost.predict(schedule.shifted(0)).iteration_s


def forecast(
    schedule: Schedule, cluster: Cluster, model: ModelSpec, workload: Workload, planned: PlannedSchedule | None = None
) -> Forecast:
    """Return the prediction of one replica.

    Args:
        schedule: schedule of the replica, in global ranks.
        cluster: cluster of the replica, whose ranks begin at 0.
        planned: the planner's result; None if the schedule was not searched for.

    Raises:
        PlanError: the workload does not fit the cluster.
        ScheduleError: the workload's sequence is too short for the schedule.
    """
    planning.check_workload(cluster, workload)
    cost = make_cost_model(COST_MODEL, cluster, model, workload)
    return Forecast(schedule=schedule, cost=cost, prediction=cost.predict(schedule.shifted(0)), planned=planned)
