"""``ds-hetero measured``: a run as a row of public measurements."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import print_json
from ds_hetero.reporting.measured_row import ATTENTION, COLUMNS, measured_row
from ds_hetero.reporting.run_file import read_run


@click.command
@click.argument("run", type=FILE)
@click.option("--attention", type=click.Choice(list(ATTENTION)), help="Kernel of attention that the job ran.")
@click.option("--source", default="a run of ds_hetero", help="Who measured it, or where it is printed.")
@click.option("--header", is_flag=True, help="Print the columns above the row.")
@AS_JSON
def measured(run: Path, attention: str | None, source: str, header: bool, as_json: bool) -> None:
    """Turn RUN, the run.json of a job, into a row of measurements.csv, which compares predictions with real cards."""
    row = measured_row(read_run(run), attention=attention, source=source)
    if as_json:
        print_json(row)
        return
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerow(row)
    print(out.getvalue(), end="")
