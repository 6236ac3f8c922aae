"""A ring of four unequal ranks under NCCL's rules, with one communicator and with one for every colour of its edges.

    alone      every rank computes its blocks, and neither sends nor waits
    coupled    one communicator: in every step a rank also waits for the rank that it sends to
    coloured   sends and receives of a rank go over unlike communicators, as `ds_hetero.runtime.replica` makes them

One attention layer runs, forward and backward apart, full attention, float32. Ranks hold tokens in proportion to their
speeds, so alone all of them take the same time. `tests.strict_group` lets gloo's messages wait as those of NCCL do: a
send ends when its receive is posted, and messages that are posted together end together.

Beside the measured times stands the recurrence of the cost model (`ds_hetero.cost.terms.ring`). Its coefficients are
fitted to the steps of ``alone``: seconds per token of a block, and per block, of every rank. Transfers count as free,
which they nearly are on loopback.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.turns import take_turns
from ds_hetero.cost.terms.ring import RingCoefficients, ring_finish_s
from ds_hetero.runtime.attention import ring as ring_module
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.channel import Message, PendingReceives
from ds_hetero.runtime.attention.kernels import SavedForward, Scores, select
from ds_hetero.runtime.attention.lane_passes import RingContext
from ds_hetero.runtime.attention.ring import ring_backward, ring_forward
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule

FORWARD, BACKWARD = "forward", "backward"
ALONE, COUPLED, COLOURED = "alone", "coupled", "coloured"
HEAD_DIM = 64


@dataclass(frozen=True)
class CouplingPlan:
    """What to measure: tokens by rank, in units; heads and tokens of the layer; turns of every contender."""

    shares: tuple[int, ...]
    num_heads: int
    tokens: int
    rounds: int
    budget_s: float

    @property
    def cluster(self) -> EmulatedCluster:
        """Ranks whose speeds are as their tokens."""
        return EmulatedCluster(nodes=(EmulatedNode(speeds=self.shares),))

    @property
    def schedule(self) -> Schedule:
        """A ring of single ranks."""
        groups = [
            Group(ranks=(rank,), tokens=(share,), heads=(self.num_heads,)) for rank, share in enumerate(self.shares)
        ]
        return Schedule(num_heads=self.num_heads, num_kv_heads=self.num_heads, groups=tuple(groups))


class _NoMessages:
    """A `ds_hetero.runtime.attention.channel.Channel` that sends nothing; it notes when every step began."""

    keeps_order = True

    def __init__(self, groups: object) -> None:
        step_begins.clear()

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Set what would be received to zero: the steps compute as many elements as with the numbers of others."""
        step_begins.append(time.perf_counter())
        for message in receives:
            message.tensor.zero_()
        return {}

    def finish(self) -> None:
        """Return at once: nothing was sent."""


step_begins: list[float] = []  # of the last pass over `_NoMessages`


