"""Compare two routes of a document's KV over two nodes of two ranks: one ring over all ranks, or node to node first.

    python -m benchmarks.documents routes --link 0.5       # about two minutes
    python -m benchmarks.documents routes --link 0.1 --interfaces 1 2 --messages [--proxies]

In the second route KV goes from node to node, and around a ring inside each. One attention layer, forward and backward,
runs both alternately in the same processes. With one interface the ranks of a node share its link: measured is the gain
of fewer bytes between nodes, which are hidden for longer. With two interfaces each rank has one, and the bytes through
each are counted. With ``--messages`` nothing is computed, as if attention took no time: measured are the messages of
one long sequence, and how fast the interfaces carry them. With ``--proxies`` one rank of every node holds the document,
and the other one passes on a part of its blocks.
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
from ds_hetero.batch.tiles import Band
from ds_hetero.runtime.attention import kernels
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.kernels import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Lane, Placement, Rows
from ds_hetero.values.plans import Plan
from ds_hetero.values.splits import share

NODES = (0, 0, 1, 1)
ONE_RING, BY_NODES = "one ring over all ranks with tokens", "from node to node"
CORES = 0.85  # of all ranks together: more, and ranks compete with their communication threads


class _Nothing(TorchKernel):
    """A kernel that takes no time; its results are zeros."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        return q.new_zeros(()).expand(q.shape), q.new_zeros(()).expand(q.shape[:3])

    def backward(self, dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
        """Return zeros."""
        zero = dout.new_zeros(())
        return zero.expand(saved.q.shape), zero.expand(saved.k.shape), zero.expand(saved.v.shape)


def measure(lab: RankLab, tokens: int, rounds: int, budget_s: float, computes: bool, proxies: bool) -> dict[str, Any]:
    """Run both routes alternately on this rank; only seconds and the bytes of interfaces differ between ranks."""
    shape, schedule = Shape(), ring(len(NODES), Shape.num_heads, Shape.num_kv_heads)
    replica = make_replica(Plan.of_replicas([schedule]))
    kernel = kernels.select(torch.device("cpu"), torch.float32, shape.head_dim, None, None) if computes else _Nothing()
    spec = AttentionSpec(kernel)
    unit_tokens = share(tokens, [1, 0, 1, 0] if proxies else [1] * len(NODES))
    lane_of_all_nodes = Lane(
        members=tuple(range(len(NODES))), spans=((0, tokens),), tokens=(unit_tokens,), layout="zigzag"
    )
    holding = tuple(rank for rank in lane_of_all_nodes.members if unit_tokens[rank])
    lane = replace(lane_of_all_nodes, members=holding, tokens=(tuple(unit_tokens[rank] for rank in holding),))
    plain = Placement(
        schedule=schedule, length=tokens, rank_tokens=unit_tokens, lanes=(lane,), rows=(Rows(0, 1, ((0, tokens),)),)
    )
    by_nodes = replace(lane_of_all_nodes, nodes=NODES, proxies=proxies)
    placements = {ONE_RING: plain, BY_NODES: replace(plain, lanes=(by_nodes,))}
    actions: dict[str, Callable[[], object]] = {}
    wire = {}
    for name, placement in placements.items():
        layout, positions = batch_layout(placement, placement.rows), placement.positions(lab.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor, layout=layout) -> Tensor:  # type: ignore[no-untyped-def]
            return attention(q, k, v, replica, layout, spec).flatten(2)

        actions[name] = Contender(name, lambda length, positions=positions: positions, attend).layer(shape, tokens)  # type: ignore[misc]
        wire[name] = {
            "counted": counted_bytes(actions[name], NODES),
            "planned": planned_bytes(placement, shape, NODES),
        }
    sent = {name: _sent_by(action) for name, action in actions.items()}
    turns = take_turns(actions, rounds, budget_s, lab.own_pids)
    of_ranks: list[Any] = [None] * len(NODES)
    dist.all_gather_object(of_ranks, sent)
    interfaces = {name: [of_ranks[NODES.index(node)][name] for node in sorted(set(NODES))] for name in actions}
    return {
        "seconds": turns.seconds,
        "bytes": wire,
        "interfaces": interfaces,
        "foreign_cores": turns.foreign_cores,
        "text": lab.describe(),
    }


def _sent_by(action: Callable[[], object]) -> dict[str, int]:
    """Return the bytes that each interface of this node sends during one run of all ranks, with headers and retries."""
    dist.barrier()
    before = sent_by_interface()
    dist.barrier()
    action()
    dist.barrier()
    return {name: count - before[name] for name, count in sent_by_interface().items()}


def sent_by_interface() -> dict[str, int]:
    """Return the bytes sent so far by every interface of this node except loopback."""
    lines = (line.split(":") for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:])
    return {name.strip(): int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo"}


def main(words: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents routes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--link", type=float, default=0.5, help="Gbit/s of each interface; 0: loopback")
    parser.add_argument("--interfaces", type=int, nargs="+", default=[1], help="of every node, one after the other")
    parser.add_argument("--messages", action="store_true", help="compute nothing")
    parser.add_argument("--proxies", action="store_true", help="one rank of every node holds nothing and passes on")
    parser.add_argument("--tokens", type=int, default=8192, help="of the document")
    parser.add_argument("--rounds", type=int, default=20, help="turns of both at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all turns")
    parser.add_argument("--output", type=Path, default=FOLDER / "documents_routes.json", help="the result file")
    options = parser.parse_args(words)
    runs = [_run(options, count) for count in options.interfaces]
    result = {**header(" ".join(["python -m benchmarks.documents routes", *words])), "emulated": True, "runs": runs}
    write(json.loads(json.dumps(result)), options.output)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for run in runs:
        _show(run, options.tokens, console)
    first, last = runs[0], runs[-1]
    if len(runs) > 1:
        rates = [run["bit_per_s"][BY_NODES] for run in (first, last)]
        console.print(
            f"{BY_NODES}: {rates[0] / 1e9:.2f} Gbit/s leave a node by {first['interfaces_of_a_node']} interface, "
            f"{rates[1] / 1e9:.2f} by {last['interfaces_of_a_node']}: {rates[1] / rates[0]:.2f}x"
        )
    Console(stderr=True).print(f"written to {options.output}")


def _run(options: argparse.Namespace, interfaces: int) -> dict[str, Any]:
    """Run one setting of the command."""
    link = options.link * 1e9 or None
    nodes = tuple(EmulatedNode(speeds=(1.0, 1.0), link_bit_per_s=link, links=interfaces) for _ in range(2))
    with (
        progress(Console(stderr=True)) as report,
        emulate(EmulatedCluster(nodes=nodes, fastest_cores=1.0 if options.messages else CORES / 2)) as emulated,
    ):
        arguments = (options.tokens, options.rounds, options.budget, not options.messages, options.proxies)
        result = emulated.run(measure, *arguments, on_report=report)[0]
    paired = [a / b for a, b in zip(result["seconds"][ONE_RING], result["seconds"][BY_NODES], strict=True)]
    medians = {name: median(seconds) for name, seconds in result["seconds"].items()}
    # Both nodes send as much; of the busier one.
    sent = {name: max(sum(of_node.values()) for of_node in nodes) for name, nodes in result["interfaces"].items()}
    return {
        **result,
        "interfaces_of_a_node": interfaces,
        "medians_s": medians,
        "over_one_ring": median(paired),
        "bit_per_s": {name: 8 * sent[name] / medians[name] for name in medians},
    }


def _show(run: dict[str, Any], tokens: int, console: Console) -> None:
    table = Table(
        title=f"EMULATED: a document of {tokens:,} tokens over two nodes of two ranks, fp32; "
        f"{run['interfaces_of_a_node']} interface(s) a node"
    )
    for column in (
        "way",
        "s",
        "over one ring",
        "inside nodes, counted / planned",
        "between nodes, counted / planned",
        "left by each interface of a node, MB",
        "Gbit/s of a node",
    ):
        table.add_column(column)
    for name, seconds in run["medians_s"].items():
        counted, planned = run["bytes"][name]["counted"], run["bytes"][name]["planned"]
        cells = [f"{counted[kind]:,} / {planned[kind]:,.0f}" for kind in counted]
        gain = run["over_one_ring"] if name == BY_NODES else 1.0
        left = "; ".join(", ".join(f"{n / 1e6:.1f}" for n in of_node.values()) for of_node in run["interfaces"][name])
        rate = run["bit_per_s"][name] / 1e9
        table.add_row(name, f"{seconds:.3f}", f"{gain:.2f}x", *cells, left, f"{rate:.2f}")
    console.print(run["text"], table, sep="\n")
