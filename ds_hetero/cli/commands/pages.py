"""Commands that make files for people out of a plan and of what a job measured that ran it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE

__all__ = ["report", "trace"]


def _of_a_plan(out_help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Take a plan, a run of it, the file to write and ``--json``."""
    plan = click.argument("plan", type=FILE)
    run = click.option("--run", type=FILE, help="run.json of a job that ran the plan.")
    out = click.option("--out", type=FILE, required=True, help=out_help)
    return lambda function: plan(out(run(AS_JSON(function))))


@click.command
@_of_a_plan("Page to write, .html.")
def report(plan: Path, out: Path, run: Path | None, as_json: bool) -> None:
    """Make one HTML page of PLAN, as plan --out or plan --json wrote it, and of what a job measured that ran it."""
    from ds_hetero.cli import report as command

    command.run(plan, run, out, as_json)


@click.command
@_of_a_plan("Trace to write, .json.")
def trace(plan: Path, out: Path, run: Path | None, as_json: bool) -> None:
    """Write the predicted step of PLAN as a trace for Perfetto; with --run the measured one beside it."""
    from ds_hetero.cli import trace as command

    command.run(plan, run, out, as_json)
