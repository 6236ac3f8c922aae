"""Measure when it pays to move tokens between ranks for attention, and when it costs.

    python -m benchmarks.documents remap --link 1      # about three minutes
    python -m benchmarks.documents remap --predict     # predictions for 8 to 32 A800; nothing is measured

Training steps of a small Llama through DeepSpeed run on four ranks in two nodes, of speeds 4:3:2:1, with ArXiv's
lengths, in all ways alternately. There are three cases: every other rank computes attention `SLOWER` times, like a GPU
without a fast kernel; all ranks compute it once; and the same with Zeppelin's planner, which assumes equal ranks. The
value "where_faster" takes one of the other two, and the table says which.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.documents.contenders import PackedBatch, engine_step
from benchmarks.documents.plan import SPEEDS as PLANNED_SPEEDS
from benchmarks.documents.plan import costs_of
from benchmarks.documents.run import ALL_CORES, BUILDING_CORES, SPEEDS, run_at_once, step_costs
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, emulate
from benchmarks.measure.contenders import Shape
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.turns import take_turns
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts
from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.values.baselines import proportional
from ds_hetero.values.placement import Placement, RemapWish, Rows
from ds_hetero.values.schedule import Schedule

STAYS, MOVES, CHOOSES = "never", "always", "where_faster"
SHAPE = Shape()
TOKENS, SHRINK = 6144, 10
PREDICTED = [(ranks, speeds, 1) for ranks in (16, 32) for speeds in PLANNED_SPEEDS]
PREDICTED += [(ranks, "equal", slower) for ranks in (8, 16) for slower in (4, 8, 16)]
SLOWER = 12  # times as long in attention as a rank's linear layers say
OF_ALL_LENGTHS = PackedBatch((64,) * 16 + (256,) * 4 + (1024,) * 2)  # for what a document's diagonal costs


@dataclass(frozen=True)
class Case:
    """A case that is measured.

    Args:
        slower: how often every other rank computes attention.
        planner: published planner to use instead of ours.
    """

    name: str
    slower: int = 1
    planner: str | None = None


CASES = (
    Case(f"ours, attention {SLOWER}x slower on ranks 1 and 3", slower=SLOWER),
    Case("ours, kernels alike"),
    Case("Zeppelin's, kernels alike", planner="zeppelin"),
)


@dataclass(frozen=True)
class RemappedBatch(PackedBatch):
    """A packed batch whose contenders are the values of ``"placement": {"remap": ...}``."""

    planner: str | None = None

    def place(self, name: str, schedule: Schedule, costs: UnitCosts) -> Placement:
        """Return the placement by a job's placer with the value ``name``."""
        remap: RemapWish = name  # type: ignore[assignment]
        placer = DocumentPlacer(costs, planner=self.planner, remap=remap)
        return placer(schedule, self.tokens, (Rows(0, 1, self.documents),))


