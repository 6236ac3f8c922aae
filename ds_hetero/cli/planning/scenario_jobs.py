"""The search over jobs for the options of a command: what they name is fixed, and the rest is searched."""

from __future__ import annotations

from dataclasses import replace

import click

from ds_hetero.cli.scenario import Scenario
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.job import FoundJobs, Job, JobTask
from ds_hetero.planner.jobs.kinds import Freedom
from ds_hetero.planner.jobs.search import search_jobs
from ds_hetero.planner.planning import check_workload


def find_jobs(scenario: Scenario, batch: int, freedom: Freedom) -> FoundJobs:
    """Search for the best jobs of a scenario.

    Args:
        batch: sequences of a step.
        freedom: what the search may choose.

    Raises:
        MemoryPlanError: no job fits into memory.
        PlanError: there are more ranks than tokens, or no kind of job that is allowed can run.
    """
    check_workload(scenario.cluster, scenario.workload)
    work = scenario.workload
    if freedom.may_choose("micro_batch"):
        work = replace(work, micro_batch=1, micro_batches=batch)
    task = JobTask(cluster=scenario.cluster, model=scenario.model, workload=work, batch=batch, freedom=freedom)
    return search_jobs(task)


def best_beside(scenario: Scenario, context: click.Context) -> Job | None:
    """Return the best job with the settings that options name; commands show it beside a plan of usual settings.

    None if nothing fits, or if the cost model is not ``calibrated``, the only one with which jobs are searched.
    """
    if scenario.cost_model != "calibrated":
        return None
    work = scenario.workload
    try:
        found = find_jobs(scenario, work.micro_batch * work.micro_batches, Freedom(fixed=fixed_fields(context)))
    except PlanError:
        return None
    return found.best


def fixed_fields(context: click.Context) -> frozenset[str]:
    """Return the fields of `Workload` that options on the command line name, so that no search may change them."""
    names = Workload.__dataclass_fields__
    written = (name for name in names if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE)
    return frozenset(written)