def measure(lab: RankLab, plan: CouplingPlan, folder: str) -> dict[str, Any]:
    """Measure one ring on this rank; the result of rank 0 is complete.

    Args:
        folder: that all ranks see, for the rules of the strict group, and no other run.
    """
    from tests.strict_group import install

    lab.set_speeds(plan.cluster.cores)
    speeds = lab.describe()
    device = install(folder, lab.rank)
    replica = make_replica(Plan.of_replicas([plan.schedule]))
    assert replica.colour_groups, "the ring of the plan has no colours"
    ways = {COUPLED: replace(replica, colour_groups=()), COLOURED: replica}
    passes = {name: _passes(plan, of_way) for name, of_way in ways.items()}
    steps: dict[str, list[list[float]]] = defaultdict(list)
    actions: dict[str, Callable[[], object]] = {}
    for name in (FORWARD, BACKWARD):
        actions[f"{name} {ALONE}"] = _alone(passes[COUPLED][name], steps[name])
        for way in ways:
            actions[f"{name} {way}"] = _ended(passes[way][name], device)
    for number, (name, action) in enumerate(actions.items()):
        lab.report(number / 10, f"{name} runs once before it is timed")
        action()
    for of_pass in steps.values():
        of_pass.clear()
    turns = take_turns(actions, plan.rounds, plan.budget_s, lab.own_pids)
    own_steps = {name: [median(of_step) for of_step in zip(*of_pass, strict=True)] for name, of_pass in steps.items()}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own_steps)
    return {
        "shares": plan.shares,
        "tokens": _tokens(plan),
        "seconds": turns.seconds,
        "steps": {name: [of_rank[name] for of_rank in by_rank] for name in (FORWARD, BACKWARD)},
        "foreign_cores": turns.foreign_cores,
        "speeds": speeds,
    }


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the notes that ranks under the strict group leave each other."""
    return tempfile.TemporaryDirectory(prefix="ds_hetero_coupling_")


def _tokens(plan: CouplingPlan) -> list[int]:
    placement = stream_placement(plan.schedule, plan.tokens, (Rows(0, 1, ((0, plan.tokens),)),))
    return [placement.tokens(rank) for rank in range(len(plan.shares))]


def _passes(plan: CouplingPlan, replica: Replica) -> dict[str, Callable[[], object]]:
    """Return the forward and the backward of this rank's part of the layer."""
    placement = stream_placement(plan.schedule, plan.tokens, (Rows(0, 1, ((0, plan.tokens),)),))
    rings = batch_layout(placement, placement.rows).rings(replica.rank, causal=False, window=None)
    kernel = select(torch.device("cpu"), torch.float32, HEAD_DIM, None, None)
    context = RingContext(rings, replica.ring_groups, kernel, Scores(HEAD_DIM**-0.5))
    generator = torch.Generator().manual_seed(replica.rank)
    shape = (1, plan.num_heads, placement.tokens(replica.rank), HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    out, lse, remote_blocks = ring_forward(q, k, v, context)
    saved = SavedForward(q, k, v, out, lse)
    return {
        FORWARD: lambda: ring_forward(q, k, v, context),
        BACKWARD: lambda: ring_backward(dout, saved, remote_blocks, context),
    }


def _ended(action: Callable[[], object], device: Any) -> Callable[[], None]:
    """Return the action with a wait at its end for all that its stream waits for."""

    def run() -> None:
        action()
        device.drain()

    return run


def _alone(action: Callable[[], object], steps: list[list[float]]) -> Callable[[], None]:
    """Return the action without messages; every run adds the seconds of its steps to ``steps``."""

    def run() -> None:
        with mock.patch.object(ring_module, "Channel", _NoMessages):
            action()
        ends = [*step_begins[1:], time.perf_counter()]
        steps.append([end - begin for begin, end in zip(step_begins, ends, strict=True)])

    return run


# --- from times to rows -----------------------------------------------------------------------------


def summarize(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every ring and pass: measured times, the recurrence, and what coloured communicators save."""
    rows = []
    for case in cases:
        for name in (FORWARD, BACKWARD):
            seconds = {way: median(case["seconds"][f"{name} {way}"]) for way in (ALONE, COUPLED, COLOURED)}
            slope_s, fixed_s = fitted_steps(case["tokens"], case["steps"][name], backward=name == BACKWARD)

            def finish(
                order: Sequence[int],
                coupled: bool,
                tokens: Sequence[int] = case["tokens"],
                slope_s: Sequence[float] = slope_s,
                fixed_s: Sequence[float] = fixed_s,
                backward: bool = name == BACKWARD,
            ) -> float:
                reordered = ([values[rank] for rank in order] for values in (tokens, slope_s, fixed_s))
                return recurrence_s(*reordered, backward=backward, coupled=coupled)

            given = range(len(case["tokens"]))
            orders = [(0, *later) for later in itertools.permutations(given[1:])]
            best = min(orders, key=lambda order: finish(order, coupled=True))
            rows.append(
                {
                    "shares": case["shares"],
                    "pass": name,
                    **{f"{way}_s": value for way, value in seconds.items()},
                    "coupled_recurrence_s": finish(given, coupled=True),
                    "coloured_recurrence_s": finish(given, coupled=False),
                    "loss_gone": (seconds[COUPLED] - seconds[COLOURED]) / (seconds[COUPLED] - seconds[ALONE]),
                    "best_order": [case["shares"][rank] for rank in best],
                    "best_order_recurrence_s": finish(best, coupled=True),
                    "rounds": len(case["seconds"][f"{name} {COUPLED}"]),
                    "foreign_cores": case["foreign_cores"],
                }
            )
    return rows


def fitted_steps(
    tokens: Sequence[int], steps: Sequence[Sequence[float]], *, backward: bool
) -> tuple[list[float], list[float]]:
    """Return for every rank the seconds per token of a block, and per block, fitted to its steps alone."""
    count = len(tokens)
    slopes, fixed = [], []
    for rank, of_rank in enumerate(steps):
        sources = [(rank + 1 + step) % count if backward else (rank - step) % count for step in range(count)]
        slope, constant = np.polyfit([tokens[source] for source in sources], of_rank, 1)
        slopes.append(float(slope))
        fixed.append(float(constant))
    return slopes, fixed


def recurrence_s(
    tokens: Sequence[int], slope_s: Sequence[float], fixed_s: Sequence[float], *, backward: bool, coupled: bool
) -> float:
    """Return the cost model's time of a pass round the ring, with free transfers."""
    free = np.zeros((1, len(tokens)))
    ring = RingCoefficients(
        start_s=free,
        length=np.array([tokens], dtype=np.float64),
        slope_s=np.array([slope_s]),
        fixed_s=np.array([fixed_s]),
        latency_s=free,
        kv_s=free,
        gradient_s=free,
        shared_kv_s=free,
        shared_gradient_s=free,
        backward=backward,
        contiguous_causal=False,
        coupled=coupled,
    )
    return float(ring_finish_s(ring)[0])
