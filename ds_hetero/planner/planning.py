"""The planner's front door: a cluster, a model and a length in, a schedule and the reasons for it out.

The search proposes, the baselines are always candidates, and the fastest feasible one by the cost model wins; at equal
time the simplest. So a plan is never slower than the best of Ulysses, Ring and all USP meshes under the same model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_hetero.arrays import Ints
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.workload import CostModel, Prediction, Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import ModelSpec
from ds_hetero.planner.search.memory_fit import longest_sequence
from ds_hetero.planner.search.problem import Assignment, Problem, canonical
from ds_hetero.planner.search.search import search
from ds_hetero.planner.search.shares import whole_shares
from ds_hetero.schedule import LAYOUTS, Group, Schedule, ring, ulysses, usp

__all__ = [
    "PlannedSchedule",
    "Rejected",
    "baselines",
    "check_workload",
    "describe",
    "make_problem",
    "plan",
    "plan_workload",
    "schedule_of",
]

SIMPLER = 1e-6  # a baseline this close to the search's best is taken instead
MAX_REJECTED = 4  # alternatives of the search that are explained


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A candidate that was not chosen, and why.

    Args:
        name: what it is, for people. schedule: itself, None where no such schedule exists.
        prediction: None where no such schedule exists.
        reason: one sentence.
    """

    name: str
    schedule: Schedule | None
    prediction: Prediction | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSchedule:
    """The chosen schedule, how long it takes, and how that compares.

    Args:
        schedule: ranks as in the cluster.
        prediction: of the schedule, with its bottleneck and the bound of perfect balance.
        name: what the schedule is, for people.
        search_s: time the search took.
        baselines: the best legal schedule of ``ulysses``, ``ring`` and ``usp``; None where infeasible.
        baseline_names: which one that is, such as ``usp 2x8``.
        baseline_reasons: why, for those that are None.
        rejected: other candidates with reasons.
        idle: ranks that get neither tokens nor heads.
    """

    schedule: Schedule
    prediction: Prediction
    name: str
    search_s: float
    baselines: dict[str, Prediction | None]
    baseline_names: dict[str, str]
    baseline_reasons: dict[str, str]
    rejected: tuple[Rejected, ...]
    idle: tuple[int, ...]

    @property
    def gain(self) -> float | None:
        """Throughput over the strongest baseline; None where no baseline is feasible."""
        rates = [p.tokens_per_s for p in self.baselines.values() if p is not None]
        return self.prediction.tokens_per_s / max(rates) if rates else None

    @property
    def of_bound(self) -> float:
        """Share of the speed at perfect balance with free communication that the schedule reaches."""
        return self.prediction.bound_s / self.prediction.block_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "schedule": self.schedule.to_dict(),
            "name": self.name,
            "search_s": self.search_s,
            "predicted": self.prediction.to_dict(),
            "baselines": {name: p and p.to_dict() for name, p in self.baselines.items()},
            "baseline_names": self.baseline_names,
            "baseline_reasons": self.baseline_reasons,
            "gain": self.gain,
            "of_bound": self.of_bound,
            "idle_ranks": list(self.idle),
            "rejected": [
                {"name": r.name, "block_s": r.prediction and r.prediction.block_s, "reason": r.reason}
                for r in self.rejected
            ],
        }


def plan(
    cluster: Cluster,
    model: ModelSpec,
    seq_len: int,
    *,
    micro_batch: int = 1,
    causal: bool = True,
    cost_model: str = "calibrated",
    layout: str | None = None,
    token_unit: int = 1,
    **training: Any,
) -> PlannedSchedule:
    """Search the best schedule for one replica on a cluster.

    Args:
        cluster: every device works for this replica.
        model: what is trained.
        seq_len: tokens of a sequence over all ranks.
        micro_batch: sequences per micro-batch.
        causal: causal attention.
        cost_model: ``"calibrated"`` or ``"published"``.
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
        token_unit: tokens are handed out in multiples of this.
        training: other fields of `Workload`, such as ``zero_stage``.

    Raises:
        PlanError: nothing fits into memory; by how many GiB on which rank, and what would fit. Or more working ranks
            are asked for than there are tokens.
    """
    workload = Workload(seq_len=seq_len, micro_batch=micro_batch, causal=causal, **training)
    return plan_workload(cluster, model, workload, cost_model=cost_model, layout=layout, token_unit=token_unit)


