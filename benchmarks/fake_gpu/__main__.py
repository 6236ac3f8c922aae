"""Run whole training steps of models of real size on GPUs that do not exist: waits of the host, launches, memory.

    python -m benchmarks.fake_gpu [--quick] [--json] [--all-ranks] [--output FILE]

Each rank runs in its own process: the transformers model built from its config, this engine and DeepSpeed with ZeRO, on
a device whose tensors have no numbers (`benchmarks.fake_gpu.device`), with torch's fake process group in place of NCCL.
It does two or three optimizer steps: forward, backward with recomputations, optimizer. The last one counts.

    syncs_in_layers  waits of the host inside decoder layers, forward and backward
    syncs            other waits in a forward, by name
    mixtures         operators whose tensors are on several devices
    launches         of an attention layer, forward and backward, in rings, and beside stock Ulysses with equal shards
    experts          launches and waits of a layer of experts that are divided among ranks
    peak             bytes on the device by cause, in blocks of 512 bytes as CUDA's caching allocator allocates, and the
                     estimate of `ds-hetero fit`, which counts no towers for images

Without --all-ranks one rank of each share of tokens and heads runs. --quick runs two ranks of a model of four layers.
The exit code is 1 if a layer waits (divided experts: more than once), if devices mix, if a forward waits more than once
(twice if documents are read from its position ids, or if transformers counts the positions of images), or if a layer
launches more than 1.3 times as often as stock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fake_gpu.jobs import SETTINGS, Setting
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import as_completed

RESULT = FOLDER / "fake_gpu.json"
MOST_LAUNCHES, MOST_SYNCS = 1.3, 1
_QUICK_LAYERS = 4
EXPERT_SHARES = (3, 3, 1, 1)  # of four ranks that divide the experts of a layer
_RING_NAMES = ("ring of 8", "uneven ring of 8", "two unequal groups of 4", "groups of 6 and 2")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks of a model of four layers")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--all-ranks", action="store_true", help="every rank, and not one of each kind")
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--layers", type=int, help="layers of each model that run; left out, all")
    parser.add_argument("--processes", type=int, default=2, help="ranks that run at a time")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    settings = [s for s in (SETTINGS[:1] if args.quick else SETTINGS) if args.only in s.name]
    layers = _QUICK_LAYERS if args.quick else args.layers
    ranks = {s: sorted(s.schedule().ranks) if args.all_ranks else ranks_of_kinds(s) for s in settings}
    tasks = [(s, rank, layers) for s in settings for rank in ranks[s][: 2 if args.quick else None]]
    counts = [2, 8] if args.quick else [2, 4, 8]
    result = {
        **header(" ".join(["python -m benchmarks.fake_gpu", *sys.argv[1:]])),
        **_run(tasks, counts, args.processes),
    }
    if not args.quick:
        write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if passes(result) else 1


def passes(result: dict[str, Any]) -> bool:
    """Return whether every rank ran and all limits are kept."""
    rows = result["ranks"]
    return (
        not any("error" in row for row in rows)
        and not result["syncs_in_layers"]
        and not result["mixtures"]
        and all(row["syncs_in_forward"] <= MOST_SYNCS + row["reads_documents"] + row["has_images"] for row in rows)
        and all(row["ratio"] <= MOST_LAUNCHES for row in result["launches"])
        and sum(result["experts"]["syncs"].values()) <= MOST_SYNCS
        and not result["experts"]["mixtures"]
    )


def ranks_of_kinds(setting: Setting) -> list[int]:
    """Return the first rank with each number of tokens and of heads."""
    schedule = setting.schedule()
    tokens = schedule.tokens(setting.length)
    kinds: dict[Any, int] = {}
    for group in schedule.ring_groups:
        for rank in group.ranks:
            kinds.setdefault((tokens[rank], group.head_range(rank)[1] - group.head_range(rank)[0]), rank)
    return sorted(kinds.values())


def _run(tasks: list[tuple[Setting, int, int | None]], counts: list[int], processes: int) -> dict[str, Any]:
    """Run the ranks in processes; return their rows."""
    from benchmarks.fake_gpu.step import use_device

    use_device()  # and all imports, before processes are made
    calls = [
        *((_launches, count) for count in counts),
        *((_launches_of_ring, name) for name in _RING_NAMES),
        *((_rank_row, task) for task in tasks),
        (_launches_of_experts, EXPERT_SHARES),
    ]
    results: dict[int, dict[str, Any]] = {}
    with progress(Console(stderr=True)) as report:
        for index, result in as_completed(_called, calls, processes, start_method="fork"):
            results[index] = result
            report(len(results) / len(calls), result.get("job", "launches"))
    by_call = [results[index] for index in range(len(calls))]
    first_ring, first_rank = len(counts), len(counts) + len(_RING_NAMES)
    launches, in_rings, rows = by_call[:first_ring], by_call[first_ring:first_rank], by_call[first_rank:-1]
    experts = by_call[-1]
    mixtures = sorted({place for row in rows for place in row.get("mixture_places", ())})
    return {
        "syncs_in_layers": sum(row.get("syncs_in_layers", 0) for row in rows),
        "mixtures": len(mixtures),
        "mixture_places": mixtures,
        "launches": launches,
        "launches_in_rings": in_rings,
        "experts": experts,
        "peaks": {f"{row['job']}, rank {row['rank']}": row.get("peak_bytes") for row in rows},
        "ranks": rows,
    }


def _called(call: tuple[Callable[[Any], dict[str, Any]], Any]) -> dict[str, Any]:
    function, argument = call
    return function(argument)


def _launches(num_ranks: int) -> dict[str, Any]:
    from benchmarks.fake_gpu.launches import launches_per_layer

    return launches_per_layer(num_ranks)


def _launches_of_ring(name: str) -> dict[str, Any]:
    from benchmarks.fake_gpu.launches import launches_of_ring

    return launches_of_ring(name)


def _launches_of_experts(shares: tuple[int, ...]) -> dict[str, Any]:
    from benchmarks.fake_gpu.experts import launches_of_experts

    return launches_of_experts(shares)


def _rank_row(task: tuple[Setting, int, int | None]) -> dict[str, Any]:
    """Run one rank's step; return plain data, with an ``error`` and its place if it failed."""
    from benchmarks.fake_gpu.step import run_step

    setting, rank, layers = task
    started = time.perf_counter()
    row: dict[str, Any] = {
        "reads_documents": bool(setting.documents),
        "has_images": bool(setting.images),
        "job": setting.name,
        "rank": rank,
        "tokens": setting.schedule().tokens(setting.length)[rank],
    }
    try:
        record = run_step(setting.job(layers), rank)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    in_layers = [sync for sync in record.syncs if sync.layer is not None]
    outside = [sync for sync in record.syncs if sync.layer is None]
    return row | {
        "seconds": time.perf_counter() - started,
        "syncs_in_layers": len(in_layers),
        "sync_places_in_layers": dict(Counter(f"{sync.name} {sync.place}" for sync in in_layers)),
        "syncs_in_forward": sum(sync.phase == "forward" for sync in outside),
        "sync_places": dict(Counter(f"{sync.phase}: {sync.name} {sync.place}" for sync in outside)),
        "mixture_places": record.mixtures,
        "launches": len(record.operations),
        "launches_by_cause": dict(Counter(operation.cause for operation in record.operations).most_common()),
        "resting_bytes": record.resting,
        "peak_bytes": record.peak,
        "fit_bytes": None if setting.images else setting.fit_bytes(rank, layers),
        "peak_by_cause": {cause: size for cause, size in sorted(record.at_peak.items(), key=lambda x: -x[1]) if size},
        "allocated_by_cause": dict(record.allocated.most_common()),
    }


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(
        "job", "rank", "tokens", "syncs in layers", "of a forward", "launches", "peak, GiB", "largest causes, GiB"
    )
    for row in result["ranks"]:
        if "error" in row:
            table.add_row(row["job"], str(row["rank"]), f"{row['tokens']:,}", "", "", "", "", row["error"])
            continue
        causes = ", ".join(f"{cause} {size / 2**30:.2f}" for cause, size in list(row["peak_by_cause"].items())[:4])
        cells = (row["syncs_in_layers"], row["syncs_in_forward"], row["launches"])
        peak = f"{row['peak_bytes'] / 2**30:.2f}"
        if row["fit_bytes"] is not None:
            peak += f" ({row['fit_bytes'] / row['peak_bytes'] - 1:+.1%})"
        table.add_row(row["job"], str(row["rank"]), f"{row['tokens']:,}", *map(str, cells), peak, causes)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    kinds = ("sync_places", "sync_places_in_layers")
    places = Counter(place for row in result["ranks"] for kind in kinds for place in row.get(kind, ()))
    for place, count in sorted(places.items()):
        print(f"waits in {count} of {len(result['ranks'])} ranks: {place}")
    for row in result["launches"]:
        counts = f"{row['ours']} launches per attention layer, stock {row['stock']}"
        print(f"{row['ranks']} ranks: {counts}: {row['ratio']:.2f}")
    for row in result["launches_in_rings"]:
        print(f"{row['ring']}: {row['forward']} launches forward, {row['backward']} backward per attention layer")
    row = result["experts"]
    print(
        f"divided experts of {row['ranks']} ranks: {row['forward']} launches forward, {row['backward']} backward per "
        f"layer; waits: {', '.join(row['syncs'])}"
    )
    print(f"syncs in layers: {result['syncs_in_layers']}, mixtures of devices: {result['mixtures']}")


if __name__ == "__main__":
    sys.exit(main())
