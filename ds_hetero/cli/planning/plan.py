"""``ds-hetero plan``: searches for the best job on given GPUs, and says why it is best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE, GLOBAL_BATCH, LAYOUT, SEED, TRAINED_TOKENS
from ds_hetero.cli.planning.answer import Answer
from ds_hetero.cli.planning.best_job import best_job_answer
from ds_hetero.cli.planning.pipelines_answer import Goal, pipelines_answer
from ds_hetero.cli.planning.scenario_jobs import fixed_fields
from ds_hetero.cli.printing import PLANS, check_folder, check_out, print_json, print_written, write_folder, write_plan
from ds_hetero.cli.scenario import Scenario, scenario_options
from ds_hetero.common.reading import MAX_BATCH, expect_whole_number, shortened
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.kinds import KINDS, SEQUENCE, Freedom

_LENGTHS_HELP = (
    "Plan for batches of documents: a JSON file of lengths, or arxiv, github or prolong64k; --seq-len is the length "
    "of a row."
)
BEST, FULL = "best", "full"  # values of --parallel: all kinds of jobs, and a long search for pipelines alone
PARALLEL_VALUES = (BEST, *KINDS, FULL)


@click.command
@scenario_options()
@LAYOUT
@click.option("--token-unit", type=int, default=1, help="Hand out tokens in multiples of this.")
@click.option(
    "--parallel",
    default=BEST,
    help="best: all kinds; sequence, batch, pipelines or one (GPU): that kind; full: a longer search for pipelines.",
)
@GLOBAL_BATCH
@click.option("--objective", default="time", help="For --parallel full: time, cost, energy, or pareto for all three.")
@click.option("--at-most-s", type=float, help="Longest step, for the objectives cost and energy.")
@TRAINED_TOKENS
@click.option("--planner", help="A published planner in the place of ours; an unknown name lists them.")
@click.option("--lengths", help=_LENGTHS_HELP)
@SEED
@click.option("--explain", is_flag=True, help="All details, instead of at most 25 lines.")
@click.option(
    "--out",
    type=FILE,
    help="Plan file, .json, a page, .html, or a folder that starts, job/; for pareto a picture, .png.",
)
@AS_JSON
@click.pass_context
def plan(
    context: click.Context,
    scenario: Scenario,
    layout: str | None,
    token_unit: int,
    parallel: str,
    global_batch: int | None,
    objective: str,
    at_most_s: float | None,
    trained: float,
    planner: str | None,
    lengths: str | None,
    seed: int,
    explain: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Search the best job for GPUs, a model and a length, and say why."""
    if parallel not in PARALLEL_VALUES:
        raise PlanError(f"--parallel {shortened(parallel)} is unknown; it is one of {', '.join(PARALLEL_VALUES)}.")
    fixed = fixed_fields(context)
    options = _ScheduleOptions(scenario, layout, token_unit, planner, lengths)
    options.check(parallel)
    if objective == "pareto":
        is_restricted = at_most_s is not None or planner is not None
        _front(scenario, parallel, global_batch, out, as_json, is_restricted=is_restricted)
        return
    is_folder = out is not None and not out.suffix
    if out is not None and is_folder:
        check_folder(out)
    else:
        check_out(out, endings=PLANS)
    answer: Answer
    if parallel == FULL:
        goal = Goal(objective, at_most_s)
        answer = pipelines_answer(scenario, _batch_of_full(global_batch), goal, planner, trained, as_json)
    elif lengths is not None:
        from ds_hetero.cli.planning.lengths_answer import lengths_answer

        answer = lengths_answer(scenario, lengths, seed)
    elif options.are_used or (parallel == SEQUENCE and "zero_stage" in fixed):
        from ds_hetero.cli.planning.schedule_answer import schedule_answer

        answer = schedule_answer(scenario, layout, token_unit, planner, trained)
    else:
        kinds = tuple(KINDS) if parallel == BEST else (parallel,)
        batch = _batch_of_step(scenario, global_batch, fixed)
        freedom = Freedom(kinds=kinds, fixed=fixed, divides_experts=scenario.chooses_experts)
        answer = best_job_answer(scenario, batch, freedom, trained, explain=explain)
    if out is not None and is_folder:
        write_folder(out, _files_of(answer))
    elif out is not None:
        write_plan(out, answer.plan, answer.scenario.to_dict())
    if as_json:
        print_json(answer.data())
        return
    answer.show()
    print_written(out)