def plan_workload(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    *,
    cost_model: str = "calibrated",
    layout: str | None = None,
    token_unit: int = 1,
) -> PlannedSchedule:
    """The same for a `Workload`; see `plan`."""
    started = time.perf_counter()
    check_workload(cluster, workload)
    if layout is not None and layout not in LAYOUTS:
        raise PlanError(f"layout {layout!r} is unknown; it is one of {', '.join(LAYOUTS)}.")
    if not 1 <= token_unit <= workload.seq_len:
        raise PlanError(f"token_unit must be between 1 and seq_len={workload.seq_len}, got {token_unit!r}.")
    cost = make_cost_model(cost_model, cluster, model, workload)
    problem, rank_of = make_problem(cost, layout=layout, token_unit=token_unit)
    candidates = [schedule_of(problem, found, rank_of) for found in search(problem)]
    searched = [(schedule, cost.predict(schedule)) for schedule in candidates[: 1 + MAX_REJECTED]]
    named, missing = baselines(cost)
    best = _choose([*((s, p) for s, p in searched), *named.values()], len(searched))
    if best is None:
        raise PlanError(_does_not_fit(cost, [p for _, p in (*searched, *named.values())]))
    schedule, prediction = best
    best_of = {kind: _best_of(kind, named) for kind in ("ulysses", "ring", "usp")}
    return PlannedSchedule(
        schedule=schedule,
        prediction=prediction,
        name=describe(schedule, cluster),
        search_s=time.perf_counter() - started,
        baselines={kind: named[name][1] if name else None for kind, name in best_of.items()},
        baseline_names={kind: name for kind, name in best_of.items() if name},
        baseline_reasons={kind: _why_not(kind, named, missing) for kind, name in best_of.items() if not name},
        rejected=tuple(_rejected(cluster, schedule, prediction, searched, named, missing)),
        idle=tuple(r for g in schedule.groups for r, t, h in zip(g.ranks, g.tokens, g.heads, strict=True) if not t + h),
    )


def check_workload(cluster: Cluster, workload: Workload) -> None:
    """Refuse numbers that make no sense, before anything is computed with them.

    Raises:
        PlanError: the field, its value and what would be accepted.
    """
    for name in ("seq_len", "micro_batch", "micro_batches", "data_parallel"):
        value = getattr(workload, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name} must be a whole number >= 1, got {value!r}.")
    if workload.zero_stage not in (0, 1, 2, 3):
        raise PlanError(f"zero_stage must be 0, 1, 2 or 3, got {workload.zero_stage!r}.")
    weights = workload.zero_weights
    if weights is not None and len(weights) != cluster.num_ranks:
        raise PlanError(f"zero_weights has {len(weights)} entries, the cluster {cluster.num_ranks} ranks.")
    if workload.seq_len < cluster.num_ranks:
        raise PlanError(
            f"{cluster.num_ranks} ranks cannot share a sequence of {workload.seq_len} tokens. "
            f"Use at least {cluster.num_ranks} tokens or fewer sequence-parallel ranks."
        )


def make_problem(
    cost: CostModel, *, layout: str | None = None, token_unit: int = 1, head_units: tuple[int, ...] = ()
) -> tuple[Problem, Ints]:
    """The search problem of a cost model, in canonical order.

    Args:
        cost: what is minimized.
        layout: ``"contiguous"``, or zigzag for anything else.
        token_unit: tokens are handed out in multiples of this.
        head_units: granularities of head cuts; left out, whole KV heads, which then travel once, and single heads.

    Returns:
        problem, and the rank of every canonical index.
    """
    cluster, workload, rank_of = canonical(cost.cluster, cost.workload)
    moved = make_cost_model(cost.name, cluster, cost.model, workload)
    per_kv_head = cost.model.num_heads // cost.model.num_kv_heads
    units = head_units or tuple(sorted({per_kv_head, 1}, reverse=True))
    return Problem(cost=moved, token_unit=token_unit, head_units=units, zigzag=layout != "contiguous"), rank_of


def schedule_of(problem: Problem, found: Assignment, rank_of: Ints) -> Schedule:
    """An assignment as a schedule of the cluster's own ranks, with whole tokens."""
    tokens = whole_shares(found.tokens, problem.seq_len, problem.token_unit)
    groups = tuple(
        Group(
            ranks=tuple(rank_of[group].tolist()),
            tokens=tuple(tokens[group].tolist()),
            heads=tuple(found.heads[group].tolist()),
        )
        for group in found.groups
    )
    return Schedule(
        num_heads=problem.num_heads,
        num_kv_heads=problem.cost.model.num_kv_heads,
        groups=groups,
        layout="zigzag" if problem.zigzag and len(groups) > 1 else "contiguous",
    )


def baselines(cost: CostModel) -> tuple[dict[str, tuple[Schedule, Prediction]], dict[str, str]]:
    """Ulysses, Ring and every legal USP mesh by name, and the reasons for those that do not exist.

    Other systems want whole heads, equal on all ranks, so ``ulysses_size`` divides ranks and heads.
    """
    num_ranks, seq_len = cost.cluster.num_ranks, cost.workload.seq_len
    heads = (cost.model.num_heads, cost.model.num_kv_heads)
    missing: dict[str, str] = {}
    schedules: dict[str, Schedule] = {}
    if seq_len < num_ranks:
        missing = dict.fromkeys(("ulysses", "ring", "usp"), f"{num_ranks} ranks cannot share {seq_len} tokens")
        return {}, missing
    if heads[0] % num_ranks:
        missing["ulysses"] = f"num_heads={heads[0]} is not a multiple of {num_ranks} ranks"
    else:
        schedules["ulysses"] = ulysses(num_ranks, *heads)
    schedules["ring"] = ring(num_ranks, *heads)
    sizes = [n for n in range(2, num_ranks) if num_ranks % n == 0 and heads[0] % n == 0]
    for size in sizes:
        schedules[f"usp {num_ranks // size}x{size}"] = usp(num_ranks, *heads, size)
    if not sizes:
        missing["usp"] = f"no number between 1 and {num_ranks} divides both {num_ranks} ranks and {heads[0]} heads"
    return {name: (schedule, cost.predict(schedule)) for name, schedule in schedules.items()}, missing


