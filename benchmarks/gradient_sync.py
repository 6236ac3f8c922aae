"""Measure the cost of synchronizing gradients between replicas that shard their layers differently.

    python -m benchmarks.gradient_sync [--json] [--degrees 1,1,1 1,2 1,2,4] [--link 1gbit] [--output FILE]

Every rank is a node of its own. Each entry of ``--degrees`` is a job with one replica per number, which torch's tensor
parallelism shards over that many ranks. These bytes of a step are counted for every rank:

    ring      sent by ring reduce-scatter and all-gather if all replicas were sharded like the rank's own
    sent      given to torch's communication operators by `AsymmetricGradientSync`
    wire      sent by the rank's network device meanwhile, with headers and acknowledgements

For comparison the wire's bytes of DDP's algorithm are counted, an all-reduce of the same gradients among equal
replicas. Then steps whose communication overlaps the backward alternate with steps whose communication follows it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.emulation.network import emulate
from benchmarks.emulation.relay import DEVICE
from benchmarks.measure.ranks import Report, run
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.measure.statistics import compare
from benchmarks.measure.traffic import Traffic
from ds_hetero.gradient_sync import AsymmetricGradientSync, tensor_parallel_layouts
from ds_hetero.gradient_sync.shards import local_tensor

RESULT = FOLDER / "gradient_sync.json"
LINKS = {"1gbit": 1e9, "10gbit": 1e10}
BUCKET_BYTES = 2 * 2**20
_DELAY_S = 100e-6
_BYTES = ("held_bytes", "ring_bytes", "sent_bytes", "wire_bytes")
_WHEN = ("under", "after")  # the backward


def ring_reduce_scatter_elements(held: int, replicas: int) -> float:
    """Return the elements that a rank sends in a ring reduce-scatter of ``held`` elements over ``replicas`` copies.

    It sends (R - 1) / R of them, in R - 1 steps of 1 / R each (Patarasu and Yuan, doi:10.1016/j.jpdc.2008.09.002). No
    algorithm sends fewer, summed over ranks: every copy but the owner's leaves its rank once. An all-gather sends as
    many. An all-reduce, by a ring or by recursive halving and doubling, is one after the other. An all-reduce by a
    binary tree sends all elements up and down each edge: 2 (R - 1) times ``held`` in total, the same.
    """
    return held * (replicas - 1) / replicas


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--degrees", nargs="+", default=["1,1,1", "1,2", "1,2,4"], help="of each job's replicas")
    parser.add_argument("--link", choices=sorted(LINKS), default="1gbit")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a replica's batch")
    parser.add_argument("--pairs", type=int, default=15, help="of steps")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = []
    with Progress(console=Console(stderr=True)) as progress:
        for text in args.degrees:
            degrees = [int(degree) for degree in text.split(",")]
            task = progress.add_task(f"replicas of {text} ranks", total=args.pairs + 2)
            with emulate(nodes=sum(degrees), rate_bit_per_s=LINKS[args.link], delay_s=_DELAY_S) as network:
                by_rank = run(
                    *(_measure, network.nodes, degrees, args.hidden, args.layers, args.tokens, args.pairs),
                    on_report=lambda done, now, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                )
                jobs.append({"degrees": degrees, "network": network.to_dict(), "link": network.describe()})
            jobs[-1] |= _summary(by_rank)
            progress.update(task, completed=args.pairs + 2)
    result = {
        **header(" ".join(["python -m benchmarks.gradient_sync", *sys.argv[1:]])),
        "settings": {name: getattr(args, name) for name in ("link", "hidden", "layers", "tokens", "pairs")},
        "jobs": jobs,
    }
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0


def _summary(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counted bytes of every rank, and the comparison of steps with and without overlap.

    A step takes as long as on its slowest rank.
    """
    overlapped, after = (
        [max(times) for times in zip(*(r[k] for r in by_rank), strict=True)] for k in ("under", "after")
    )
    return {
        "ranks": [{name: r[name] for name in r if name not in ("under", "after")} for r in by_rank],
        "overlap": asdict(compare(after, overlapped)),
    }


def _show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(
        *("degrees", "rank", "holds", "ring", "sent", "sent / ring", "wire", "wire / ring"),
        title="MiB of one step, to owners and back to holders",
    )
    for job in result["jobs"]:
        degrees = ",".join(map(str, job["degrees"]))
        for rank, counts in enumerate(job["ranks"]):
            table.add_row(degrees, str(rank), *_cells(counts))
        total = {name: sum(counts[name] for counts in job["ranks"]) for name in _BYTES}
        table.add_row(degrees, "all", *_cells(total))
        if job["ranks"][0]["all_reduce_wire_bytes"]:
            wire = sum(counts["all_reduce_wire_bytes"] for counts in job["ranks"])
            ours = _cells(total)
            table.add_row(
                degrees, "all", ours[0], ours[1], "DDP", "", f"{wire / 2**20:.2f}", f"{wire / total['ring_bytes']:.4f}"
            )
        table.add_section()
    console.print(table)
    for job in result["jobs"]:
        overlap, first = job["overlap"], job["ranks"][0]
        console.print(
            f"degrees {job['degrees']}: step {overlap['peer_s']:.3f} s with communication after the backward, "
            f"{overlap['ours_s']:.3f} s under it: {overlap['ratio']:.3f} times as fast "
            f"({overlap['interval'][0]:.3f} to {overlap['interval'][1]:.3f}); on rank 0 {first['buckets_under']} of "
            f"{first['buckets']} buckets leave before the backward ends, the first after "
            f"{first['first_leaves_after']:.0%} of it. {job['link']}"
        )


