"""``ds-hetero trace``: the predicted step, and the measured one beside it, as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from ds_hetero.cli.printing import print_json, write_out
from ds_hetero.cli.report import read_both
from ds_hetero.reporting.trace import trace_of

__all__ = ["run"]


def run(plan: Path, run_file: Path | None, out: Path, as_json: bool) -> None:
    """Write the trace."""
    described, measured = read_both(plan, run_file, out)
    trace = trace_of(described, measured)
    write_out(out, json.dumps(trace, allow_nan=False))
    if as_json:
        print_json({"out": str(out), "events": len(trace["traceEvents"])})
    else:
        print(f"written to {out}; open it in Perfetto or chrome://tracing")
