"""What most commands read first: a cluster, a model, a workload and the cost model that judges them; and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_hetero.baselines import STRATEGIES
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.paths import is_file, is_pipe
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import ScheduleError
from ds_hetero.models import ModelSpec, load_model
from ds_hetero.planner.planning import check_workload
from ds_hetero.planner.strategies import strategy
from ds_hetero.plans.reading import SCENARIO
from ds_hetero.schedule import Schedule

__all__ = ["Scenario", "read_schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is trained on what.

    Args:
        cluster: the devices of one replica.
        model: what is trained.
        workload: the batch, and how DeepSpeed trains it.
        cost_model: name of the cost model.
    """

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    cost_model: str

    @classmethod
    def read(cls, cluster: str | Cluster, model: str, workload: Workload, cost_model: str) -> Scenario:
        """Load the model, and the cluster if it is not loaded yet, each by file or by name.

        Raises:
            ClusterError, ModelError, PlanError: what is wrong with them.
        """
        loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        scenario = cls(cluster=loaded, model=load_model(model), workload=workload, cost_model=cost_model)
        check_workload(scenario.cluster, workload)
        return scenario

    @property
    def cost(self) -> CostModel:
        """The cost model, bound to the rest."""
        return make_cost_model(self.cost_model, self.cluster, self.model, self.workload)


def read_schedule(source: str, cost: CostModel) -> Schedule:
    """Read a schedule file or the output of ``ds-hetero plan --json``, or make a schedule by the name of a strategy.

    Raises:
        ScheduleError: no such file, not JSON, not a schedule, or several replicas.
        PlanError: the strategy has no schedule for this cluster.
    """
    if not is_file(source) and source in STRATEGIES:
        return strategy(source, cost)
    if not (is_file(source) or is_pipe(source)):
        raise ScheduleError(
            f"cannot read schedule {shortened(source)}: it is neither a readable file nor a strategy. "
            f"Strategies: {', '.join(STRATEGIES)}."
        )
    data = read_file(source, "schedule", ScheduleError)
    if isinstance(data, Mapping) and "schedule" in data:
        data = data["schedule"]
    if isinstance(data, Mapping) and "replicas" in data:
        raise ScheduleError(
            f"{shortened(source)} holds several replicas. Give the schedule of one, and the cluster it runs on."
        )
    if isinstance(data, Mapping):
        data = {key: value for key, value in data.items() if key != SCENARIO}
    return Schedule.from_dict(data)
