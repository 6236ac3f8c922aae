"""Resolves the "heterogeneity" section: the plan of a job of this model and this size.

    plan = resolve(section, heads=(32, 8), world_size=8, sp_sizes={"sequence_parallel_size": 4})

One rank alone can know everything here; `ds_hetero.job.start` makes all ranks agree on it. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
from ds_hetero.planner.published.registry import find_planner
from ds_hetero.values.baselines import FROM_DEVICES, FROM_PLANNER, UNIFORM, proportional, ulysses
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule, schedules_for_world
from ds_hetero.values.section import SECTION, HeterogeneitySection

Search = Callable[[str, Cluster], Schedule]
"""From the name of a searching strategy and the cluster of one replica to a schedule of ranks that begin at 0."""


def needs_planner(section: HeterogeneitySection) -> bool:
    """Whether the schedule is searched for under a cost model."""
    return section.planner is not None or section.schedule in FROM_PLANNER


def expect_planners(section: HeterogeneitySection) -> None:
    """Refuse planners of the section that are not known, or make plans of another kind than the section asks for.

    Raises:
        ConfigError: the key, its value, and the planners that there are.
    """
    kind = "pipelines" if section.parallel == "full" else "schedule"
    for key, name, of_kind in (
        ("planner", section.planner, kind),
        ("placement.planner", section.placement.planner, "documents"),
    ):
        if name is not None:
            try:
                find_planner(name, of_kind)
            except PlanError as error:
                raise ConfigError(f'"{SECTION}.{key}": {error}') from None


def needs_measuring(section: HeterogeneitySection) -> bool:
    """Whether the live ranks must be measured: the plan depends on their speeds, or the user wrote "measure"."""
    needed = needs_planner(section) or section.schedule in FROM_DEVICES or section.zero_partition == "memory"
    return section.cluster == "measure" and (needed or "cluster" in section.model_fields_set)


def sp_size_of(sp_sizes: Mapping[str, int | None]) -> int | None:
    """The one sequence-parallel size that the sources in ``sp_sizes`` name; None if none of them does.

    Args:
        sp_sizes: by the name under which the user knows the source, such as ``"sequence_parallel_size of ds_config"``.

    Raises:
        ConfigError: two sources disagree, or a size is no whole number >= 1.
    """
    given = {source: size for source, size in sp_sizes.items() if size is not None}
    for source, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{source} is {shortened(size)}; it must be a whole number >= 1.")
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{source}={size}" for source, size in given.items())
        raise ConfigError(f"the sequence-parallel size is given twice: {listed}. Give it once, or make them equal.")
    return next(iter(given.values()), None)


def replica_size(sp_sizes: Mapping[str, int | None], world_size: int) -> int:
    """Ranks of a replica where no file says so: the sequence-parallel size, or the whole world.

    Args:
        sp_sizes: see `sp_size_of`.
        world_size: ranks of the job.

    Raises:
        ConfigError: see `sp_size_of`; or the world cannot be divided by it.
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
    """Return the plan that the section stands for.

    Args:
        section: from `read_section`.
        heads: query heads of the model, and its key/value heads.
        world_size: ranks of the job.
        sp_sizes: see `sp_size_of`; with no size given, a strategy spans the whole world.
        cluster: of the job or of one replica; None where it is not known.
        search: for the strategies that are searched for, see `needs_planner`.
        plan: in the section's file, or inline in it, see `given_plan`; None where it names a strategy.

    Raises:
        ConfigError: sizes that disagree, a strategy that is not available.
        ScheduleError: the schedule does not fit the model or the world.
        PlanError: the plan needs what cannot be run yet, or the search found nothing.
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
    """One schedule per replica; replicas on equal devices share one."""
    schedule_of: dict[Cluster, Schedule] = {}
    for cluster in clusters:
        if cluster in schedule_of:
            continue
        if name in FROM_DEVICES:  # attention, of which long sequences mostly consist
            speeds = [device.peak_flops_per_s * device.efficiency.attention_forward for device in cluster.devices]
            schedule_of[cluster] = proportional(speeds, num_heads, num_kv_heads)
        else:
            assert search is not None
            schedule_of[cluster] = search(name, cluster)
    firsts = [sum(cluster.num_ranks for cluster in clusters[:i]) for i in range(len(clusters))]
    return tuple(schedule_of[cluster].shifted(first) for cluster, first in zip(clusters, firsts, strict=True))


def check_plan_fits(plan: Plan, *, num_heads: int, num_kv_heads: int, sp_sizes: Mapping[str, int | None]) -> None:
    """Refuse a plan of replicas for another model, or of other sizes than the user gave; arguments as for `resolve`.

    Raises:
        ConfigError: sizes that disagree.
        ScheduleError: the schedules do not fit the model.
    """
    for schedule in plan.schedules:
        if (schedule.num_heads, schedule.num_kv_heads) != (num_heads, num_kv_heads):
            raise ScheduleError(
                f"the schedule is for num_heads={schedule.num_heads}, num_kv_heads={schedule.num_kv_heads}; the model "
                f"has {num_heads} and {num_kv_heads}. Make a schedule for this model."
            )
    given, sizes = sp_size_of(sp_sizes), [schedule.sp_size for schedule in plan.schedules]
    expected = sizes[0] if len(set(sizes)) == 1 else sum(sizes)
    if given is not None and given != expected:
        source = next(source for source, size in sp_sizes.items() if size is not None)
        raise ConfigError(
            f'"{SECTION}.schedule" has replicas of {sizes} ranks, but {source} is {given}. '
            f"Set it to {expected}{', all ranks of the replicas together,' if len(set(sizes)) > 1 else ''} or leave it "
            "out where that is possible."
        )


def clusters_of_replicas(
    section: HeterogeneitySection, cluster: Cluster | None, sizes: Sequence[int]
) -> tuple[Cluster, ...]:
    """Return the cluster of every replica: its part of the job's, or the whole cluster if that describes one replica.

    Args:
        section: from `read_section`.
        cluster: of the job or of one replica; None where it is not known.
        sizes: ranks of every replica, which hold consecutive ranks.

    Raises:
        ConfigError: the cluster has another number of devices than the job or a replica, or nothing was measured.
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
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(cluster.part(first, first + size) for first, size in zip(firsts, sizes, strict=True))