def _files_of(answer: Answer) -> Mapping[str, str]:
    """Return the text of the files that start the job, by name. Raises `PlanError`: not a search over jobs."""
    if answer.folder is None:
        raise PlanError(
            "--out FOLDER is for the search over jobs. Give a file, .json or .html, or leave --lengths, --parallel "
            "full and options of one schedule out."
        )
    return answer.folder()


class _ScheduleOptions:
    """Options that only a search for one schedule takes, so that they rule out other kinds of jobs."""

    def __init__(
        self, scenario: Scenario, layout: str | None, token_unit: int, planner: str | None, lengths: str | None
    ) -> None:
        self._workload = scenario.workload
        self._layout, self._token_unit = layout, token_unit
        self._planner, self._lengths = planner, lengths
        self._cost_model = scenario.cost_model

    @property
    def are_used(self) -> bool:
        """Whether any of them is used."""
        return (
            self._layout is not None
            or self._token_unit != 1
            or self._planner is not None
            or self._cost_model != "calibrated"
        )

    def check(self, parallel: str) -> None:
        """Refuse combinations that no search takes. Raises `click.UsageError`, which names the options."""
        work = self._workload
        if parallel == FULL:
            if (work.micro_batch, work.micro_batches, self._layout, self._token_unit, self._lengths) != (
                1,
                1,
                None,
                1,
                None,
            ):
                raise click.UsageError(
                    "--parallel full chooses micro-batches, layouts and tokens itself. Leave --micro-batch, "
                    "--micro-batches, --layout, --token-unit and --lengths out."
                )
        elif self._lengths is not None and (self._layout, self._token_unit) != (None, 1):
            raise click.UsageError("--lengths chooses layouts and tokens itself. Leave --layout and --token-unit out.")
        elif parallel not in (BEST, SEQUENCE) and (self.are_used or self._lengths is not None):
            raise click.UsageError(
                "--layout, --token-unit, --planner, --lengths and --cost-model are for schedules of sequence "
                f"parallelism. Leave them out, or leave --parallel {parallel} out."
            )
        if self._planner is not None and (self._lengths is not None or self._token_unit != 1):
            raise click.UsageError("--planner takes neither --lengths nor --token-unit. Leave them or --planner out.")


def _batch_of_full(global_batch: int | None) -> int:
    """Return ``--global-batch`` of ``--parallel full``. Raises `PlanError`: it is missing."""
    if global_batch is None:
        raise PlanError("--parallel full shares the samples of a step among pipelines. Give --global-batch.")
    return global_batch


def _batch_of_step(scenario: Scenario, global_batch: int | None, fixed: frozenset[str]) -> int:
    """Return the sequences of a step, by ``--global-batch``, or by ``--micro-batch`` and ``--micro-batches``."""
    work = scenario.workload
    if global_batch is None:
        return work.micro_batch * work.micro_batches
    if "micro_batches" in fixed:
        raise click.UsageError("--global-batch and --micro-batches both say how many sequences a step has. Give one.")
    expect_whole_number("global_batch", global_batch, 1, MAX_BATCH, PlanError)
    return global_batch


def _front(
    scenario: Scenario,
    parallel: str,
    global_batch: int | None,
    out: Path | None,
    as_json: bool,
    *,
    is_restricted: bool,
) -> None:
    """Search for the Pareto front of time, money and energy.

    Args:
        is_restricted: whether the options name a planner or a longest step, which the front does not take.
    """
    if parallel != FULL or is_restricted:
        raise click.UsageError(
            "--objective pareto is for --parallel full, without --at-most-s and --planner. "
            "Give --parallel full and leave the other two out, or choose another objective."
        )
    from ds_hetero.cli.planning.pareto import show_front

    show_front(scenario, _batch_of_full(global_batch), out, as_json=as_json)
