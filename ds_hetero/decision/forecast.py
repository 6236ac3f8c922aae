"""Search and prediction at the start of a job.

    searcher = Searcher(model, workload, section.layout)     # `ds_hetero.decision.resolve.resolve` calls it
    forecast(schedule, cluster, model, workload, searcher.planned.get(cluster))

Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ds_hetero.cluster import Cluster
from ds_hetero.cost import CostModel, Prediction, Workload, make_cost_model
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, planning, strategy
from ds_hetero.planner.memory.owner_weights import weights_by_memory
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION

COST_MODEL = "calibrated"


class Searcher:
    """Searches schedules for `ds_hetero.decision.resolve.resolve`, and keeps what the planner found.

    Args:
        model: what is trained.
        workload: of one replica.
        layout: the section's, None for the planner's choice.
        by_memory: whether ZeRO's shares follow the memory that is left (``"zero_partition": "memory"``).

    Attributes:
        planned: what the planner found, by cluster.
    """

    def __init__(self, model: ModelSpec, workload: Workload, layout: str | None, by_memory: bool = False) -> None:
        self._model, self._workload, self._layout, self._by_memory = model, workload, layout, by_memory
        self.planned: dict[Cluster, PlannedSchedule] = {}

    def __call__(self, name: str, cluster: Cluster) -> Schedule:
        """Return the schedule that the strategy ``name`` makes for one replica on ``cluster``.

        Raises:
            PlanError: nothing fits into memory, or the sequence is shorter than the ranks are many.
        """
        try:
            if name != "plan":
                return strategy(name, self._cost(cluster))
            self.planned[cluster] = self._search(cluster)
        except PlanError as error:
            raise PlanError(
                f'{error} It was planned for sequences of {self._workload.seq_len} tokens; set "{SECTION}.seq_len" to '
                "what you train, or leave it out for the model's max_position_embeddings."
            ) from None
        return self.planned[cluster].schedule

    def _search(self, cluster: Cluster) -> PlannedSchedule:
        """Search with equal shares of ZeRO; if nothing fits then, with shares that follow the devices' memory."""
        try:
            return self._plan(cluster, self._workload)
        except PlanError:
            for weights in self._weights(cluster):
                with contextlib.suppress(PlanError):
                    return self._plan(cluster, replace(self._workload, zero_weights=weights))
            raise

    def _weights(self, cluster: Cluster) -> Iterator[tuple[float, ...]]:
        """Shares to search with: by what is left beside tokens in proportion to speed, and by all of the memory."""
        if not self._by_memory or self._workload.data_parallel > 1:
            return
        cost = self._cost(cluster)
        with contextlib.suppress(PlanError):
            yield weights_by_memory([(cost, strategy("proportional", cost))])
        yield tuple(cost.capacity_bytes_D.tolist())

    def _plan(self, cluster: Cluster, workload: Workload) -> PlannedSchedule:
        return planning.plan(cluster, self._model, workload, cost_model=COST_MODEL, layout=self._layout)

    def _cost(self, cluster: Cluster) -> CostModel:
        return make_cost_model(COST_MODEL, cluster, self._model, self._workload)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of the cost model for one replica.

    Args:
        schedule: in global ranks.
        cost: the cost model of the replica's cluster, whose ranks begin at 0, bound to model and workload.
        prediction: of the schedule.
        planned: what the planner found, where the schedule was searched for.
    """

    schedule: Schedule
    cost: CostModel
    prediction: Prediction
    planned: PlannedSchedule | None

    def iteration_s(self, schedule: Schedule, seq_len: int, micro_batch: int, micro_batches: int) -> float:
        """Predict the time of an optimizer step of other batches.

        Args:
            schedule: of the same ranks.
            seq_len: tokens of a sequence.
            micro_batch: sequences of a micro-batch.
            micro_batches: of the step.
        """
        workload = replace(self.cost.workload, seq_len=seq_len, micro_batch=micro_batch, micro_batches=micro_batches)
        cost = make_cost_model(self.cost.name, self.cost.cluster, self.cost.model, workload)
        return cost.predict(schedule.shifted(0)).iteration_s


def forecast(
    schedule: Schedule, cluster: Cluster, model: ModelSpec, workload: Workload, planned: PlannedSchedule | None = None
) -> Forecast:
    """Predict one replica.

    Args:
        schedule: of the replica, in global ranks.
        cluster: its devices, numbered from 0.
        model: what is trained.
        workload: of the replica.
        planned: what the planner found, where the schedule was searched for.

    Raises:
        PlanError: the workload does not fit the cluster.
        ScheduleError: its sequence is too short for the schedule.
    """
    planning.check_workload(cluster, workload)
    cost = make_cost_model(COST_MODEL, cluster, model, workload)
    return Forecast(schedule=schedule, cost=cost, prediction=cost.predict(schedule.shifted(0)), planned=planned)
