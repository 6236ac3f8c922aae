"""Compare orders of lanes and of messages in attention: order of the backward, overlap of messages, and their posting.

    python -m benchmarks.documents lane_order --link 1     # about eight minutes

One attention layer, forward and backward, runs on four ranks in two nodes, of speeds 4:3:2:1, in all ways alternately.

Two batches of ArXiv's lengths run the lanes of the backward in the order of the forward, and in reverse, as in
Zeppelin's attention engine. A lane that would wait may yield to the next one, as messages with tags allow; or all ranks
run their lanes in one order, as NCCL needs it.

One document over all ranks is sent by messages that overlap the computation of a round, and by messages that end before
it. They are posted one by one, or in one batch of operations, as NCCL needs it.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.documents.contenders import DOCUMENTS, STREAM, PackedBatch
from benchmarks.documents.run import ALL_CORES, NODES, SPEEDS, costs_at_speeds, run_at_once
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, emulate
from benchmarks.measure.contenders import Contender, Shape
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.turns import take_turns
from ds_hetero.planner.documents import UnitCosts
from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS
from ds_hetero.runtime.attention import attention as attention_module
from ds_hetero.runtime.attention import channel, kernels
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.lane_mail import LaneMail
from ds_hetero.runtime.attention.ring import ring_backward
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import proportional
from ds_hetero.values.plans import Plan

SHAPE, SEEDS = Shape(), (1, 2)


class Way(NamedTuple):
    """How lanes and messages of a pass run."""

    in_reverse: bool = False  # lanes of the backward
    by_order: bool = False  # messages are paired by the order of posting, a round is one batch of operations
    waits: bool = False  # before a round computes, for what the next one needs


ORDERS = {
    "forward's order, lanes yield": Way(),
    "reverse, lanes yield": Way(in_reverse=True),
    "forward's order, in order": Way(by_order=True),
    "reverse, in order": Way(in_reverse=True, by_order=True),
}
OVERLAP = "single messages, overlapped"
POSTINGS = {
    OVERLAP: Way(),
    "single messages, waited for": Way(waits=True),
    "one batch, overlapped": Way(by_order=True),
    "one batch, waited for": Way(by_order=True, waits=True),
}


def measure(
    lab: RankLab, link_bit_per_s: float | None, tokens: int, shrink: int, rounds: int, budget_s: float
) -> list[dict[str, Any]]:
    """Measure all batches on this rank; the result of rank 0 is complete."""
    total, speeds = sum(lab.cluster.cores), SPEEDS["4:3:2:1"]
    lab.set_speeds([total * speed / sum(speeds) for speed in speeds])
    cores = [speed.measured for speed in lab.speeds]
    schedule = proportional(cores, SHAPE.num_heads, SHAPE.num_kv_heads)
    replica = make_replica(Plan.of_replicas([schedule]))
    spec = AttentionSpec(kernels.select(torch.device("cpu"), torch.float32, SHAPE.head_dim, None, None))
    cases: list[dict[str, Any]] = []
    for seed in (*SEEDS, None):
        lab.report(len(cases) / (len(SEEDS) + 1), "one document" if seed is None else f"batch {seed}")
        lengths = [tokens]
        if seed is not None:
            lengths = [n // shrink for n in DISTRIBUTIONS["arxiv"].batch(tokens * shrink, random.Random(seed))]
            lengths[-1] += tokens - sum(lengths)
        batch = PackedBatch(tuple(lengths))
        placement = batch.place(STREAM if seed is None else DOCUMENTS, schedule, _costs(batch, cores, link_bit_per_s))
        layout, positions = batch_layout(placement, placement.rows), placement.positions(lab.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor, layout=layout) -> Tensor:  # type: ignore[no-untyped-def]
            return attention(q, k, v, replica, layout, spec).flatten(2)

        layer = Contender(DOCUMENTS, lambda length, positions=positions: positions, attend).layer(SHAPE, tokens)  # type: ignore[misc]
        ways = POSTINGS if seed is None else ORDERS
        actions = {name: _run_as(layer, way) for name, way in ways.items()}
        for action in actions.values():
            action()
        dist.barrier()
        turns = take_turns(actions, rounds, budget_s, lab.own_pids)
        zones = [lane.zone(NODES) for lane in placement.lanes]
        cases.append(
            {
                "seed": seed,
                "documents": lengths,
                "lanes": zones,
                "seconds": turns.seconds,
                "foreign_cores": turns.foreign_cores,
                "text": lab.describe(),
            }
        )
    return cases


def _run_as(layer: Callable[[], object], way: Way) -> Callable[[], object]:
    post = LaneMail.post

    def post_and_wait(mail: LaneMail, step: int, *traffic: Any) -> None:
        post(mail, step, *traffic)
        mail.pending(step + 1).wait()

    def run() -> None:
        backward = functools.partial(ring_backward, in_reverse=way.in_reverse)
        with (
            mock.patch.object(attention_module, "ring_backward", backward),
            mock.patch.object(channel, "pairs_by_order", lambda group: way.by_order),
            mock.patch.object(LaneMail, "post", post_and_wait if way.waits else post),
        ):
            layer()

    return run


def _costs(batch: PackedBatch, cores: Sequence[float], link_bit_per_s: float | None) -> UnitCosts:
    """Return the costs of attention from the rates of all ranks at the same time. Caller: every rank."""
    at_once = run_at_once(batch, SHAPE, cores)
    rates = [median(of_rank) for of_rank in zip(*at_once.rates(), strict=True)]
    edge = max(at_once.edge_tokens(), 1e-3)
    return costs_at_speeds(SHAPE, rates, edge / batch.squares, 1 / batch.squares, link_bit_per_s)


def main(words: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents lane_order", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--link", type=float, default=1.0, help="Gbit/s of each node's link; 0: loopback")
    parser.add_argument("--tokens", type=int, default=12288, help="of a batch")
    parser.add_argument("--shrink", type=int, default=5, help="what the published lengths are divided by")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every way at most")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds for all turns of a case")
    parser.add_argument("--output", type=Path, default=FOLDER / "documents_lane_order.json", help="the result file")
    options = parser.parse_args(words)
    link = options.link * 1e9 or None
    nodes = tuple(EmulatedNode(speeds=speeds, link_bit_per_s=link) for speeds in ((4.0, 3.0), (2.0, 1.0)))
    console = Console(stderr=True)
    arguments = (link, options.tokens, options.shrink, options.rounds, options.budget)
    with (
        progress(console) as report,
        emulate(EmulatedCluster(nodes=nodes, fastest_cores=ALL_CORES * 0.4)) as emulated,
    ):
        cases = emulated.run(measure, *arguments, on_report=report)[0]
    table = Table(title="EMULATED: attention of placed documents, forward and backward; lanes of the backward")
    for column in ("batch", "lanes", "the other way is", "forward's order, s", "reverse, s", "reverse is faster"):
        table.add_column(column)
    postings = Table("messages of one document", "s", "over overlapped single ones", title="EMULATED: one document")
    for case in cases:
        case["medians_s"] = {way: median(seconds) for way, seconds in case["seconds"].items()}
        if case["seed"] is None:
            for way, seconds in case["seconds"].items():
                ratios = sorted(a / b for a, b in zip(seconds, case["seconds"][OVERLAP], strict=True))
                spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                postings.add_row(way, f"{case['medians_s'][way]:.3f}", spread)
            continue
        case["gain"] = {}
        for kind in ("lanes yield", "in order"):
            ways = [f"forward's order, {kind}", f"reverse, {kind}"]
            case["gain"][kind] = median(a / b for a, b in zip(*(case["seconds"][way] for way in ways), strict=True))
            seconds = [f"{case['medians_s'][way]:.3f}" for way in ways]
            table.add_row(str(case["seed"]), ", ".join(case["lanes"]), kind, *seconds, f"{case['gain'][kind]:.3f}x")
    result = {**header(" ".join(["python -m benchmarks.documents lane_order", *words])), "emulated": True}
    write(json.loads(json.dumps({**result, "cases": cases})), options.output)
    Console(width=None if sys.stdout.isatty() else 160).print(cases[0]["text"], table, postings, sep="\n")
    console.print(f"written to {options.output}")
