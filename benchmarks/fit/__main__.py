"""Measure how well `ds-hetero fit` predicts memory, and whether its advice helps.

    python -m benchmarks.fit [--cases 0 3 ...] [--no-limit] [--json] [--output FILE]

Ten pairs of a model and a schedule train behind DeepSpeed on gloo ranks, and the same ten with adapters beside frozen
weights, every other one in 4 bits. The peak of torch's allocator on every rank is compared with the estimate. Then a
job runs under a real memory limit, fails, and runs again as the advice says.

The exit code is 0 if every rank is within `TARGETS` and the advice made the job fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fit.cases import CASES
from benchmarks.fit.limit import follow_advice
from benchmarks.fit.training import Case, measure
from benchmarks.measure.ranks import LOOPBACK, run
from benchmarks.measure.results import FOLDER, header, progress, write
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost import make_cost_model
from ds_hetero.values.schedule import Schedule

RESULT = FOLDER / "fit.json"
TARGETS = {"all weights": 0.10, "adapters": 0.05}  # by what is trained


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers of pairs")
    parser.add_argument("--no-limit", action="store_true", help="leave the job under a limit out")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if any(not 0 <= number < len(CASES) for number in args.cases):
        parser.error(f"--cases takes numbers from 0 to {len(CASES) - 1}")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # in the ranks: what is freed leaves the process at once
    rows: list[dict[str, Any]] = []
    with progress(Console(stderr=True)) as report:
        for done, number in enumerate(args.cases):
            report(done / (len(args.cases) + 1), CASES[number].name)
            rows += _rows(CASES[number])
        report(len(args.cases) / (len(args.cases) + 1), "a job under a limit")
        limited = None if args.no_limit else follow_advice()
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["trained"], []).append(abs(row["predicted_bytes"] / row["measured_bytes"] - 1))
    result = {
        **header(" ".join(["python -m benchmarks.fit", *sys.argv[1:]])),
        "rows": rows,
        "errors": {
            trained: {"median": median(errors_of_kind), "worst": max(errors_of_kind)}
            for trained, errors_of_kind in errors.items()
        },
        "limit": limited,
    }
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    followed = limited is None or (not limited["before"]["finished"] and limited["after"]["finished"])
    met = all(errors_of_kind["worst"] <= TARGETS[trained] for trained, errors_of_kind in result["errors"].items())
    return 0 if met and followed else 1


def _rows(case: Case) -> list[dict[str, Any]]:
    """Return prediction and measurement of every rank."""
    peaks = run(measure, [LOOPBACK] * case.num_ranks, asdict(case))
    cluster = cluster_from_dict({"nodes": [{"name": "host", "device": "CPU", "count": case.num_ranks}]})
    cost = make_cost_model("calibrated", cluster, case.spec, case.workload)
    parts = cost.memory_parts(*cost.arrays(Schedule.from_dict(case.schedule)))
    return [
        {
            "case": case.name,
            "trained": "adapters" if case.adapter_rank else "all weights",
            "rank": rank,
            "measured_bytes": peak,
            "predicted_bytes": float(parts.total[rank]),
            "parts": asdict(parts.of_rank(rank)),
        }
        for rank, peak in enumerate(peaks)
    ]


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(
        "pair", "rank", "measured MiB", "predicted MiB", "error", title="Most memory that a rank holds in a step"
    )
    for row in result["rows"]:
        measured, predicted = row["measured_bytes"], row["predicted_bytes"]
        cells = f"{measured / 2**20:.0f}", f"{predicted / 2**20:.0f}", f"{predicted / measured - 1:+.1%}"
        table.add_row(row["case"], str(row["rank"]), *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for trained, error in result["errors"].items():
        print(f"{trained}: median {error['median']:.1%}, worst {error['worst']:.1%} (at most {TARGETS[trained]:.0%})")
    if limited := result["limit"]:
        print(f"under a limit of {limited['limit_bytes'] / 2**20:.0f} MiB: {limited['before']['end']}")
        print(f"after the advice ({limited['advice']}): {limited['after']['end']}")


if __name__ == "__main__":
    sys.exit(main())
