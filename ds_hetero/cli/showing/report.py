"""``ds-hetero report``: writes one HTML page of a plan, and of what a job that ran the plan measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import check_out, print_json, print_written, write_out
from ds_hetero.models.trained_weights import read_training
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.plan_page import plan_page, with_scenario_of_run
from ds_hetero.reporting.run_file import RunFile, read_run


def plan_and_run(out_help: str, *, required: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the arguments ``plan``, ``--run``, ``--out`` and ``--json`` to a command.

    Args:
        out_help: help text of ``--out``.
        required: whether the plan must be given.
    """
    plan = click.argument("plan", type=FILE, required=required)
    run = click.option("--run", type=FILE, help="run.json of a job that ran the plan.")
    out = click.option("--out", type=FILE, required=True, help=out_help)
    return lambda function: plan(out(run(AS_JSON(function))))


@click.command
@plan_and_run("Page to write, .html.")
@click.option("--train", help="full, lora[:rank] or qlora[:rank]: the same plan with these weights trained.")
@click.option("--sliders/--no-sliders", default=True, help="With answers for other lengths, links and cards.")
def report(plan: Path, out: Path, run: Path | None, train: str | None, as_json: bool, sliders: bool) -> None:
    """Make one HTML page of PLAN, as plan --out or plan --json wrote it, and of what a job measured that ran it."""
    if run is not None and train is not None:
        raise click.UsageError("--run already says which weights the job trained. Leave --train out.")
    described, measured = read_both(plan, run, out, ".html")
    if train is not None:
        work = replace(described.scenario.workload, **read_training(train)._asdict(), trains_embedding=False)
        described = replace(described, scenario=replace(described.scenario, workload=work))
    page = plan_page(described, measured, sliders)
    write_out(out, page)
    if as_json:
        print_json({"out": str(out), "bytes": len(page.encode())})
    else:
        print_written(out)


def read_both(plan: Path, run_file: Path | None, out: Path, ending: str) -> tuple[DescribedPlan, RunFile | None]:
    """Read a plan, and a run of it if there is one.

    Raises:
        PlanError: ``out`` cannot be written or has another ``ending``, or a file cannot be read.
    """
    check_out(out, endings=(ending,))
    measured = None if run_file is None else read_run(run_file)
    return with_scenario_of_run(read_described_plan(plan), measured), measured