def measure(lab: RankLab, link_bit_per_s: float | None, rounds: int, budget_s: float) -> list[dict[str, Any]]:
    """Measure all cases on this rank; the rows of rank 0 have the figures of all ranks."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    total, speeds = sum(lab.cluster.cores), SPEEDS["4:3:2:1"]
    lab.set_speeds([total * speed / sum(speeds) for speed in speeds])
    cores = [speed.measured for speed in lab.speeds]
    schedule = proportional(cores, SHAPE.num_heads, SHAPE.num_kv_heads)
    alike = _costs(lab, cores, link_bit_per_s)
    lengths = [length // SHRINK for length in DISTRIBUTIONS["arxiv"].batch(TOKENS * SHRINK, random.Random(1))]
    lengths[-1] += TOKENS - sum(lengths)
    results = []
    for done, case in enumerate(CASES, start=1):
        lab.report(done / (len(CASES) + 1), case.name)
        batch = RemappedBatch(tuple(lengths), case.planner)
        factors = [case.slower if rank % 2 else 1 for rank in range(len(cores))]
        costs = _with_slower_attention(alike, factors)
        placements = {wish: batch.place(wish, schedule, costs) for wish in (STAYS, MOVES, CHOOSES)}
        with _repeated_attention(factors[lab.rank]):
            with lab.at_speed(BUILDING_CORES):
                actions = {wish: engine_step(wish, batch, SHAPE, schedule, costs) for wish in (STAYS, MOVES)}
                for action in actions.values():
                    action()
            dist.barrier()
            turns = take_turns(actions, rounds, budget_s, lab.own_pids)
        results.append(
            {
                "case": case.name,
                "documents": batch.lengths,
                "chosen": next(wish for wish in (STAYS, MOVES) if placements[wish] == placements[CHOOSES]),
                "attended": {wish: placements[wish].in_attention.rank_tokens for wish in (STAYS, MOVES)},
                "held": {wish: placements[wish].rank_tokens for wish in (STAYS, MOVES)},
                "predicted_s": {
                    wish: placement_loads(placements[wish], batch.documents, costs).predicted_s + costs.step_s
                    for wish in (STAYS, MOVES)
                },
                "seconds": turns.seconds,
                "foreign_cores": turns.foreign_cores,
                "measured_speeds": cores,
                "text": lab.describe(),
            }
        )
    return results


@contextmanager
def _repeated_attention(times: int) -> Iterator[None]:
    """Let this rank's kernel compute everything ``times`` times."""

    def repeated(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            for _ in range(times - 1):
                compute(*arguments, **options)
            return compute(*arguments, **options)

        return run

    with (
        mock.patch.object(TorchKernel, "forward", repeated(TorchKernel.forward)),
        mock.patch.object(TorchKernel, "backward", repeated(TorchKernel.backward)),
    ):
        yield


def _with_slower_attention(costs: UnitCosts, factors: Sequence[int]) -> UnitCosts:
    """Return the costs of ranks whose attention takes ``factors[rank]`` times as long."""
    edge_s = tuple(s * factor for s, factor in zip(costs.edge_s, factors, strict=True))
    return replace(
        costs,
        token_s=tuple(linear_s + s for linear_s, s in zip(costs.linear_s, edge_s, strict=True)),
        square_s=tuple(s * factor for s, factor in zip(costs.square_s, factors, strict=True)),
        edge_s=edge_s,
    )


def _costs(lab: RankLab, cores: Sequence[float], link_bit_per_s: float | None) -> UnitCosts:
    """Return the costs of a step on ranks with these speeds. Caller: every rank."""
    edge_tokens = run_at_once(OF_ALL_LENGTHS, SHAPE, cores).edge_tokens()
    costs = step_costs(lab, SHAPE, TOKENS, link_bit_per_s)
    times = zip(costs.token_s, costs.square_s, strict=True)
    return replace(
        costs,
        # q, k, v, the output and their gradients, over the three times that keys and values travel
        exchange_per_receive=2 * (SHAPE.num_heads + SHAPE.num_kv_heads) / (3 * SHAPE.num_kv_heads),
        edge_s=tuple(min(edge_tokens * square_s, token_s / 2) for token_s, square_s in times),
    )


def main(words: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.documents remap", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--link", type=float, default=1.0, help="Gbit/s of each node's link; 0: loopback")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both at most")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds for all turns of a case")
    parser.add_argument("--output", type=Path, default=FOLDER / "documents_remap.json", help="the result file")
    parser.add_argument("--predict", action="store_true", help="predictions for A800 and a 7B model; nothing is run")
    options = parser.parse_args(words)
    if options.predict:
        Console(width=None if sys.stdout.isatty() else 120).print(predictions())
        return
    link = options.link * 1e9 or None
    nodes = tuple(EmulatedNode(speeds=speeds, link_bit_per_s=link) for speeds in ((4.0, 3.0), (2.0, 1.0)))
    console = Console(stderr=True)
    with (
        progress(console) as report,
        emulate(EmulatedCluster(nodes=nodes, fastest_cores=ALL_CORES * 0.4)) as emulated,
    ):
        cases = emulated.run(measure, link, options.rounds, options.budget, on_report=report)[0]
    for case in cases:
        case["medians_s"] = {wish: median(seconds) for wish, seconds in case["seconds"].items()}
        case["predicted_gain"] = case["predicted_s"][STAYS] / case["predicted_s"][MOVES]
        case["gain"] = median(a / b for a, b in zip(case["seconds"][STAYS], case["seconds"][MOVES], strict=True))
    result = {**header(" ".join(["python -m benchmarks.documents remap", *words])), "emulated": True, "cases": cases}
    write(json.loads(json.dumps(result)), options.output)
    Console(width=None if sys.stdout.isatty() else 160).print(cases[0]["text"], table_of(cases), sep="\n")
    console.print(f"written to {options.output}")


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per case."""
    table = Table(title="EMULATED: training steps whose tokens stay, and whose tokens move for the linear layers")
    for column in (
        "planner and ranks",
        "stay, s",
        "move, s",
        "predicted gain",
        "measured gain",
        "chosen",
        "held, moved",
    ):
        table.add_column(column)
    for case in cases:
        seconds = case["medians_s"]
        table.add_row(
            case["case"],
            f"{seconds[STAYS]:.2f}",
            f"{seconds[MOVES]:.2f}",
            f"{case['predicted_gain']:.2f}x",
            f"{case['gain']:.2f}x",
            {STAYS: "stay", MOVES: "move"}[case["chosen"]],
            ", ".join(map(str, case["held"][MOVES])),
        )
    return table


def predictions() -> Table:
    """Return predicted gains of moving tokens for one batch of every distribution, and the planner's choices."""
    table = Table(title="Predicted: blocks of Llama 2 7B whose tokens stay, over those whose tokens move; * taken")
    for column in ("ranks", "speeds", "attention", *DISTRIBUTIONS):
        table.add_column(column)
    for ranks, speeds, slower in PREDICTED:
        tokens = ranks * 4096
        schedule, costs = costs_of(ranks, tokens, PLANNED_SPEEDS[speeds])
        costs = _with_slower_attention(costs, [slower if rank % 2 else 1 for rank in range(ranks)])
        cells = []
        for distribution in DISTRIBUTIONS.values():
            batch = RemappedBatch(tuple(distribution.batch(tokens, random.Random(1))))
            stays, moves, chosen = (batch.place(wish, schedule, costs) for wish in (STAYS, MOVES, CHOOSES))
            stays_s, moves_s = (placement_loads(p, batch.documents, costs).predicted_s for p in (stays, moves))
            cells.append(f"{stays_s / moves_s:.2f}{' *' if chosen.moves else ''}")
        table.add_row(str(ranks), speeds, f"1/{slower} on every other" if slower > 1 else "alike", *cells)
    return table
