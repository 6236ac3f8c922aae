"""How much memory one attention layer takes at its peak, against the engines that know nothing but equal shares.

    python -m benchmarks.memory [--json] [--ranks 2 4] [--tokens 1024 4096] [--output FILE]

Forward and backward of one layer on every rank. Bytes are those that torch's CPU allocator hands out, counted by its
profiler, temporaries inside operators included; what exists before the forward (q, k, v and the gradient of the output)
is not counted. What gloo allocates by itself is not seen, for any contender. Exit code 1 if the engine takes more than
stock Ulysses anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median_low
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import CONTESTS, Shape, make_contender
from benchmarks.machine import describe_machine
from benchmarks.ranks import LOOPBACK, Report, run

RESULT = Path(__file__).parent / "results" / "memory.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    cases = [(ranks, tokens, contest) for ranks in args.ranks for tokens in args.tokens for contest in CONTESTS]
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        for ranks, tokens, contest in progress.track(cases, description="peak memory"):
            measured = run(_measure, [LOOPBACK] * ranks, contest, tokens)
            peer, ours = (max(bytes_of_rank[i] for bytes_of_rank in measured) for i in range(2))
            names = dict(zip(("peer", "ours"), CONTESTS[contest], strict=True))
            rows.append({**names, "ranks": ranks, "tokens": tokens, "peer_bytes": peer, "ours_bytes": ours})
    result = {
        "command": " ".join(["python -m benchmarks.memory", *sys.argv[1:]]),
        "machine": describe_machine(),
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print(json.dumps(result))
    else:
        _show(rows)
    return 0 if all(row["ours_bytes"] <= row["peer_bytes"] for row in rows if row["peer"] == "stock") else 1


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "peer", "ours", "ranks", "tokens", "peer, MiB", "ours, MiB", "ours / peer", title="Peak of the fullest rank"
    )
    for row in rows:
        peer, ours = row["peer_bytes"], row["ours_bytes"]
        numbers = (
            f"{row['ranks']}",
            f"{row['tokens']}",
            f"{peer / 2**20:.2f}",
            f"{ours / 2**20:.2f}",
            f"{ours / peer:.3f}",
        )
        table.add_row(row["peer"], row["ours"], *numbers)
    Console().print(table)


def _measure(rank: int, report: Report, contest: str, tokens: int) -> tuple[int, ...]:
    """Peak bytes of each contender on this rank, forward and backward."""
    peaks = []
    for name in CONTESTS[contest]:
        layer = make_contender(name, Shape()).layer(Shape(), tokens)
        layer()  # the first run allocates what is kept for good
        dist.barrier()
        peaks.append(_peak_bytes(layer))
    return tuple(peaks)


def _peak_bytes(work: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    sys.exit(main())
