"""Decision on the plan of a job, and its prediction: for rank 0 at the start, and for ``ds-hetero doctor``.

`resolve` returns the plan that the section asks for; a `Searcher` searches for schedules; `decide` uses both, and
predicts the plan. Nothing here runs collectives, asks devices or knows a framework: the same facts give the same
decision everywhere. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.common.reading import is_file, read_file, shortened
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.cost import CostModel, Prediction, Workload, make_cost_model
from ds_hetero.decision.decide_pipelines import PipelineFacts, SearchedPipelines, search_pipelines
from ds_hetero.decision.facts import JobFacts, workload_of
from ds_hetero.errors import ConfigError, ModelError, PlanError, ScheduleError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, planning, strategy
from ds_hetero.planner.memory.zero_weights import weights_by_memory
from ds_hetero.planner.published.registry import find_planner
from ds_hetero.values.baselines import FROM_DEVICES, FROM_PLANNER, STRATEGIES, UNIFORM, proportional, ulysses
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.schedule import Schedule, schedules_for_world
from ds_hetero.values.section import SECTION, HeterogeneitySection, accepted


def given_plan(section: HeterogeneitySection, world_size: int) -> Plan | None:
    """Return the plan in the section's file, or inline in the section; None if the section names a strategy.

    Raises:
        ConfigError: the file does not exist.
        ScheduleError: the file cannot be read, or its schedules do not fit the world.
        PlanError: the plan is wrong; or a plan of pipelines has ranks that the job lacks, or no batches.
    """
    source = section.schedule
    if isinstance(source, str):
        if source in STRATEGIES:
            return None
        name, content = shortened(source)[1:-1], _read_json(source)
    else:
        name, content = "the inline schedule", source
    try:
        plan = read_plan(content, world_size)
    except (ScheduleError, PlanError) as error:
        raise type(error)(f"{name}: {error}") from None
    if is_of_pipelines(plan, section):
        return _checked_pipelines(plan, name, world_size)
    return _checked_replicas(plan, name, world_size)


def is_of_pipelines(plan: Plan | None, section: HeterogeneitySection) -> bool:
    """Return whether the model is divided into stages of pipelines.

    With ``"parallel": "full"`` a plan of replicas is one of pipelines with one stage.

    Args:
        plan: from the section; None if it has none.
    """
    return section.parallel == "full" or (plan is not None and not plan.is_replicas)


def _checked_pipelines(plan: Plan, name: str, world_size: int) -> Plan:
    """Return a plan of pipelines with layers at every stage. Raises `PlanError`: it cannot be run by this job."""
    if plan.ranks[-1] >= world_size:
        raise PlanError(
            f"{name}: the plan has ranks up to {plan.ranks[-1]}, "
            f"the job has {world_size} processes. Launch as many as the plan needs, or plan for this job."
        )
    plan = plan.with_layers()
    lacks_layers = any(stage.layers is None for pipeline in plan.pipelines for stage in pipeline.stages)
    if plan.batch_split is None or lacks_layers:
        raise PlanError(
            f"{name}: a plan of pipelines says micro_batch_size, micro_batches and the layers of every stage."
        )
    return plan


def _checked_replicas(plan: Plan, name: str, world_size: int) -> Plan:
    """Return a plan of replicas. Raises `PlanError` or `ScheduleError`: it cannot be run by this job."""
    if plan.zero is not None:
        raise PlanError(
            f'{name}: "zero" of a plan is not used yet. Set "zero_optimization" and "{SECTION}.zero_partition" in the '
            'DeepSpeed configuration, and leave "zero" out.'
        )
    if plan.ranks != tuple(range(world_size)):
        raise ScheduleError(
            f"the schedules of the replicas hold ranks {shortened([list(p.ranks) for p in plan.pipelines])}, the "
            f"job has {world_size} processes; each needs one place."
        )
    return plan


def _read_json(path: str) -> Any:
    if not is_file(path):
        hint = did_you_mean(path, STRATEGIES)
        raise ConfigError(
            f'"{SECTION}.schedule": "{shortened(path)[1:-1]}" is neither a file nor a strategy{hint}. '
            f"{accepted('schedule')}"
        )
    return read_file(path, "schedule", ScheduleError)


Search = Callable[[str, Cluster], Schedule]
"""Maps the name of a searching strategy and the cluster of one replica to a schedule whose ranks begin at 0."""


def needs_planner(section: HeterogeneitySection) -> bool:
    """Return whether the schedule is searched for under a cost model."""
    return section.planner is not None or section.schedule in FROM_PLANNER


def expect_planners(section: HeterogeneitySection) -> None:
    """Refuse planners that are unknown or make other plans. Raises `ConfigError`: key, value, and known planners."""
    kind = "pipelines" if section.parallel == "full" else "schedule"
    requests = (
        ("planner", section.planner, kind),
        ("placement.planner", section.placement.planner, "documents"),
    )
    for key, name, requested_kind in requests:
        if name is not None:
            try:
                find_planner(name, requested_kind)
            except PlanError as error:
                raise ConfigError(f'"{SECTION}.{key}": {error}') from None


def needs_measuring(section: HeterogeneitySection) -> bool:
    """Return whether live ranks must be measured: the plan depends on their speeds, or the user wrote "measure"."""
    needed = needs_planner(section) or section.schedule in FROM_DEVICES or section.zero_partition == "memory"
    return section.cluster == "measure" and (needed or "cluster" in section.model_fields_set)


def sp_size_of(sp_sizes: Mapping[str, int | None]) -> int | None:
    """Return the sequence-parallel size on which all sources agree; None if no source sets one.

    Args:
        sp_sizes: by the user's name of the source, such as ``"sequence_parallel_size of ds_config"``.

    Raises:
        ConfigError: sources differ, or one is not a whole number >= 1.
    """
    size_of_source = {source: size for source, size in sp_sizes.items() if size is not None}
    for source, size in size_of_source.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{source} is {shortened(size)}; it must be a whole number >= 1.")
    if len(set(size_of_source.values())) > 1:
        listed = ", ".join(f"{source}={size}" for source, size in size_of_source.items())
        raise ConfigError(f"the sequence-parallel size is given twice: {listed}. Give it once, or make them equal.")
    return next(iter(size_of_source.values()), None)


def replica_size(sp_sizes: Mapping[str, int | None], world_size: int) -> int:
    """Return the ranks of a replica without a plan file: the sequence-parallel size, or all ranks.

    Raises:
        ConfigError: the world cannot be divided into replicas of that size.
    """
    sp_size = sp_size_of(sp_sizes) or world_size
    if world_size % sp_size:
        raise ConfigError(
            f"{world_size} processes cannot be divided into replicas of {sp_size} sequence-parallel ranks. "
            f"Launch a multiple of {sp_size} processes or change the sequence-parallel size."
        )
    return sp_size


def resolve(
    section: HeterogeneitySection,
    *,
    heads: tuple[int, int],
    world_size: int,
    sp_sizes: Mapping[str, int | None],
    cluster: Cluster | None = None,
    search: Search | None = None,
    plan: Plan | None = None,
) -> Plan:
    """Return the plan that the section asks for.

    Args:
        heads: query heads of the model, and its key/value heads.
        sp_sizes: see `sp_size_of`; without a size, one replica has all ranks.
        cluster: of the job or of one replica; None if unknown.
        search: for strategies that search, see `needs_planner`.
        plan: from the section, see `given_plan`; None if the section names a strategy.

    Raises:
        ConfigError: sizes disagree, or the strategy is not available.
        ScheduleError: the schedule does not fit the model or the world.
        PlanError: the plan cannot be run yet, or the search found none.
    """
    if plan is None:
        sp_size = replica_size(sp_sizes, world_size)
        if section.schedule in UNIFORM:
            uniform = UNIFORM[str(section.schedule)](sp_size, *heads)
            schedules = schedules_for_world(uniform, world_size)
        elif sp_size == 1:  # nothing to decide
            schedules = schedules_for_world(ulysses(1, *heads), world_size)
        else:
            clusters = clusters_of_replicas(section, cluster, [sp_size] * (world_size // sp_size))
            schedules = _schedules_for_clusters(str(section.strategy), clusters, *heads, search)
        plan = Plan.of_replicas(schedules)
    if section.layout:
        plan = plan.with_schedules([replace(schedule, layout=section.layout) for schedule in plan.schedules])
    check_plan_fits(plan, num_heads=heads[0], num_kv_heads=heads[1], sp_sizes=sp_sizes)
    return plan


def _schedules_for_clusters(
    name: str, clusters: Sequence[Cluster], num_heads: int, num_kv_heads: int, search: Search | None
) -> tuple[Schedule, ...]:
    """One schedule per replica; replicas on equal devices get the same, which is searched once."""
    schedule_of: dict[Cluster, Schedule] = {}
    for cluster in clusters:
        if cluster in schedule_of:
            continue
        if name in FROM_DEVICES:
            # Speeds of attention, which takes most of the time of long sequences.
            speeds = [device.peak_flops_per_s * device.efficiency.attention_forward for device in cluster.devices]
            schedule_of[cluster] = proportional(speeds, num_heads, num_kv_heads)
        else:
            assert search is not None
            schedule_of[cluster] = search(name, cluster)
    first_ranks = accumulate((cluster.num_ranks for cluster in clusters[:-1]), initial=0)
    return tuple(schedule_of[cluster].shifted(first) for cluster, first in zip(clusters, first_ranks, strict=True))


def check_plan_fits(plan: Plan, *, num_heads: int, num_kv_heads: int, sp_sizes: Mapping[str, int | None]) -> None:
    """Refuse a plan of replicas for other sizes or another model. Raises `ConfigError` or `ScheduleError`."""
    for schedule in plan.schedules:
        if (schedule.num_heads, schedule.num_kv_heads) != (num_heads, num_kv_heads):
            raise ScheduleError(
                f"the schedule is for num_heads={schedule.num_heads}, num_kv_heads={schedule.num_kv_heads}; the model "
                f"has {num_heads} and {num_kv_heads}. Make a schedule for this model."
            )
    sp_size = sp_size_of(sp_sizes)
    sizes = [schedule.sp_size for schedule in plan.schedules]
    # DeepSpeed knows one size. Unequal replicas are, to DeepSpeed, one replica of all ranks.
    are_equal = len(set(sizes)) == 1
    expected = sizes[0] if are_equal else sum(sizes)
    if sp_size is not None and sp_size != expected:
        source = next(source for source, size in sp_sizes.items() if size is not None)
        raise ConfigError(
            f'"{SECTION}.schedule" has replicas of {sizes} ranks, but {source} is {sp_size}. '
            f"Set it to {expected}{'' if are_equal else ', all ranks of the replicas together,'} or leave it "
            "out where that is possible."
        )


def clusters_of_replicas(
    section: HeterogeneitySection, cluster: Cluster | None, sizes: Sequence[int]
) -> tuple[Cluster, ...]:
    """Return the cluster of every replica: its part of the job's cluster, or ``cluster`` if that is of one replica.

    Args:
        cluster: of the job or of one replica; None if unknown.
        sizes: numbers of ranks of the replicas, each of which has consecutive ranks.

    Raises:
        ConfigError: the cluster has another number of devices than the job or a replica, or was not measured.
    """
    if cluster is None:
        raise ConfigError(
            f'"{SECTION}.schedule": {json.dumps(section.schedule)} takes the devices from "cluster": "measure", but '
            "nothing was measured here. Launch the job, or give a cluster file."
        )
    if set(sizes) == {cluster.num_ranks}:
        return (cluster,) * len(sizes)
    if cluster.num_ranks != sum(sizes):
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {sum(sizes)} processes in '
            f"replicas of {', '.join(map(str, sorted(set(sizes))))}. Describe every device once, in rank order."
        )
    first_ranks = accumulate(sizes[:-1], initial=0)
    return tuple(cluster.part(first, first + size) for first, size in zip(first_ranks, sizes, strict=True))


logger = logging.getLogger(__name__)

COST_MODEL = "calibrated"
_FEWEST_TOKENS = 1024  # if so few do not fit, the model does not, and shorter sequences would not help; never measured


class Searcher:
    """Searches schedules for `resolve`, and keeps the planner's results.

    Args:
        layout: from the section; None leaves it to the planner.
        by_memory: whether ZeRO's shares follow the free memory (``"zero_partition": "memory"``).
    """

    def __init__(self, model: ModelSpec, workload: Workload, layout: str | None, by_memory: bool = False) -> None:
        self._model, self._workload, self._layout, self._by_memory = model, workload, layout, by_memory
        self.planned: dict[Cluster, PlannedSchedule] = {}  # the planner's results, by cluster

    def __call__(self, name: str, cluster: Cluster) -> Schedule:
        """Return a strategy's schedule for one replica. Raises `PlanError`: no schedule fits, or too few tokens."""
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
        """Search with equal shares of ZeRO; if nothing fits then, with shares that follow the devices' memory."""
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
        return planning.plan(cluster, self._model, workload, cost_model=COST_MODEL, layout=self._layout)

    def _cost(self, cluster: Cluster) -> CostModel:
        return make_cost_model(COST_MODEL, cluster, self._model, self._workload)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Prediction of the cost model for one replica."""

    schedule: Schedule  # in global ranks
    cost: CostModel  # for the replica's cluster (ranks begin at 0), model and workload
    prediction: Prediction  # of the schedule
    planned: PlannedSchedule | None  # the planner's result; None if the schedule was not searched for

    def iteration_s(self, schedule: Schedule, seq_len: int, micro_batch: int, micro_batches: int) -> float:
        """Predict the seconds of an optimizer step with other batches."""
        workload = replace(self.cost.workload, seq_len=seq_len, micro_batch=micro_batch, micro_batches=micro_batches)
        cost = make_cost_model(self.cost.name, self.cost.cluster, self.cost.model, workload)
        return cost.predict(schedule.shifted(0)).iteration_s


def forecast(
    schedule: Schedule, cluster: Cluster, model: ModelSpec, workload: Workload, planned: PlannedSchedule | None = None
) -> Forecast:
    """Predict one replica.

    Args:
        planned: the planner's result; None if the schedule was not searched for.

    Raises:
        PlanError: the workload does not fit the cluster.
        ScheduleError: its sequence is too short for the schedule.
    """
    planning.check_workload(cluster, workload)
    cost = make_cost_model(COST_MODEL, cluster, model, workload)
    return Forecast(schedule=schedule, cost=cost, prediction=cost.predict(schedule.shifted(0)), planned=planned)


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """A job's facts, plan and predictions, once its start is decided."""

    facts: JobFacts  # the same on all ranks
    plan: Plan  # of all ranks
    zero_weights: tuple[float, ...] | None = None  # ZeRO shares of all ranks, by ``"zero_partition": "memory"``
    forecasts: tuple[Forecast, ...] = ()  # on rank 0, one per replica; empty if devices or model are unknown
    is_predicted: bool = False  # on every rank, whether rank 0 has forecasts
    no_forecast_reason: str | None = None  # on rank 0, why there is no forecast although the devices are known
    searched: SearchedPipelines | None = None  # on rank 0, result of the search for pipelines; None without a search

    @property
    def section(self) -> HeterogeneitySection:
        """The "heterogeneity" section."""
        return self.facts.section

    @property
    def is_of_pipelines(self) -> bool:
        """Whether the model is divided into stages of pipelines."""
        return is_of_pipelines(self.plan, self.section)

    @property
    def places_by_default(self) -> bool:
        """Whether batches may be placed by documents although the section does not ask for it.

        The devices must be known. Re-planning must be off, since it changes the schedule that placing is computed for.
        """
        return self.section.placement.mode is None and self.is_predicted and not self.section.replan.enabled


