"""``ds-hetero report``: a plan, and what a run of it measured, as one HTML page."""

from __future__ import annotations

from pathlib import Path

from ds_hetero.cli.printing import check_out, print_json, write_out
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.plan_page import describe_with_run, plan_page
from ds_hetero.reporting.run_file import RunFile, read_run

__all__ = ["read_both", "run"]


def run(plan: Path, run_file: Path | None, out: Path, as_json: bool) -> None:
    """Write the page."""
    described, measured = read_both(plan, run_file, out)
    page = plan_page(described, measured)
    write_out(out, page)
    if as_json:
        print_json({"out": str(out), "bytes": len(page.encode())})
    else:
        print(f"written to {out}")


def read_both(plan: Path, run_file: Path | None, out: Path) -> tuple[DescribedPlan, RunFile | None]:
    """Read a plan and a run of it, once it is known that ``out`` can be written.

    Raises:
        PlanError: ``out`` cannot be written, or the run is of another plan; see also the readers of both files.
    """
    check_out(out)
    measured = None if run_file is None else read_run(run_file)
    return describe_with_run(read_described_plan(plan), measured), measured
