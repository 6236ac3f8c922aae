"""Described plan: a plan with its scenario, which together can be predicted, reported and traced.

Both are in one file. A job reads the plan and ignores the scenario; `ds-hetero report` and `ds-hetero trace` need both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import JsonDict, read_file
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.errors import PlanError
from ds_hetero.reporting.scenario import SCENARIO_REMEDY, PlanScenario, read_scenario
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.plans.plan import SCENARIO
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class DescribedPlan:
    """A plan with the scenario that it was made for.

    Raises:
        PlanError: the clusters of the scenario do not have the plan's ranks.
    """

    plan: Plan
    scenario: PlanScenario

    def __post_init__(self) -> None:
        num_devices = sum(cluster.num_ranks for cluster in self.scenario.clusters)
        ranks = self.plan.ranks
        # A plan of pipelines may leave devices idle; one of replicas uses all of them.
        if max(ranks) >= num_devices or (self.plan.is_replicas and len(ranks) != num_devices):
            raise PlanError(
                f"the plan is for {len(ranks)} ranks up to rank {max(ranks)}, and the clusters of "
                f'its "{SCENARIO}" have {num_devices} devices. {SCENARIO_REMEDY}'
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas; 0 for a plan of pipelines."""
        return len(self.plan.pipelines) if self.plan.is_replicas else 0

    def cluster_of(self, replica: int) -> Cluster:
        """Return the cluster of the replica with this index; its ranks begin at 0."""
        if len(self.scenario.clusters) > 1:
            return self.scenario.clusters[replica]
        ranks = self.plan.schedules[replica].ranks
        return self.scenario.clusters[0].part(ranks[0], ranks[-1] + 1)

    def schedule_of(self, replica: int) -> Schedule:
        """Return the schedule of the replica with this index; its ranks begin at 0."""
        return self.plan.schedules[replica].shifted(0)

    def cost_of(self, replica: int) -> CostModel:
        """Return the cost model of the replica with this index, for the replica's batches."""
        workload, pipeline = self.scenario.workload, self.plan.pipelines[replica]
        if pipeline.micro_batches is not None and pipeline.micro_batch_size is not None:
            workload = replace(workload, micro_batch=pipeline.micro_batch_size, micro_batches=pipeline.micro_batches)
        if self.num_replicas > 1:  # ZeRO shards over the ranks of all replicas
            workload = replace(workload, zero_cluster=self._cluster_of_all)
        return make_cost_model(self.scenario.cost_model, self.cluster_of(replica), self.scenario.model, workload)

    @property
    def _cluster_of_all(self) -> Cluster | None:
        """The cluster that contains all replicas; None if the scenario has a cluster for each replica."""
        clusters = self.scenario.clusters
        return clusters[0] if len(clusters) == 1 else None

    def to_dict(self) -> JsonDict:
        """Return the content of a plan file, which jobs read, too."""
        if self.num_replicas == 1 and self.plan.batch_split is None:
            content = self.plan.schedules[0].to_dict()
        elif self.num_replicas:
            content = self.plan.to_replicas_dict()
        else:
            content = self.plan.to_dict()
        return {**content, SCENARIO: self.scenario.to_dict()}


def read_described_plan(path: str | Path) -> DescribedPlan | Plan:
    """Read a plan file, or the output of ``ds-hetero plan --json``.

    Returns:
        The plan with its scenario; the `Plan` alone if the file has no scenario.

    Raises:
        PlanError, ScheduleError: the file cannot be read, or its plan is wrong.
        ClusterError, ModelError: the cluster or the model of its scenario is wrong.
    """
    data = read_file(path, "plan", PlanError)
    scenario = data.get(SCENARIO) if isinstance(data, Mapping) else None
    for name in ("plan", "schedule"):  # keys of the plan in the output of the command
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            data = data[name]
            scenario = data.get(SCENARIO) if scenario is None else scenario
    plan = read_plan(data)
    if scenario is None:
        return plan
    return DescribedPlan(plan=plan, scenario=read_scenario(scenario))