def describe(schedule: Schedule, cluster: Cluster) -> str:
    """A schedule in a line: ``ring of 3 groups: 2 x (1 H100-SXM-80GB + 3 L40S), 8 A100-SXM-80GB``."""
    idle = {r for g in schedule.groups for r, t, h in zip(g.ranks, g.tokens, g.heads, strict=True) if not t + h}
    makeups: dict[str, int] = {}
    for group in schedule.ring_groups:
        names = [cluster.devices[rank].name for rank in group.ranks if rank not in idle]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        makeup = " + ".join(f"{count} {name}" for name, count in counts.items())
        makeups[makeup] = makeups.get(makeup, 0) + 1
    listed = ", ".join(f"{count} x ({makeup})" if count > 1 else makeup for makeup, count in makeups.items())
    shape = "one group" if schedule.ring_size == 1 else f"ring of {schedule.ring_size} groups"
    return f"{shape}: {listed}" + (f"; {len(idle)} idle" if idle else "")


# --- choosing and explaining --------------------------------------------------------------------------


def _choose(candidates: Sequence[tuple[Schedule, Prediction]], num_searched: int) -> tuple[Schedule, Prediction] | None:
    """The fastest feasible candidate; a baseline if it is as fast as any."""
    feasible = [(i, found) for i, found in enumerate(candidates) if found[1].feasible]
    if not feasible:
        return None
    fastest = min(found[1].iteration_s for _, found in feasible)
    close = [(i, found) for i, found in feasible if found[1].iteration_s <= fastest * (1 + SIMPLER)]
    return min(close, key=lambda item: (item[0] < num_searched, item[1][1].iteration_s, item[0]))[1]


def _best_of(kind: str, named: dict[str, tuple[Schedule, Prediction]]) -> str | None:
    feasible = [name for name, found in named.items() if name.split()[0] == kind and found[1].feasible]
    return min(feasible, key=lambda name: named[name][1].iteration_s, default=None)


def _why_not(kind: str, named: dict[str, tuple[Schedule, Prediction]], missing: dict[str, str]) -> str:
    if kind in missing:
        return missing[kind]
    found = [prediction for name, (_, prediction) in named.items() if name.split()[0] == kind]
    return str(min(found, key=lambda p: max(p.memory_bytes)).reason)


def _rejected(
    cluster: Cluster,
    chosen: Schedule,
    best: Prediction,
    searched: Sequence[tuple[Schedule, Prediction]],
    named: dict[str, tuple[Schedule, Prediction]],
    missing: dict[str, str],
) -> Iterator[Rejected]:
    for name, (schedule, prediction) in named.items():
        if schedule != chosen:
            yield _compared(name, schedule, prediction, best)
    for name, reason in missing.items():
        yield Rejected(name=name, schedule=None, prediction=None, reason=reason)
    for schedule, prediction in searched:
        if schedule != chosen:
            yield _compared(describe(schedule, cluster), schedule, prediction, best)


def _compared(name: str, schedule: Schedule, prediction: Prediction, best: Prediction) -> Rejected:
    if not prediction.feasible:
        reason = f"does not fit: {prediction.reason}"
    else:
        slower = prediction.iteration_s / best.iteration_s - 1
        reason = f"{100 * slower:.1f} % slower; {prediction.bottleneck.text}"
    return Rejected(name=name, schedule=schedule, prediction=prediction, reason=reason)


def _does_not_fit(cost: CostModel, predictions: Sequence[Prediction]) -> str:
    """By how much the best attempt misses, on which rank, and what would fit."""
    work = cost.workload

    def excess(prediction: Prediction) -> float:
        return float((np.array(prediction.memory_bytes) - cost.capacity_bytes_D).max())

    nearest = min(predictions, key=excess)
    longest = longest_sequence(cost)
    remedies = [f"sequences of up to about {longest} tokens"] if longest else []
    if work.zero_stage < 3:
        remedies.append("zero_stage=3")
    if not work.activation_checkpointing:
        remedies.append("activation checkpointing")
    if not work.tiled_logits:
        remedies.append("a tiled loss")
    if work.micro_batch > 1:
        remedies.append("micro_batch=1")
    remedies.append("more or larger devices")
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.reason}. What would fit or help: {', '.join(remedies)}."
    )