def _cells(counted: dict[str, int]) -> list[str]:
    """Return the cells of one rank's row: bytes in MiB, and bytes over those of the ring."""
    held_bytes, ring, sent, wire = (counted[name] for name in _BYTES)
    return [
        *(f"{held_bytes / 2**20:.2f}", f"{ring / 2**20:.2f}", f"{sent / 2**20:.2f}", f"{sent / ring:.4f}"),
        *(f"{wire / 2**20:.2f}", f"{wire / ring:.4f}"),
    ]


# --- on a rank --------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A transformer block that torch's tensor parallelism can shard."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _measure(
    rank: int, report: Report, degrees: Sequence[int], hidden: int, layers: int, tokens: int, pairs: int
) -> dict[str, Any]:
    """Count and time the steps of one job on this rank."""
    replicas = [range(stop - degree, stop) for degree, stop in zip(degrees, accumulate(degrees), strict=True)]
    meshes = [DeviceMesh("cpu", torch.tensor(list(ranks))) for ranks in replicas]
    replica_index = next(i for i, ranks in enumerate(replicas) if rank in ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(hidden) for _ in range(layers)))
    plan = {f"{layer}.{name}": style for layer in range(layers) for name, style in _styles().items()}
    parallelize_module(model, meshes[replica_index], plan)
    parameters = dict(model.named_parameters())
    sync = AsymmetricGradientSync(
        parameters, tensor_parallel_layouts(parameters, replicas[replica_index]), bucket_bytes=BUCKET_BYTES
    )
    optimizer = torch.optim.AdamW(sync.owned.values(), lr=1e-3)
    batch = torch.randn(tokens, hidden)

    def step(under: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        sync.start(tokens)
        with nullcontext() if under else sync.no_sync(), record_function("the backward"):
            model(batch).square().mean().backward()
        sync.finish()
        optimizer.step()
        sync.gather()
        return time.perf_counter() - start

    step(True)  # communicators connect
    counts = _count(model, batch, sync)
    held_elements = sum(local_tensor(parameter).numel() for parameter in parameters.values())
    counts |= {
        "held_bytes": held_elements * 4,
        "ring_bytes": round(2 * 4 * ring_reduce_scatter_elements(held_elements, len(degrees))),
        "all_reduce_wire_bytes": _wire_of(lambda: dist.all_reduce(torch.ones(held_elements)))
        if set(degrees) == {1}
        else None,
    }
    report(1, "counted")
    counts |= _trace(step)
    times: dict[str, list[float]] = {name: [] for name in _WHEN}
    for pair in range(pairs):
        for name in _WHEN[:: 1 - 2 * (pair % 2)]:
            times[name].append(step(name == "under"))
        report(pair + 2, "steps")
    return counts | times


def _styles() -> dict[str, Any]:
    """Return the plan of torch's tensor parallelism for a `_Block`."""
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _count(model: nn.Module, batch: torch.Tensor, sync: AsymmetricGradientSync) -> dict[str, int]:
    """Return the bytes of the synchronization alone, which starts after the backward's own messages."""
    with sync.no_sync():
        model(batch).square().mean().backward()
    with Traffic() as traffic:
        wire = _wire_of(lambda: (sync.finish(), sync.gather()))
    return {"sent_bytes": traffic.sent_bytes.total(), "wire_bytes": wire}


def _wire_of(act: Callable[[], Any]) -> int:
    """Return the bytes that this rank's network device sends while ``act`` runs on all ranks, less those of idling."""

    def sent() -> int:
        dist.barrier()
        time.sleep(0.2)  # acknowledgements that TCP delayed
        line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if DEVICE in line)
        return int(line.split(":")[1].split()[8])

    before = sent()
    barrier = sent() - before
    before = sent()
    act()
    return sent() - before - barrier


def _trace(step: Callable[[bool], float]) -> dict[str, Any]:
    """Return by torch's profiler how many buckets a step sends, how many under the backward, and when the first one."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(True)
    events = profiler.events()
    (backward,) = [event.time_range for event in events if event.name == "the backward"]
    starts = [event.time_range.start for event in events if event.name.startswith("ds_hetero: gradients")]
    return {
        "buckets": len(starts),
        "buckets_under": sum(start < backward.end for start in starts),
        "first_leaves_after": (min(starts) - backward.start) / (backward.end - backward.start),
    }


if __name__ == "__main__":
    sys.exit(main())
