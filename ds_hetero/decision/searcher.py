"""Search the schedules of a job's replicas, and store the planner's results. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from ds_hetero.cluster import Cluster
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.decision.forecast import COST_MODEL
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, planning, strategy
from ds_hetero.planner.memory.zero_weights import weights_by_memory
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION


class Searcher:
    """Searches schedules for `resolve`, and stores the planner's results.

    Args:
        layout: ``"layout"`` of the section; None leaves it to the planner.
        by_memory: True if ZeRO's shares follow the free memory (``"zero_partition": "memory"``).
        token_unit: every rank gets a multiple of so many tokens.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        layout: str | None,
        by_memory: bool = False,
        token_unit: int | None = None,
    ) -> None:
        self._model, self._workload, self._layout, self._by_memory = model, workload, layout, by_memory
        self._token_unit = token_unit or 1
        self.planned: dict[Cluster, PlannedSchedule] = {}  # the planner's results, by cluster

    def __call__(self, name: str, cluster: Cluster) -> Schedule:
        """Return the schedule of strategy ``name`` for a replica. Raises `PlanError`: none fits, or too few tokens."""
        try:
            if name != "plan":
                return strategy(name, self._cost(cluster))
            self.planned[cluster] = self._search(cluster)
        except PlanError as error:
            raise PlanError(
                f'{error} It was planned for sequences of {self._workload.seq_len} tokens; set "{SECTION}.seq_len" to '
                "the tokens of the sequences you train. Without that key they are the model's max_position_embeddings."
            ) from None
        return self.planned[cluster].schedule

    def _search(self, cluster: Cluster) -> PlannedSchedule:
        """Search with equal ZeRO shares; if no schedule fits, with shares that follow the devices' memory."""
        try:
            return self._plan(cluster, self._workload)
        except PlanError:
            for weights in self._weights(cluster):
                with contextlib.suppress(PlanError):
                    return self._plan(cluster, replace(self._workload, zero_weights=weights))
            raise

    def _weights(self, cluster: Cluster) -> Iterator[tuple[float, ...]]:
        """Yield ZeRO shares to search with, the better guess first.

        The first are in proportion to the memory that remains when tokens follow the devices' speeds, the second in
        proportion to the devices' whole memory.
        """
        if not self._by_memory or self._workload.data_parallel > 1:
            return
        cost = self._cost(cluster)
        with contextlib.suppress(PlanError):
            yield weights_by_memory([(cost, strategy("proportional", cost))])
        yield tuple(cost.capacity_bytes_D.tolist())

    def _plan(self, cluster: Cluster, workload: Workload) -> PlannedSchedule:
        """Return the planner's result for one replica. Raises `PlanError`: no schedule fits."""
        return planning.plan(
            cluster,
            self._model,
            workload,
            cost_model=COST_MODEL,
            layout=self._layout,
            token_unit=self._token_unit,
        )

    def _cost(self, cluster: Cluster) -> CostModel:
        """Return the cost model of one replica with equal ZeRO shares."""
        return make_cost_model(COST_MODEL, cluster, self._model, self._workload)
