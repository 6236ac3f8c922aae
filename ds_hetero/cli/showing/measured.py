"""``ds-hetero measured``: prints what a run or a self-test measured as rows of ``measurements.csv``."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import print_json
from ds_hetero.reporting.measured_row import ATTENTION, COLUMNS, OPTIMIZERS, measured_row, read_report, selftest_rows
from ds_hetero.reporting.run_file import read_run


@click.command
@click.argument("run", type=FILE)
@click.option("--attention", type=click.Choice(list(ATTENTION)), help="Kernel of attention that the job ran.")
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZERS)), help="That the job ran; left out, by its bytes of state."
)
@click.option("--source", default="a run of ds_hetero", help="Who measured it, or where it is printed.")
@click.option("--header", is_flag=True, help="Print the columns above the row.")
@AS_JSON
def measured(run: Path, attention: str | None, optimizer: str | None, source: str, header: bool, as_json: bool) -> None:
    """Turn RUN, the run.json of a job or the JSON of a self-test, into rows of measurements.csv, to be judged by."""
    report = read_report(run)
    if report is None:
        rows = [measured_row(read_run(run), attention=attention, optimizer=optimizer, source=source)]
    elif attention or optimizer:
        raise click.UsageError(
            "--attention and --optimizer describe a job, and a self-test has neither. Leave them out."
        )
    else:
        rows = selftest_rows(report, source=source)
    if as_json:
        print_json(rows[0] if report is None else {"rows": rows})
        return
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    print(out.getvalue(), end="")
