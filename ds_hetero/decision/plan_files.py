"""Plans that the section names by a file, or holds itself: of replicas or of pipelines. Imports no torch."""

from __future__ import annotations

from typing import Any

from ds_hetero.common.paths import is_file
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.common.text import did_you_mean
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
from ds_hetero.values.baselines import STRATEGIES
from ds_hetero.values.plans import Plan, read_plan
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
