r"""A document over two nodes of two ranks: one ring over all ranks, against from node to node and round inside them.

    python -m benchmarks.documents routes --link 0.5       # about two minutes

One attention layer, forward and backward, by turns in the same processes. The ranks of a node share its link, so that
what is measured is the gain of fewer bytes between nodes and of longer hiding, not that of several interfaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.documents.wire import counted_bytes, planned_bytes
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, emulate
from benchmarks.measure.contenders import Contender, Shape
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.turns import take_turns
from ds_hetero.runtime.attention import kernels
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Lane, Placement, Rows
from ds_hetero.values.plans import Plan
from ds_hetero.values.splits import share

NODES = (0, 0, 1, 1)
ONE_RING, BY_NODES = "one ring over all ranks", "from node to node"
CORES = 0.85  # of all ranks together: more, and ranks compete with their communication threads


def measure(lab: RankLab, tokens: int, rounds: int, budget_s: float) -> dict[str, Any]:
    """Both ways by turns, on one rank; equal on all but for the seconds."""
    shape, schedule = Shape(), ring(len(NODES), Shape.num_heads, Shape.num_kv_heads)
    replica = make_replica(Plan.of_replicas([schedule]))
    spec = AttentionSpec(kernels.select(torch.device("cpu"), torch.float32, shape.head_dim, None, None))
    held = share(tokens, [1] * len(NODES))
    lane = Lane(members=tuple(range(len(NODES))), spans=((0, tokens),), tokens=(held,), layout="zigzag")
    plain = Placement(
        schedule=schedule, length=tokens, rank_tokens=held, lanes=(lane,), rows=(Rows(0, 1, ((0, tokens),)),)
    )
    placements = {ONE_RING: plain, BY_NODES: replace(plain, lanes=(replace(lane, nodes=NODES),))}
    actions: dict[str, Callable[[], object]] = {}
    wire = {}
    for name, placement in placements.items():
        layout, mine = batch_layout(placement, placement.rows), placement.positions(lab.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor, layout=layout) -> Tensor:  # type: ignore[no-untyped-def]
            return attention(q, k, v, replica, layout, spec).flatten(2)

        actions[name] = Contender(name, lambda length, mine=mine: mine, attend).layer(shape, tokens)  # type: ignore[misc]
        wire[name] = {
            "counted": counted_bytes(actions[name], NODES),
            "planned": planned_bytes(placement, shape, NODES),
        }
    dist.barrier()
    turns = take_turns(actions, rounds, budget_s, lab.own_pids)
    return {"seconds": turns.seconds, "bytes": wire, "foreign_cores": turns.foreign_cores, "text": lab.describe()}


def main(words: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents routes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--link", type=float, default=0.5, help="Gbit/s of each node's link; 0: loopback")
    parser.add_argument("--tokens", type=int, default=8192, help="of the document")
    parser.add_argument("--rounds", type=int, default=20, help="turns of both at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all turns")
    parser.add_argument("--output", type=Path, default=FOLDER / "documents_routes.json", help="the result file")
    options = parser.parse_args(words)
    link = options.link * 1e9 or None
    nodes = tuple(EmulatedNode(speeds=(1.0, 1.0), link_bit_per_s=link) for _ in range(2))
    console = Console(stderr=True)
    with (
        progress(console) as report,
        emulate(EmulatedCluster(nodes=nodes, fastest_cores=CORES / len(NODES) * 2)) as emulated,
    ):
        arguments = (options.tokens, options.rounds, options.budget)
        result = emulated.run(measure, *arguments, on_report=report)[0]
    result = {**header(" ".join(["python -m benchmarks.documents routes", *words])), "emulated": True, **result}
    result["medians_s"] = {name: median(seconds) for name, seconds in result["seconds"].items()}
    paired = [a / b for a, b in zip(result["seconds"][ONE_RING], result["seconds"][BY_NODES], strict=True)]
    result["over_one_ring"] = median(paired)
    write(json.loads(json.dumps(result)), options.output)
    table = Table(title=f"EMULATED: a document of {options.tokens:,} tokens over two nodes of two ranks, fp32")
    for column in ("way", "s", "over one ring", "inside nodes, counted / planned", "between nodes, counted / planned"):
        table.add_column(column)
    for name, seconds in result["medians_s"].items():
        counted, planned = result["bytes"][name]["counted"], result["bytes"][name]["planned"]
        cells = [f"{counted[kind]:,} / {planned[kind]:,.0f}" for kind in counted]
        gain = result["over_one_ring"] if name == BY_NODES else 1.0
        table.add_row(name, f"{seconds:.3f}", f"{gain:.2f}x", *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(result["text"], table, sep="\n")
    console.print(f"written to {options.output}")
