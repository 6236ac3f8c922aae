"""Make the plan that the section asks for, from a plan file, a strategy by name, or a search.

Nothing here runs collectives, asks devices or knows a framework: the same section gives the same plan on every rank.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import is_file, read_file, shortened
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
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
    """Return True if the model is divided into stages of pipelines.

    With ``"parallel": "full"`` a plan of replicas is one of pipelines with one stage.

    Args:
        plan: from the section; None if it has none.
    """
    return section.parallel == "full" or (plan is not None and not plan.is_replicas)


def _checked_pipelines(plan: Plan, name: str, world_size: int) -> Plan:
    """Return a plan of pipelines with layers at every stage. Raises `PlanError` if this job cannot run it."""
    if plan.ranks[-1] >= world_size:
        raise PlanError(
            f"{name}: the plan has ranks up to {plan.ranks[-1]}, "
            f"the job has {world_size} processes. Launch as many as the plan needs, or plan for this job."
        )
    plan = plan.with_layers()
    lacks_layers = any(stage.layers is None for pipeline in plan.pipelines for stage in pipeline.stages)
    if plan.batch_split is None or lacks_layers:
        raise PlanError(
            f"{name}: a plan of pipelines needs micro_batch_size, micro_batches and the layers of every stage. Add "
            "them, as ds-hetero plan --parallel full --out writes them."
        )
    return plan


def _checked_replicas(plan: Plan, name: str, world_size: int) -> Plan:
    """Return a plan of replicas. Raises `PlanError` or `ScheduleError` if this job cannot run it."""
    if plan.zero is not None:
        raise PlanError(
            f'{name}: "zero" of a plan is not used yet. Set "zero_optimization" and "{SECTION}.zero_partition" in the '
            'DeepSpeed configuration, and leave "zero" out.'
        )
    if plan.ranks != tuple(range(world_size)):
        ranks_by_replica = [list(replica.ranks) for replica in plan.pipelines]
        raise ScheduleError(
            f"the schedules of the replicas hold ranks {shortened(ranks_by_replica)}, the "
            f"job has {world_size} processes. Give each of the ranks 0 to {world_size - 1} one place, or start another "
            "number of processes."
        )
    return plan


def _read_json(path: str) -> Any:
    """Return the content of a schedule file. Raises `ConfigError`: no such file; `ScheduleError`: it cannot be read."""
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
    """Return True if the schedule is searched for under a cost model."""
    return section.planner is not None or section.schedule in FROM_PLANNER


def expect_planners(section: HeterogeneitySection) -> None:
    """Raise an error if the section names a planner that does not exist.

    Raises:
        ConfigError: a planner is unknown or makes other kinds of plans; the message lists the known ones.
    """
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
    """Return True if live ranks must be measured: the plan depends on their speeds, or the user wrote "measure"."""
    needed = needs_planner(section) or section.schedule in FROM_DEVICES or section.zero_partition == "memory"
    needed = needed or section.experts in ("by_memory", "by_speed", "best")
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
    """Return the number of ranks of a replica without a plan file: the sequence-parallel size, or all ranks.

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
    """Return a schedule for every replica; for replicas on equal devices, the search runs once."""
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
    """Raise an error if a plan of replicas does not fit the model or the sequence-parallel size.

    Raises:
        ScheduleError: a schedule is for another number of heads.
        ConfigError: the sequence-parallel size is not that of the replicas.
    """
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
