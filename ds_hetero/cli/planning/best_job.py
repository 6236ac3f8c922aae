"""Answer of ``ds-hetero plan`` where settings are left open: the best job, and the best of every other kind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ds_hetero.cli.options import command_line_of
from ds_hetero.cli.planning.answer import Answer, answer_of, price_of_plan
from ds_hetero.cli.planning.best_job_text import explain_job, job_lines
from ds_hetero.cli.planning.job_headline import headline
from ds_hetero.cli.planning.scenario_jobs import find_jobs
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import MemoryPlanError
from ds_hetero.planner.jobs.job import FoundJobs, Job
from ds_hetero.planner.jobs.kinds import Freedom
from ds_hetero.planner.results.schedule import PlannedSchedule


def best_job_answer(scenario: Scenario, batch: int, freedom: Freedom, trained: float, *, explain: bool) -> Answer:
    """Search for the best job and make the answer.

    Args:
        trained: tokens of the whole training.
        explain: whether to print all that is known, instead of at most `best_job_text.MAX_ANSWER_LINES` lines.
    """
    try:
        found = find_jobs(scenario, batch, freedom)
    except MemoryPlanError as error:
        from ds_hetero.cli.planning.fit import fit

        raise MemoryPlanError(
            f"{error} To see which changes are enough, and what they cost, run: {command_line_of(fit)}"
        ) from None
    job_scenario = scenario_of(scenario, found.best)
    price = price_of_plan(job_scenario, found.best.planned)
    show = partial(_show, scenario, job_scenario, found, price.lines(trained), explain=explain)
    answer = answer_of(
        job_scenario,
        found.best.planned,
        plan_file(found.best),
        show,
        price=price.to_dict(trained),
        job=found.best.to_dict(),
        alternatives=list(_alternatives(found)),
        search_s=found.search_s,
        advice={"leave_out": None, "zero_stage": None},  # the answer has them already
    )
    return answer._replace(folder=partial(_folder, scenario, job_scenario, found, price.lines(trained)))


def _folder(scenario: Scenario, job_scenario: Scenario, found: FoundJobs, price_lines: list[str]) -> dict[str, str]:
    """Return the text, by file name, of the files with which users start the best job."""
    from ds_hetero.reporting.job_folder import folder_contents

    expected = [*headline(found.best), *price_lines]
    return folder_contents(found.best, plan_file(found.best), job_scenario.to_dict(), expected)


def scenario_of(scenario: Scenario, job: Job) -> Scenario:
    """Return the scenario of a job: the GPUs that take part, and the chosen settings."""
    workload = replace(job.workload, zero_cluster=None)
    left_out: dict[str, list[int]] = {}
    for rank in job.left_out:
        left_out.setdefault(job.whole_cluster.devices[rank].name, []).append(rank)
    return replace(
        scenario,
        clusters=(job.cluster,),
        workload=workload,
        left_out=tuple((name, tuple(ranks)) for name, ranks in left_out.items()),
    )


def plan_file(job: Job) -> JsonDict:
    """Return the content of the plan file of a job."""
    planned = job.planned
    if isinstance(planned, PlannedSchedule):
        return planned.schedule.to_dict()
    if planned.plan.is_replicas and planned.plan.model is None:
        return planned.plan.to_replicas_dict()
    return planned.plan.to_dict()


def _alternatives(found: FoundJobs) -> list[JsonDict]:
    """Return the best job of every other kind, with its plan, and the kinds that are refused."""
    alternatives: list[JsonDict] = []
    for job in found.jobs[1:]:
        factor = job.step_s / found.best.step_s
        alternatives.append({**job.to_dict(), "factor": factor, "reason": job.limit, "plan": plan_file(job)})
    alternatives += (refused.to_dict() for refused in found.refused)
    return alternatives


def _show(
    scenario: Scenario, job_scenario: Scenario, found: FoundJobs, price_lines: list[str], *, explain: bool
) -> None:
    """Print the best job; with ``explain`` every detail of it, and the settings of all others."""
    if explain:
        explain_job(scenario, job_scenario, found, price_lines)
    else:
        print("\n".join(job_lines(scenario, job_scenario, found, price_lines)))
