"""``ds-hetero trace``: the predicted step, and the measured one beside it, as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ds_hetero.cli.printing import print_json, print_written, write_out
from ds_hetero.cli.showing.report import plan_and_run, read_both
from ds_hetero.reporting.trace import trace_of


@click.command
@plan_and_run("Trace to write, .json.")
def trace(plan: Path, out: Path, run: Path | None, as_json: bool) -> None:
    """Write the predicted step of PLAN as a trace for Perfetto; with --run the measured one beside it."""
    content = trace_of(*read_both(plan, run, out, ".json"))
    write_out(out, json.dumps(content, allow_nan=False))
    if as_json:
        print_json({"out": str(out), "events": len(content["traceEvents"])})
    else:
        print_written(out, "; open it in Perfetto or chrome://tracing")
