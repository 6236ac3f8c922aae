"""Plans that the section names by a file, or holds itself: of replicas or of pipelines. Imports no torch."""

from __future__ import annotations

from typing import Any

from ds_hetero.baselines import STRATEGIES
from ds_hetero.common.paths import is_file
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.config import SECTION, HeterogeneitySection, accepted, did_you_mean
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
from ds_hetero.plans import Plan, read_plan

__all__ = ["pipelines_in_file", "plan_in_file", "replicas_in_file"]


def plan_in_file(section: HeterogeneitySection, world_size: int) -> Plan | None:
    """Return the plan of replicas in the section's file, or inline in it; None where the section names a strategy.

    Args:
        section: from `read_section`.
        world_size: ranks of the job.

    Raises:
        ConfigError: there is no such file.
        ScheduleError: the file cannot be read, or its schedules do not fit the world.
        PlanError: a plan of version 2 is wrong, or has pipelines.
    """
    plan, name = _read_plan(section, world_size)
    return None if plan is None else _replicas_of(plan, name, world_size)


def replicas_in_file(section: HeterogeneitySection, world_size: int) -> Plan | None:
    """`plan_in_file`, and None for a plan of pipelines as well."""
    plan, name = _read_plan(section, world_size)
    return None if plan is None or _is_for_pipelines(plan, section) else _replicas_of(plan, name, world_size)


def pipelines_in_file(section: HeterogeneitySection, world_size: int) -> Plan | None:
    """Return the plan of pipelines in the section's file, or inline in it; None if it names anything else.

    With ``"parallel": "full"`` a plan of replicas is one of pipelines of one stage.

    Args:
        section: from `read_section`.
        world_size: ranks of the job.

    Raises:
        ConfigError: there is no such file.
        ScheduleError: the file cannot be read.
        PlanError: the plan is wrong, has ranks that the job has not, or says no batches.
    """
    plan, name = _read_plan(section, world_size)
    if plan is None or not _is_for_pipelines(plan, section):
        return None
    if plan.ranks[-1] >= world_size:
        raise PlanError(f"{name}: the plan has ranks up to {plan.ranks[-1]}, the job has {world_size} processes.")
    plan = plan.with_layers()
    if plan.batch_split is None or any(stage.layers is None for p in plan.pipelines for stage in p.stages):
        raise PlanError(
            f"{name}: a plan of pipelines says micro_batch_size, micro_batches and the layers of every stage."
        )
    return plan


def _is_for_pipelines(plan: Plan, section: HeterogeneitySection) -> bool:
    return not plan.is_replicas or section.parallel == "full"


def _replicas_of(plan: Plan, name: str, world_size: int) -> Plan:
    _expect_replicas(plan, name)
    if plan.ranks != tuple(range(world_size)):
        raise ScheduleError(
            f"the schedules of the replicas hold ranks {shortened([list(p.ranks) for p in plan.pipelines])}, the "
            f"job has {world_size} processes; each needs one place."
        )
    return plan


def _read_plan(section: HeterogeneitySection, world_size: int) -> tuple[Plan | None, str]:
    """The plan that the section's schedule is, and how to call it; None for a strategy."""
    source = section.schedule
    if isinstance(source, str) and source in STRATEGIES:
        return None, source
    name = shortened(source)[1:-1] if isinstance(source, str) else "the inline schedule"
    content = _read_json(source) if isinstance(source, str) else source
    try:
        return read_plan(content, world_size), name
    except (ScheduleError, PlanError) as error:
        raise type(error)(f"{name}: {error}") from None


def _read_json(path: str) -> Any:
    if not is_file(path):
        hint = did_you_mean(path, STRATEGIES)
        raise ConfigError(f'"{SECTION}.schedule": "{shortened(path)[1:-1]}" is no file{hint}. {accepted("schedule")}')
    return read_file(path, "schedule", ScheduleError)


def _expect_replicas(plan: Plan, name: str) -> None:
    """Refuse what is no plan of replicas, and what such a plan cannot say."""
    if not plan.is_replicas:
        raise PlanError(
            f'{name}: the plan has pipelines of several stages, or stages that are not "inner": "sequence". Such '
            "plans run through deepspeed.initialize, the Trainer and accelerate."
        )
    if plan.zero is not None:
        raise PlanError(
            f'{name}: "zero" of a plan is not used yet. Set "zero_optimization" and "{SECTION}.zero_partition" in the '
            'DeepSpeed configuration, and leave "zero" out.'
        )
