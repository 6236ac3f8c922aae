"""Decisions of rank 0 at the start of a job, and of ``ds-hetero doctor`` without one: the plan and its prediction.

No collectives, no devices, no framework: the same facts give the same decision everywhere. Imports no torch.

Search and prediction at the start of a job.

    searcher = Searcher(model, workload, section.layout)     # `ds_hetero.decision.resolve.resolve` calls it
    forecast(schedule, cluster, model, workload, searcher.planned.get(cluster))

Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cost import CostModel, Prediction, Workload, make_cost_model
from ds_hetero.decision.decide_pipelines import PipelineFacts, SearchedPipelines, search_pipelines, wants_search
from ds_hetero.decision.facts import JobFacts, workload_of
from ds_hetero.decision.resolve import (
    clusters_of_replicas,
    is_of_pipelines,
    needs_measuring,
    needs_planner,
    resolve,
    sp_size_of,
)
from ds_hetero.errors import ModelError, PlanError, ScheduleError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, planning, strategy
from ds_hetero.planner.memory.best import weights_by_memory
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION, HeterogeneitySection

COST_MODEL = "calibrated"


class Searcher:
    """Searches schedules for `ds_hetero.decision.resolve.resolve`, and keeps what the planner found.

    Args:
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
    """Forecast of the cost model for one replica."""

    schedule: Schedule  # in global ranks
    cost: CostModel  # the cost model of the replica's cluster, whose ranks begin at 0, bound to model and workload
    prediction: Prediction  # of the schedule
    planned: PlannedSchedule | None  # what the planner found, where the schedule was searched for

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
        workload: of the replica.
        planned: what the planner found, where the schedule was searched for.

    Raises:
        PlanError: the workload does not fit the cluster.
        ScheduleError: its sequence is too short for the schedule.
    """
    planning.check_workload(cluster, workload)
    cost = make_cost_model(COST_MODEL, cluster, model, workload)
    return Forecast(schedule=schedule, cost=cost, prediction=cost.predict(schedule.shifted(0)), planned=planned)


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """Start of a job.

    Args:
        zero_weights: ZeRO shares of all ranks, where the section asks for ``"zero_partition": "memory"``.
        forecasts: on rank 0, one per replica; none where the devices are not known or no cost model describes the job.
        searched: on rank 0, what the search for pipelines has found; None where there was none.
    """

    facts: JobFacts  # that all ranks have read alike
    plan: Plan  # what every rank does
    zero_weights: tuple[float, ...] | None = None
    forecasts: tuple[Forecast, ...] = ()
    no_forecast_reason: str | None = None  # on rank 0, why there is no forecast although the devices are known
    searched: SearchedPipelines | None = None

    @property
    def section(self) -> HeterogeneitySection:
        """The "heterogeneity" section."""
        return self.facts.section

    @property
    def is_of_pipelines(self) -> bool:
        """Whether the model is cut into stages of pipelines."""
        return is_of_pipelines(self.plan, self.section)


def depends_on_measuring(facts: JobFacts, world_size: int) -> bool:
    """Whether the live ranks must be measured before `decide` is called."""
    if wants_search(facts.section):
        return facts.section.cluster == "measure"
    alone = sp_size_of(facts.sp_sizes) == 1 or world_size == 1
    return needs_measuring(facts.section) and (not alone or facts.section.zero_partition == "memory")


def decide(
    facts: JobFacts,
    world_size: int,
    *,
    measured: Cluster | None,
    on_host: bool,
    plan: Plan | None = None,
    no_inners: Mapping[str, str] | None = None,
) -> JobStart:
    """Resolve the section to a plan and predict its speed, or search for pipelines.

    Reads the schedule and cluster files that the section names.

    Args:
        world_size: ranks of the job.
        measured: the live ranks, where they have been measured for ``"cluster": "measure"``.
        on_host: devices are CPUs, so that nothing can be offloaded to the host.
        plan: in the section's file, where it has been read.
        no_inners: see `PipelineFacts`; of pipelines that are searched for.

    Raises:
        HeteroError: the section cannot be fulfilled, see `resolve` and `search_pipelines`.
    """
    if wants_search(facts.section):
        pipelines = PipelineFacts(job=facts, no_inners=no_inners or {})
        searched = search_pipelines(pipelines, world_size, measured=measured, on_host=on_host)
        return JobStart(facts=facts, plan=searched.plan, searched=searched)
    if plan is not None and is_of_pipelines(plan, facts.section):
        return JobStart(facts=facts, plan=plan)
    return _decide_replicas(_Job(facts, world_size, measured or _described_cluster(facts.section), on_host), plan)


def _decide_replicas(job: _Job, plan: Plan | None) -> JobStart:
    facts, section, world_size = job.facts, job.facts.section, job.world_size
    sp_size = sp_size_of(facts.sp_sizes) or world_size
    by_memory = section.zero_partition == "memory"
    searcher: Searcher | None = None
    if needs_planner(section) and sp_size > 1:
        searcher = Searcher(facts.model.expect_spec(), job.workload(world_size // sp_size), section.layout, by_memory)
    plan = resolve(
        section,
        heads=(facts.model.num_heads, facts.model.num_kv_heads),
        world_size=world_size,
        sp_sizes=facts.sp_sizes,
        cluster=job.cluster,
        search=searcher,
        plan=plan,
    )
    if job.cluster is None and not by_memory:
        return JobStart(facts=facts, plan=plan)
    clusters = clusters_of_replicas(section, job.cluster, [schedule.sp_size for schedule in plan.schedules])
    weights: tuple[float, ...] | None = None
    if by_memory:
        equal = [job.workload(len(clusters))] * len(clusters)
        replicas = _forecasts(facts.model.expect_spec(by_memory=True), plan, clusters, equal)
        weights = weights_by_memory([(replica.cost, replica.schedule) for replica in replicas])
    searched = {} if searcher is None else searcher.planned
    try:
        spec = facts.model.expect_spec()
        forecasts = _forecasts(spec, plan, clusters, job.workloads(plan, weights), searched)
    except (ModelError, PlanError, ScheduleError) as error:  # such a job is trained without a prediction
        return JobStart(facts=facts, plan=plan, zero_weights=weights, no_forecast_reason=str(error))
    return JobStart(facts=facts, plan=plan, zero_weights=weights, forecasts=forecasts)


def _described_cluster(section: HeterogeneitySection) -> Cluster | None:
    return None if section.cluster == "measure" else load_cluster(section.cluster)


@dataclass(frozen=True)
class _Job:
    """The facts of a job, its size and its devices."""

    facts: JobFacts  # of the job
    world_size: int  # ranks of the job
    cluster: Cluster | None  # of the job or of one replica; None where it is not known
    on_host: bool  # devices are CPUs

    def workload(self, num_replicas: int, weights: tuple[float, ...] | None = None) -> Workload:
        """The workload of one of ``num_replicas`` replicas.

        Args:
            num_replicas: copies of the model.
            weights: ZeRO shares of all ranks, where they follow from the devices' memory.
        """
        workload = workload_of(self.facts, num_replicas, on_host=self.on_host)
        if num_replicas > 1:
            knows_all = self.cluster is not None and self.cluster.num_ranks == self.world_size
            return replace(workload, zero_cluster=self.cluster if knows_all else None)
        return workload if weights is None else replace(workload, zero_weights=weights)

    def workloads(self, plan: Plan, weights: tuple[float, ...] | None) -> list[Workload]:
        """The workload of every replica, each with its own batches."""
        workload, split = self.workload(len(plan.pipelines), weights), plan.batch_split
        if split is None:
            return [workload] * len(plan.pipelines)
        batches = zip(split.micro_batch_sizes, split.micro_batches, strict=True)
        return [replace(workload, micro_batch=size, micro_batches=count) for size, count in batches]


def _forecasts(
    model: ModelSpec,
    plan: Plan,
    clusters: Sequence[Cluster],
    workloads: Sequence[Workload],
    searched: Mapping[Cluster, PlannedSchedule] | None = None,
) -> tuple[Forecast, ...]:
    """A forecast per replica.

    Args:
        plan: of replicas.
        clusters: by replica.
        workloads: by replica.
        searched: what the planner found, by cluster.
    """
    return tuple(
        forecast(schedule, cluster, model, workload, (searched or {}).get(cluster))
        for schedule, cluster, workload in zip(plan.schedules, clusters, workloads, strict=True)
    )
