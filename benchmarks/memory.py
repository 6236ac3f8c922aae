"""Measure the peak memory of one attention layer, and compare it with engines of equal shards.

    python -m benchmarks.memory [--json] [--ranks 2 4] [--tokens 1024 4096] [--output FILE]

Forward and backward of one layer run on every rank. Tensors that exist before the forward (q, k, v and the gradient of
the output) are not counted; outputs and gradients are. The peak is measured in two ways:

    allocated  allocations and releases of torch's CPU allocator, by its profiler, with temporaries of operators. A
               release by one of gloo's threads is not seen, which can only raise the result: the least of several
               runs is shown
    resident   increase of the process's largest resident memory, with gloo's buffers; pages that were never touched do
               not count. The median of several runs is shown

The exit code is 1 if the engine allocates more than stock Ulysses in any case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.allocations import peak_allocations
from benchmarks.measure.contenders import CONTESTS, Layer, Shape, make_contender
from benchmarks.measure.ranks import LOOPBACK, Report, run
from benchmarks.measure.results import FOLDER, header, write

RESULT = FOLDER / "memory.json"
_REPEATS = 5
_KINDS = ("bytes", "resident_bytes")


def main() -> int:
    """Run the command; return 1 if the engine allocates more than stock Ulysses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # in the ranks: what is freed leaves the process at once
    cases = [(ranks, tokens, contest) for ranks in args.ranks for tokens in args.tokens for contest in CONTESTS]
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        for ranks, tokens, contest in progress.track(cases, description="peak memory"):
            measured = run(_measure, [LOOPBACK] * ranks, contest, tokens)
            row = {"ranks": ranks, "tokens": tokens}
            for who, name in zip(("peer", "ours"), CONTESTS[contest], strict=True):
                row |= {who: name}
                row |= {f"{who}_{kind}": max(of_rank[name][kind] for of_rank in measured) for kind in _KINDS}
            rows.append(row)
    result = {
        **header(" ".join(["python -m benchmarks.memory", *sys.argv[1:]])),
        "rows": rows,
    }
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(rows)
    return 0 if all(row["ours_bytes"] <= row["peer_bytes"] for row in rows if row["peer"] == "stock") else 1


def _show(rows: list[dict[str, Any]]) -> None:
    """Print the peaks of both contenders, and their ratios."""
    table = Table(
        *("peer", "ours", "ranks", "tokens", "allocated, MiB", "ours / peer", "resident, MiB", "ours / peer"),
        title="Peak of the fullest rank: peer / ours",
    )
    for row in rows:
        cells = []
        for kind in _KINDS:
            peer, ours = row[f"peer_{kind}"], row[f"ours_{kind}"]
            cells += [f"{peer / 2**20:.2f} / {ours / 2**20:.2f}", f"{ours / peer:.3f}"]
        table.add_row(row["peer"], row["ours"], str(row["ranks"]), str(row["tokens"]), *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


# --- on a rank --------------------------------------------------------------------------------------


def _measure(rank: int, report: Report, contest: str, tokens: int) -> dict[str, dict[str, int]]:
    """Return peak bytes by contender and way of measuring."""
    peaks = {}
    for name in CONTESTS[contest]:
        layer = make_contender(name, Shape()).layer(Shape(), tokens)
        layer()  # the first run allocates what is kept for good
        gc.collect()
        gc.freeze()  # what DeepSpeed and transformers loaded is not searched again
        allocated = peak_allocations(layer, _REPEATS, partial(_settle, layer))
        peaks[name] = {"bytes": min(allocated), "resident_bytes": median_low(_resident(layer))}
    return peaks


def _resident(layer: Layer) -> list[int]:
    """Return the increase of resident memory during a forward and backward, in bytes, of every repetition."""
    rises = []
    for _ in range(_REPEATS):
        _settle(layer)
        Path("/proc/self/clear_refs").write_text("5")  # lowers the high-water mark to what is resident now
        before = _status_bytes("VmRSS")
        layer()
        rises.append(_status_bytes("VmHWM") - before)
    return rises


def _settle(layer: Layer) -> None:
    """Bring memory to its state before a layer runs: no gradients, no garbage, all ranks ready."""
    for x in layer.inputs:
        x.grad = None
    gc.collect()
    dist.barrier()


def _status_bytes(name: str) -> int:
    """Return a size from /proc/self/status in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
