"""Resolves the "heterogeneity" section: the plan of a job of this model and this size.

    plan = resolve(section, heads=(32, 8), world_size=8, sp_sizes={"sequence_parallel_size": 4})

One rank alone can know everything here; `ds_hetero.job.start` makes all ranks agree on it. Imports no torch.

Plans that the section names by a file, or holds itself: of replicas or of pipelines. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import is_file, read_file, shortened
from ds_hetero.common.text import did_you_mean
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
from ds_hetero.planner.published.registry import find_planner
from ds_hetero.values.baselines import FROM_DEVICES, FROM_PLANNER, STRATEGIES, UNIFORM, proportional, ulysses
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.schedule import Schedule, schedules_for_world
from ds_hetero.values.section import SECTION, HeterogeneitySection, accepted


def given_plan(section: HeterogeneitySection, world_size: int) -> Plan | None:
    """Return the plan in the section's file, or inline in it; None where the section names a strategy.

    Args:
        section: from `read_section`.
        world_size: ranks of the job.

    Raises:
        ConfigError: there is no such file.
        ScheduleError: the file cannot be read, or its schedules do not fit the world.
        PlanError: the plan is wrong; or a plan of pipelines has ranks that the job has not, or says no batches.
    """
    source = section.schedule
    if isinstance(source, str) and source in STRATEGIES:
        return None
    name = shortened(source)[1:-1] if isinstance(source, str) else "the inline schedule"
    content = _read_json(source) if isinstance(source, str) else source
    try:
        plan = read_plan(content, world_size)
    except (ScheduleError, PlanError) as error:
        raise type(error)(f"{name}: {error}") from None
    return (_pipelines_of if is_of_pipelines(plan, section) else _replicas_of)(plan, name, world_size)


def is_of_pipelines(plan: Plan | None, section: HeterogeneitySection) -> bool:
    """Whether a model is cut into stages of pipelines.

    With ``"parallel": "full"`` a plan of replicas is one of pipelines of one stage.

    Args:
        plan: that the section gives; None where it gives none.
        section: from `read_section`.
    """
    return section.parallel == "full" or (plan is not None and not plan.is_replicas)


def _pipelines_of(plan: Plan, name: str, world_size: int) -> Plan:
    if plan.ranks[-1] >= world_size:
        raise PlanError(f"{name}: the plan has ranks up to {plan.ranks[-1]}, the job has {world_size} processes.")
    plan = plan.with_layers()
    if plan.batch_split is None or any(stage.layers is None for p in plan.pipelines for stage in p.stages):
        raise PlanError(
            f"{name}: a plan of pipelines says micro_batch_size, micro_batches and the layers of every stage."
        )
    return plan


def _replicas_of(plan: Plan, name: str, world_size: int) -> Plan:
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
        raise ConfigError(f'"{SECTION}.schedule": "{shortened(path)[1:-1]}" is no file{hint}. {accepted("schedule")}')
    return read_file(path, "schedule", ScheduleError)


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
