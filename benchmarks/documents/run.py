r"""Four ranks in two nodes, 4:3:2:1 or equal, and packed batches: attention and whole training steps, by turns.

    python -m benchmarks.documents run                     # about 30 minutes
    python -m benchmarks.documents run --quick             # three: ArXiv lengths, half the tokens
    python -m benchmarks.documents run --scopes replan     # a rank that loses speed while the job runs
    python -m benchmarks.documents run --brief             # the default against the stream alone, every cell
    python -m benchmarks.documents run --kept cases.jsonl  # goes on where it was stopped

Lengths are those that Zeppelin publishes, divided by `--shrink`. The placement is planned with the speeds that are
measured when they are set, for attention with the rates at which all ranks compute the batch at once when nothing is
sent. The bound is the time of rank 0 alone, times its share of the sum of measured speeds; for attention a second one
stands beside it: the batch at the rates at once.
What documents are compared with is what a job gets that says nothing of its placement: where the predicted gain is no
larger than the error of predictions, it is the stream, and the table says so.
Bytes are counted where they are sent, and compared with what the placement says; and a stream of one document is held
against the same stream through the placement of documents.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.documents.contenders import (
    ALONE,
    AT_ONCE,
    DOCUMENTS,
    OVER_ALL,
    STOCK,
    STREAM,
    AtOnce,
    PackedBatch,
    alone_layer,
    alone_step,
    engine_step,
    layer_actions,
    step_actions,
)
from benchmarks.documents.run_tables import REPLAN, SLOWED_RANK, SLOWED_TO, STEPS_BEFORE, show, summarize
from benchmarks.documents.wire import counted_bytes, planned_bytes
from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, emulate
from benchmarks.measure.contenders import Shape
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.turns import take_turns, timed_run
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import UnitCosts, place_documents
from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS
from ds_hetero.values.baselines import proportional
from ds_hetero.values.schedule import Schedule

SPEEDS = {"4:3:2:1": (4.0, 3.0, 2.0, 1.0), "equal": (1.0, 1.0, 1.0, 1.0)}
ATTENTION, STEP, SINGLE = "attention", "training step", "one document"
SCOPES = (ATTENTION, STEP, REPLAN)
STEPS_AFTER = 20
NODES = (0, 0, 1, 1)
ALL_CORES = 0.85  # of all ranks together: more, and ranks compete with their communication threads
FRAGMENT_ROWS = 96.0  # what rectangles, merging and messages of a part cost beside its share of the pairs
BUILDING_CORES = 0.4  # of every rank, while nothing is measured
RUNS_AT_ONCE = 2  # before the placement is planned


@dataclass(frozen=True)
class RunPlan:
    """The cases to measure.

    Args:
        cases: (scope, speeds, distribution); steps come last, because stock DeepSpeed stays registered.
        shape: of the layer and the model.
        tokens: of a batch.
        shrink: divisor of the published lengths.
        rounds: turns of every contender at most.
        budget_s: seconds of a case after which no further round begins.
        seed: of the batches.
        link_bit_per_s: rate of the link between the nodes; None for loopback.
        kept: file that gets a line for every case as soon as it has been measured.
        brief: measure stream and documents alone, and the bounds only for ArXiv's lengths on unequal ranks.
        until_s: time of the monotonic clock after which no further case is begun.
    """

    cases: tuple[tuple[str, str, str], ...]
    shape: Shape
    tokens: int
    shrink: int
    rounds: int
    budget_s: float
    seed: int
    link_bit_per_s: float | None = None
    kept: Path | None = None
    brief: bool = False
    until_s: float = float("inf")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that cases of different runs must have in common to be in one table."""
        return {"tokens": self.tokens, "shrink": self.shrink, "seed": self.seed, "link_bit_per_s": self.link_bit_per_s}

    def known(self) -> list[dict[str, Any]]:
        """Cases of this plan that are in the file."""
        lines = self.kept.read_text().splitlines() if self.kept is not None and self.kept.exists() else []
        entries = [entry for entry in map(json.loads, lines) if entry["settings"] == self.settings]
        return [entry["case"] for entry in entries if _which(entry["case"]) in self.cases]

    def keep(self, case: Mapping[str, Any]) -> None:
        """Append a case to the file."""
        if self.kept is not None:
            with self.kept.open("a") as lines:
                lines.write(json.dumps({"settings": self.settings, "case": case}) + "\n")

    def batch(self, distribution: str) -> PackedBatch:
        """Return documents that fill a row; its length is a multiple of the number of ranks."""
        if distribution == SINGLE:
            return PackedBatch((self.tokens // 2,))
        lengths = DISTRIBUTIONS[distribution].batch(self.tokens * self.shrink, random.Random(self.seed))
        lengths = [max(length // self.shrink, 1) for length in lengths]
        lengths[-1] += self.tokens - sum(lengths)
        return PackedBatch(tuple(lengths))


def _which(case: Mapping[str, Any]) -> tuple[str, str, str]:
    return case["scope"], case["speeds"], case["distribution"]


def measure(lab: RankLab, plan: RunPlan) -> list[dict[str, Any]]:
    """Measure all cases that are not in the file, on this rank; the result of rank 0 is complete."""
    total, measured = sum(lab.cluster.cores), ""
    measured_cases = set(map(_which, plan.known()))
    dist.barrier()
    results = []
    for done, (scope, speeds, distribution) in enumerate(plan.cases):
        if (scope, speeds, distribution) in measured_cases or not _goes_on(plan.until_s):
            continue
        lab.report(done / len(plan.cases), f"{scope}, {speeds}, {distribution}")
        if speeds != measured:
            measured = speeds
            lab.set_speeds([total * speed / sum(SPEEDS[speeds]) for speed in SPEEDS[speeds]])
        case = _renewal if scope == REPLAN else _case
        results.append(case(lab, plan, scope, speeds, distribution))
        if lab.rank == 0:
            plan.keep(results[-1])
    return results


def _goes_on(until_s: float) -> bool:
    """Return whether rank 0 still has time."""
    box = torch.tensor(int(time.monotonic() < until_s))
    dist.broadcast(box, src=0)
    return bool(box)


def _case(lab: RankLab, plan: RunPlan, scope: str, speeds: str, distribution: str) -> dict[str, Any]:
    """Measure one case."""
    cores = [speed.measured for speed in lab.speeds]
    batch = plan.batch(distribution)
    case: dict[str, Any] = {"scope": scope, "speeds": speeds, "distribution": distribution}
    has_bounds = not plan.brief or (scope, speeds, distribution) == (ATTENTION, "4:3:2:1", "arxiv")
    if scope == STEP:
        costs = step_costs(lab, plan.shape, plan.tokens, plan.link_bit_per_s)
        names = (STOCK, STREAM, OVER_ALL, DOCUMENTS, ALONE) if speeds == "4:3:2:1" else (STREAM, DOCUMENTS, ALONE)
        names = (STREAM, DOCUMENTS) if plan.brief else names
        with lab.at_speed(BUILDING_CORES):  # DeepSpeed's engines are built for minutes on a tenth of a core
            actions = step_actions(batch, plan.shape, cores, costs, names)
        case |= _predicted(batch, proportional(cores, plan.shape.num_heads, plan.shape.num_kv_heads), costs)
    else:
        alone = alone_layer(batch, plan.shape)
        at_once = run_at_once(batch, plan.shape, cores)
        rates = case["rates_at_once"] = [median(of_rank) for of_rank in zip(*at_once.rates(), strict=True)]
        edge = case["edge_tokens"] = at_once.edge_tokens()
        costs = costs_at_speeds(plan.shape, rates, edge / batch.squares, 1 / batch.squares, plan.link_bit_per_s)
        names = (STREAM, DOCUMENTS) if plan.brief else (STREAM, OVER_ALL, DOCUMENTS)
        actions, placements = layer_actions(batch, plan.shape, rates, costs, names)
        case |= _predicted(batch, placements[STREAM].schedule, costs)
        if not plan.brief:
            case["bytes"] = {
                name: {
                    "counted": counted_bytes(actions[name], NODES),
                    "planned": planned_bytes(placement, plan.shape, NODES),
                }
                for name, placement in placements.items()
            }
        case["rank_tokens"] = placements[DOCUMENTS].rank_tokens
        actions = actions | ({ALONE: alone, AT_ONCE: at_once} if has_bounds else {})
    turns = take_turns(actions, plan.rounds, plan.budget_s, lab.own_pids)
    if scope == ATTENTION and has_bounds:
        turns.seconds[AT_ONCE] = [1 / sum(of_run) for of_run in at_once.rates()[RUNS_AT_ONCE:]]
    return case | {
        "documents": batch.lengths,
        "measured_speeds": cores,
        "text": lab.describe(),
        "seconds": turns.seconds,
        "foreign_cores": turns.foreign_cores,
    }


def _predicted(batch: PackedBatch, schedule: Schedule, costs: UnitCosts) -> dict[str, Any]:
    """Return the predicted gain of placing by documents, and whether the batch stays a stream all the same."""
    by_documents = place_documents(schedule, batch.documents, batch.tokens, costs)
    times = [
        placement_loads(placement, batch.documents, costs).predicted_s + costs.step_s
        for placement in (batch.place(STREAM, schedule, costs), by_documents)
    ]
    return {
        "predicted_over_stream": times[0] / times[1],
        "stays_stream": batch.place(DOCUMENTS, schedule, costs).is_stream,
    }


def _renewal(lab: RankLab, plan: RunPlan, scope: str, speeds: str, distribution: str) -> dict[str, Any]:
    """Slow one rank down between two steps; return after how many steps the others no longer wait for it."""
    cores = [speed.measured for speed in lab.speeds]
    asked = [share * sum(lab.cluster.cores) / sum(SPEEDS[speeds]) for share in SPEEDS[speeds]]
    batch = plan.batch(distribution)
    schedule = proportional(cores, plan.shape.num_heads, plan.shape.num_kv_heads)
    costs = step_costs(lab, plan.shape, plan.tokens, plan.link_bit_per_s)
    replan = {"enabled": True, "interval_steps": 3}
    step, alone = engine_step(DOCUMENTS, batch, plan.shape, schedule, costs, replan), alone_step(batch, plan.shape)
    alone()
    alone_s = min(timed_run(alone) for _ in range(2))
    seconds = [timed_run(step) for _ in range(STEPS_BEFORE)]
    if lab.rank == SLOWED_RANK:
        lab.change_speed(asked[SLOWED_RANK] * SLOWED_TO)
    seconds += [timed_run(step) for _ in range(STEPS_AFTER)]
    slowed = [share * (SLOWED_TO if rank == SLOWED_RANK else 1.0) for rank, share in enumerate(cores)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seconds)
    slowest = [max(of_step) for of_step in zip(*everywhere, strict=True)]
    bound_s = [alone_s * cores[0] / sum(cores)] * STEPS_BEFORE + [alone_s * cores[0] / sum(slowed)] * STEPS_AFTER
    return {
        "scope": scope,
        "speeds": speeds,
        "distribution": distribution,
        "measured_speeds": cores,
        "step_seconds": slowest,
        "of_bound": [bound / s for bound, s in zip(bound_s, slowest, strict=True)],
    }


def run_at_once(batch: PackedBatch, shape: Shape, cores: Sequence[float]) -> AtOnce:
    """Run attention of all ranks at the same time, as often as stable rates take. Caller: every rank."""
    at_once = AtOnce(batch, shape, cores)
    for _ in range(RUNS_AT_ONCE):
        timed_run(at_once)
    return at_once


def costs_at_speeds(
    shape: Shape,
    speeds: Sequence[float],
    token_s: float,
    square_s: float,
    link_bit_per_s: float | None,
    *,
    num_layers: int = 1,
) -> UnitCosts:
    """Return the costs of ranks with these speeds, from times at speed 1; links inside nodes are free."""
    kv_bytes = 3 * 2 * shape.num_kv_heads * shape.head_dim * torch.float32.itemsize  # forward, backward and gradients
    cross_s = num_layers * kv_bytes * 8 / link_bit_per_s if link_bit_per_s else 0.0
    return UnitCosts(
        token_s=tuple(token_s / speed for speed in speeds),
        square_s=tuple(square_s / speed for speed in speeds),
        most_tokens=(10**9,) * len(speeds),
        node=NODES,
        receive_s=(0.0, 0.0),
        cross_s=(cross_s, cross_s),
        fragment_rows=FRAGMENT_ROWS,
    )


def step_costs(lab: RankLab, shape: Shape, tokens: int, link_bit_per_s: float | None) -> UnitCosts:
    """Costs of a training step: by token, by square, and once.

    Of what a step costs once the optimizer is most; ZeRO divides it evenly, so that the slowest rank takes longest.

    Caller: every rank.
    """
    if tokens not in _solved:
        with lab.at_speed(ALL_CORES):  # rank 0 alone, the others wait
            _solved[tokens] = [seconds * ALL_CORES for seconds in _solve_step(shape, tokens)]
    token_s, square_s, once_s = _solved[tokens]
    cores = [speed.measured for speed in lab.speeds]
    costs = costs_at_speeds(shape, cores, token_s, square_s, link_bit_per_s, num_layers=shape.num_layers)
    return replace(costs, step_s=once_s / len(cores) / min(cores))


_solved: dict[int, list[float]] = {}  # by tokens of a batch: core seconds by token, by square and once


def _solve_step(shape: Shape, tokens: int) -> list[float]:
    """Return the seconds of a step of rank 0 alone: per token with diagonals, per squared length, and per step.

    They are solved for from three batches: many short documents, half of these, and one document.
    """
    short = tokens // 64
    batches = [PackedBatch((short,) * 64), PackedBatch((short,) * 32), PackedBatch((tokens // 4,))]
    seconds = []
    for batch in batches:
        step = alone_step(batch, shape)
        step()
        seconds.append(min(timed_run(step) for _ in range(2)))
    parts = torch.tensor([[batch.tokens, batch.squares, 1] for batch in batches], dtype=torch.float64)
    solved = torch.linalg.solve(parts, torch.tensor(seconds, dtype=torch.float64)).clamp(min=1e-12)
    dist.broadcast(solved, src=0)
    return list(solved.tolist())


def main(words: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents run", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="ArXiv lengths only, in about three minutes")
    parser.add_argument("--tokens", type=int, help="of a batch")
    parser.add_argument("--shrink", type=int, help="what the published lengths are divided by")
    parser.add_argument("--rounds", type=int, help="turns of every contender")
    parser.add_argument("--seed", type=int, default=1, help="of the batches")
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, help="all; with --quick without the last")
    parser.add_argument("--lengths", nargs="+", choices=(*DISTRIBUTIONS, SINGLE), help="these alone, in every scope")
    parser.add_argument("--speeds", nargs="+", choices=tuple(SPEEDS), help="these alone, in every scope")
    parser.add_argument("--link", type=float, help="Gbit/s between the nodes; left out, loopback")
    parser.add_argument("--budget", type=float, help="seconds of a case, after which no further round begins")
    parser.add_argument("--brief", action="store_true", help="stream and documents alone; bounds for ArXiv at 4:3:2:1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case is begun")
    parser.add_argument("--kept", type=Path, help="a line per case; cases that it has are not measured again")
    parser.add_argument("--output", type=Path, help="the result file")
    options = parser.parse_args(words)
    plan = _plan(options)
    link = plan.link_bit_per_s
    nodes = tuple(EmulatedNode(speeds=speeds, link_bit_per_s=link) for speeds in ((4.0, 3.0), (2.0, 1.0)))
    console, begin = Console(stderr=True), time.perf_counter()
    cases = plan.known()
    if len(cases) < len(plan.cases):
        with (
            progress(console) as report,
            emulate(EmulatedCluster(nodes=nodes, fastest_cores=ALL_CORES * 0.4)) as emulated,
        ):
            cases += emulated.run(measure, plan, on_report=report)[0]
    cases.sort(key=lambda case: plan.cases.index(_which(case)))
    result = {**header(" ".join(["python -m benchmarks.documents run", *words])), "emulated": True}
    result |= {"tokens": plan.tokens, "shrink": plan.shrink, "rows": summarize(cases), "cases": cases}
    result["seconds"] = round(time.perf_counter() - begin, 1)
    output = options.output or FOLDER / f"documents_run{'_quick' if options.quick else ''}.json"
    write(json.loads(json.dumps(result)), output)
    show(result, Console(width=None if sys.stdout.isatty() else 140))
    console.print(f"written to {output}")


def _plan(options: argparse.Namespace) -> RunPlan:
    """Return the plan of the command's options."""
    distributions = ("arxiv",) if options.quick else tuple(DISTRIBUTIONS)
    scopes = options.scopes or (SCOPES[:2] if options.quick else SCOPES)
    cases = [
        (ATTENTION, speeds, name)
        for speeds in SPEEDS
        for name in (*distributions, SINGLE)
        if not (name == SINGLE and (options.brief or (options.quick and speeds == "equal")))
    ]
    steps = ["4:3:2:1"] if options.quick else list(SPEEDS)
    cases += [(STEP, speeds, name) for speeds in steps for name in distributions]
    cases += [] if options.brief else [(REPLAN, "equal", "arxiv")]
    cases = [
        (scope, speeds, name)
        for scope, speeds, name in cases
        if scope in scopes and speeds in (options.speeds or SPEEDS) and name in (options.lengths or (name,))
    ]
    return RunPlan(
        cases=tuple(cases),
        shape=Shape(num_heads=8, num_kv_heads=4),
        tokens=options.tokens or (6144 if options.quick else 12288),
        shrink=options.shrink or (10 if options.quick else 5),
        rounds=options.rounds or (3 if options.quick else 7),
        budget_s=options.budget or (40.0 if options.quick else 150.0),
        seed=options.seed,
        link_bit_per_s=None if options.link is None else options.link * 1e9,
        kept=options.kept and options.kept.resolve(),
        brief=options.brief,
        until_s=time.monotonic() + options.seconds,
    )
