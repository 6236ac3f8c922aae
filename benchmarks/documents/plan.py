"""Measure how good and how fast the planner of documents is.

    python -m benchmarks.documents plan [--batches N] [--crossing routed|ring] [--json]

    balance    computing time of the slowest rank over the ideal, mean and worst, by distribution, ranks, tokens and
               speeds; and the predicted time over the ideal, which includes messages that are not hidden
    speed      milliseconds from lengths to the placement, for 1,000 documents on 64 and on 1,024 ranks

The nodes have eight A800, some of which are slowed down (4:3:2:1 in every node), the links of the paper's cluster A,
and room for three times the mean of tokens on every rank. The model has 7B parameters. Only the planner's own time is
measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster import Cluster
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.models import load_model
from ds_hetero.planner import strategy
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.loads import ideal_s
from ds_hetero.planner.documents import UnitCosts, place_documents, unit_costs
from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS, LengthDistribution
from ds_hetero.planner.documents.summary import documents_of
from ds_hetero.values.schedule import Schedule

KIB = 1024
SPEEDS = {"equal": (1.0,), "4:3:2:1": (4.0, 3.0, 2.0, 1.0)}
CELLS_OF_4K_PER_RANK = ((16, 64 * KIB), (32, 128 * KIB), (64, 256 * KIB))  # ranks and tokens: 4K tokens per rank
RANKS_WITH_FOUR_DOCUMENTS = (4, 16, 64)  # ranks, with four documents each
MANY_LIMIT, FEW_LIMIT = 1.02, 1.08  # of the mean balance of a cell
SPEED_MS = {64: 5.0, 1024: 50.0}
SEED, REPEATS, DOCUMENTS, ROOM = 1, 7, 1000, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every target is met."""
    options = _parser().parse_args(arguments)
    progress = Console(stderr=True)
    outcome: dict[str, Any] = header(" ".join(["python -m benchmarks.documents plan", *(arguments or ())]))
    outcome["cells"] = [
        cell(*which, options.batches, options.crossing == "routed")
        for which in track(list(_cells()), "balance", console=progress)
    ]
    outcome["speed"] = [speed(*which) for which in track(list(_speed_cells()), "speed", console=progress)]
    outcome["crossing"] = options.crossing
    outcome["failures"] = list(_failures(outcome))
    path = options.output or FOLDER / f"documents_plan{'' if options.crossing == 'routed' else '_ring'}.json"
    write(outcome, path)
    if options.json:
        print(json.dumps(outcome))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        for part in (*_tables(outcome), *(f"NOT MET: {failure}" for failure in outcome["failures"])):
            console.print(part)
    progress.print(f"written to {path}")
    return 1 if outcome["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents plan", description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=20, help="batches of every cell")
    parser.add_argument(
        "--crossing",
        choices=("routed", "ring"),
        default="routed",
        help="documents over several nodes use all network interfaces of a node, or those of one rank, as rings do",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    return parser


def cluster_of(num_ranks: int, speeds: Sequence[float]) -> Cluster:
    """Return nodes of eight ranks like those of the paper's cluster A, with speeds in turn; few ranks are one node."""
    plain = load_cluster("zeppelin-a")
    (device, *_), node = plain.devices, plain.nodes[0]
    per_node = min(8, num_ranks)
    slowed = tuple(
        replace(
            device,
            peak_flops_per_s=device.peak_flops_per_s * speeds[rank % len(speeds)] / max(speeds),
            memory_bytes_per_s=device.memory_bytes_per_s * speeds[rank % len(speeds)] / max(speeds),
        )
        for rank in range(per_node)
    )
    nodes = tuple(replace(node, name=f"a800-{i}", devices=slowed) for i in range(num_ranks // per_node))
    return replace(plain, nodes=nodes, links=())


def costs_of(num_ranks: int, tokens: int, speeds: Sequence[float], routed: bool = True) -> tuple[Schedule, UnitCosts]:
    """Return the costs of documents with every rank as a unit, and room for `ROOM` times the mean of tokens."""
    cluster, model = cluster_of(num_ranks, speeds), load_model("llama-2-7b")
    cost = make_cost_model("calibrated", cluster, model, Workload(seq_len=tokens, activation_checkpointing=False))
    assert isinstance(cost, CalibratedCostModel)
    schedule = strategy("proportional", cost)
    costs = unit_costs(cost, schedule)
    return schedule, with_room(costs if routed else costs.through_one_link(), tokens)


def with_room(costs: UnitCosts, tokens: int) -> UnitCosts:
    """Return the costs with room on every rank for rows of ``tokens`` tokens."""
    ranks = len(costs.token_s)
    return replace(costs, most_tokens=(ROOM * tokens // ranks,) * ranks)


def _cells() -> Iterator[tuple[str, str, int, int | None]]:
    """Yield distribution, speeds, ranks and tokens of every cell; tokens are None for four documents per rank."""
    for name in DISTRIBUTIONS:
        for speeds in SPEEDS:
            for num_ranks, tokens in CELLS_OF_4K_PER_RANK:
                yield name, speeds, num_ranks, tokens
            for num_ranks in RANKS_WITH_FOUR_DOCUMENTS:
                yield name, speeds, num_ranks, None


def cell(name: str, speeds: str, num_ranks: int, tokens: int | None, batches: int, routed: bool) -> dict[str, Any]:
    """Return balance and predictions of one cell over random batches."""
    generator = random.Random(SEED)
    rows = [_lengths(DISTRIBUTIONS[name], num_ranks, tokens, generator) for _ in range(batches)]
    _, costs = costs_of(num_ranks, tokens or max(map(sum, rows)), SPEEDS[speeds], routed)
    balance, over_ideal, members, most, took = [], [], [], [], []
    for lengths in rows:
        costs = with_room(costs, sum(lengths))
        begin = time.process_time()
        placed = place_lengths(lengths, costs)
        took.append(time.process_time() - begin)
        bound_s = ideal_s(lengths, costs)
        balance.append(placed.loads.compute_s / bound_s)
        over_ideal.append(placed.predicted_s / bound_s)
        members.append(placed.num_fragments)
        most.append(max(placed.loads.tokens) * num_ranks / sum(lengths))
    return {
        "distribution": name,
        "speeds": speeds,
        "ranks": num_ranks,
        "tokens": tokens,
        "documents": mean(map(len, rows)),
        "balance": mean(balance),
        "worst_balance": max(balance),
        "predicted_over_ideal": mean(over_ideal),
        "members_of_cut": mean(members),
        "most_tokens_over_mean": mean(most),
        "ms": 1e3 * mean(took),
    }


def _lengths(
    distribution: LengthDistribution, num_ranks: int, tokens: int | None, generator: random.Random
) -> list[int]:
    if tokens is None:
        return [distribution.length(generator) for _ in range(4 * num_ranks)]
    return distribution.batch(tokens, generator)


def _speed_cells() -> Iterator[tuple[int, str, str]]:
    for num_ranks in SPEED_MS:
        for kind in ("chat", "github"):
            for speeds in SPEEDS:
                yield num_ranks, kind, speeds


def speed(num_ranks: int, kind: str, speeds: str) -> dict[str, Any]:
    """Return the time from lengths to the placement, the least of several runs."""
    generator = random.Random(SEED)
    if kind == "chat":
        lengths = [min(max(int(generator.lognormvariate(5.8, 1.0)), 16), 8 * KIB) for _ in range(DOCUMENTS)]
    else:
        lengths = [DISTRIBUTIONS[kind].length(generator) for _ in range(DOCUMENTS)]
    tokens = sum(lengths)
    schedule, costs = costs_of(num_ranks, tokens, SPEEDS[speeds])
    documents = documents_of(lengths, tokens)
    took = []
    for _ in range(REPEATS):
        begin = time.process_time()
        place_documents(schedule, documents, tokens, costs)
        took.append(time.process_time() - begin)
    placed = place_lengths(lengths, costs)
    balance = placed.loads.compute_s / ideal_s(lengths, costs)
    return {"ranks": num_ranks, "lengths": kind, "speeds": speeds, "ms": 1e3 * min(took), "balance": balance}


def _failures(outcome: dict[str, Any]) -> Iterator[str]:
    for each in outcome["cells"]:
        limit = FEW_LIMIT if each["tokens"] else MANY_LIMIT
        if each["balance"] > limit and (outcome["crossing"] == "routed" or not each["tokens"]):
            yield (
                f"{each['distribution']}, {each['ranks']} ranks, {each['speeds']}: mean balance {each['balance']:.3f}, "
                f"the target is {limit}"
            )
    for each in outcome["speed"]:
        limit_ms = SPEED_MS[each["ranks"]]
        if each["ms"] > limit_ms:
            yield f"{each['ranks']} ranks, {each['lengths']}: {each['ms']:.1f} ms, the target is {limit_ms:g} ms"


def _tables(outcome: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables."""
    table = Table("documents", "ranks", "tokens", "speeds", title="Placements of documents")
    for heading in ("balance", "worst", "predicted / ideal", "fragments", "most tokens / mean", "ms"):
        table.add_column(heading, justify="right")
    for each in outcome["cells"]:
        tokens = f"{each['tokens'] // KIB}K" if each["tokens"] else "4 documents a rank"
        numbers = (each[key] for key in ("balance", "worst_balance", "predicted_over_ideal"))
        table.add_row(
            each["distribution"],
            str(each["ranks"]),
            tokens,
            each["speeds"],
            *(f"{number:.3f}" for number in numbers),
            f"{each['members_of_cut']:.0f}",
            f"{each['most_tokens_over_mean']:.2f}",
            f"{each['ms']:.1f}",
        )
    yield table
    table = Table("ranks", "lengths", "speeds", "ms", "balance", title=f"{DOCUMENTS:,} documents, lengths to placement")
    for each in outcome["speed"]:
        numbers = f"{each['ms']:.1f}", f"{each['balance']:.3f}"
        table.add_row(str(each["ranks"]), each["lengths"], each["speeds"], *numbers)
    yield table
