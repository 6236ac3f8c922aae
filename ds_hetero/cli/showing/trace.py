"""``ds-hetero trace``: writes the predicted step, and beside it the measured one, as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ds_hetero.cli.options import FILE
from ds_hetero.cli.printing import check_out, print_json, print_written, write_out
from ds_hetero.cli.showing.report import plan_and_run, read_both
from ds_hetero.cluster.files import load_cluster
from ds_hetero.reporting.recorded_step import read_recorded_step, trace_of_record
from ds_hetero.reporting.trace import trace_of


@click.command
@plan_and_run("Trace to write, .json.", required=False)
@click.option(
    "--from-code",
    type=FILE,
    help="Step of the real code, recorded on GPUs that do not exist by python -m benchmarks.fake_gpu.played record, "
    "instead of PLAN: its operations and messages with their predicted times.",
)
@click.option("--cluster", help="On which that step is played; left out, the one for which it was planned.")
def trace(
    plan: Path | None, run: Path | None, from_code: Path | None, cluster: str | None, out: Path, as_json: bool
) -> None:
    """Write the predicted step of PLAN as a trace for Perfetto; with --run the measured one beside it."""
    if (plan is None) == (from_code is None) or (from_code is None and cluster is not None) or (from_code and run):
        raise click.UsageError("give PLAN, with or without --run, or --from-code, with or without --cluster.")
    if from_code is not None:
        check_out(out, endings=(".json",))
        content = trace_of_record(read_recorded_step(from_code), None if cluster is None else load_cluster(cluster))
    else:
        assert plan is not None
        content = trace_of(*read_both(plan, run, out, ".json"))
    write_out(out, json.dumps(content, allow_nan=False))
    if as_json:
        print_json({"out": str(out), "events": len(content["traceEvents"])})
    else:
        print_written(out, "; open it in Perfetto or chrome://tracing")
