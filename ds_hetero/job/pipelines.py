"""The start of a job whose section names a plan of pipelines: rank 0 reads it, all ranks have it."""

from __future__ import annotations

from collections.abc import Callable

from ds_hetero.config import SECTION, HeterogeneitySection
from ds_hetero.errors import ConfigError
from ds_hetero.job.resolve import pipelines_in_file
from ds_hetero.job.start import World
from ds_hetero.plans import Plan

__all__ = ["agree_on_pipelines"]


def agree_on_pipelines(world: World, read: Callable[[], HeterogeneitySection | None]) -> Plan | None:
    """Return the plan of pipelines that the section names; None if it names anything else.

    Args:
        world: the ranks of the job.
        read: returns the section; what it raises on any rank is raised on all.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: on every rank, when the section is wrong, or the plan does not fit the world.
    """

    def plan_of_rank_0() -> Plan | None:
        section = read()
        plan = pipelines_in_file(section, world.size) if section is not None and world.rank == 0 else None
        if plan is not None and section is not None:
            _expect_no_report(section)
        return plan

    return world.on_all_ranks(plan_of_rank_0)[0]


def _expect_no_report(section: HeterogeneitySection) -> None:
    """Refuse what is not measured in pipelines.

    Raises:
        ConfigError: names the key.
    """
    asked = {"report": section.report is not None, "replan.report_only": section.replan.report_only}
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f'"{SECTION}.{key}" is not possible with pipelines: the phases of their steps are not measured. Leave '
                "it out, or train a schedule of sequence parallelism."
            )