def depends_on_measuring(facts: JobFacts, world_size: int) -> bool:
    """Return whether the live ranks must be measured before `decide` is called."""
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
    """Resolve the section to a plan and predict it, or search for pipelines. Raises `HeteroError`: no plan fits.

    Reads the cluster file that the section names.

    Args:
        measured: cluster of the live ranks, if they were measured for ``"cluster": "measure"``.
        on_host: whether devices are CPUs, so that nothing can be offloaded to the host.
        plan: from the section; None if it names a strategy.
        no_inners: see `PipelineFacts`; used by the search for pipelines.
    """
    if wants_search(facts.section):
        pipelines = PipelineFacts(job=facts, no_inners=no_inners or {})
        searched = search_pipelines(pipelines, world_size, measured=measured, on_host=on_host)
        return JobStart(facts=facts, plan=searched.plan, searched=searched)
    if plan is not None and is_of_pipelines(plan, facts.section):
        return JobStart(facts=facts, plan=plan)
    return _decide_tokens(_Job(facts, world_size, measured or _described_cluster(facts.section), on_host), plan)


def _decide_tokens(job: _Job, plan: Plan | None) -> JobStart:
    """Decide for the section's tokens; without them, for the model's most, halved until they fit.

    A model's configuration has the longest sequence that it can take, often 131,072 tokens. Most jobs train much
    shorter ones, and must not be refused for that number.
    """
    section, tokens = job.facts.section, job.facts.model.max_seq_len
    try:
        return _decide_replicas(job, plan)
    except PlanError:
        if section.seq_len is not None or tokens is None or plan is not None:
            raise
        fewer = tokens
        while (fewer := fewer // 2) >= _FEWEST_TOKENS:
            with contextlib.suppress(PlanError):
                facts = replace(job.facts, section=section.model_copy(update={"seq_len": fewer}))
                start = _decide_replicas(replace(job, facts=facts), plan)
                logger.warning(
                    "planned for sequences of %d tokens, since the %d of the model's max_position_embeddings do not "
                    'fit. Set "seq_len" in the "%s" section to the tokens of the sequences you train',
                    fewer,
                    tokens,
                    SECTION,
                )
                return start
        raise


def _decide_replicas(job: _Job, plan: Plan | None) -> JobStart:
    """Resolve and predict a plan of replicas, with ZeRO shares by memory if the section asks for them."""
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
        # The shares follow from the memory that is free in a prediction with equal shares.
        equal_shares = [job.workload(len(clusters))] * len(clusters)
        replicas = _forecasts(facts.model.expect_spec(by_memory=True), plan, clusters, equal_shares)
        weights = weights_by_memory([(replica.cost, replica.schedule) for replica in replicas])
    searched = {} if searcher is None else searcher.planned
    try:
        spec = facts.model.expect_spec()
        forecasts = _forecasts(spec, plan, clusters, job.workloads(plan, weights), searched)
    except (ModelError, PlanError, ScheduleError) as error:  # a job trains without a prediction, too
        return JobStart(facts=facts, plan=plan, zero_weights=weights, no_forecast_reason=str(error))
    return JobStart(facts=facts, plan=plan, zero_weights=weights, forecasts=forecasts, is_predicted=True)


def _described_cluster(section: HeterogeneitySection) -> Cluster | None:
    return None if section.cluster == "measure" else load_cluster(section.cluster)


@dataclass(frozen=True)
class _Job:
    """A job's facts, size and devices."""

    facts: JobFacts
    world_size: int  # ranks of the job
    cluster: Cluster | None  # of the job or of one replica; None if unknown
    on_host: bool  # devices are CPUs

    def workload(self, num_replicas: int, weights: tuple[float, ...] | None = None) -> Workload:
        """Return the workload of one of ``num_replicas`` equal replicas.

        Args:
            weights: ZeRO shares of the ranks, of a single replica; None for those of the section.
        """
        workload = workload_of(self.facts, num_replicas, on_host=self.on_host)
        if num_replicas > 1:
            # ZeRO shards over the ranks of all replicas, which a cluster of one replica does not describe.
            describes_all = self.cluster is not None and self.cluster.num_ranks == self.world_size
            return replace(workload, zero_cluster=self.cluster if describes_all else None)
        return workload if weights is None else replace(workload, zero_weights=weights)

    def workloads(self, plan: Plan, weights: tuple[float, ...] | None) -> list[Workload]:
        """Return the workload of every replica, each with its own batches."""
        workload = self.workload(len(plan.pipelines), weights)
        split = plan.batch_split
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
    """A forecast per replica."""
    planned_by_cluster = searched or {}
    forecasts = []
    for schedule, cluster, workload in zip(plan.schedules, clusters, workloads, strict=True):
        forecasts.append(forecast(schedule, cluster, model, workload, planned_by_cluster.get(cluster)))
    return tuple(forecasts)


def wants_search(section: HeterogeneitySection) -> bool:
    """Return whether the job searches for pipelines at its start."""
    return section.parallel == "full" and section.schedule == "plan"
