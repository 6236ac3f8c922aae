"""Advise to leave out ranks if a job without them is faster than the best schedule of all ranks.

A schedule may leave ranks idle, but they stay in the job: ZeRO gathers and reduces over every rank, whatever the
schedule. So a device behind a slow link can cost more than it adds, and only a job without the device avoids that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Ints, distinct
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, once_s
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.quick import step_lower_bound_s
from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.problem import Problem
from ds_hetero.planner.search.search import first_look

# Share of the time that advice has to save; smaller gains are within the error of two predictions. Chosen, never
# measured.
MIN_ADVICE_GAIN = 0.05
_LEFT_OUT_ROUNDS = 3  # rounds in which further ranks are left out; chosen, never measured
_MAX_NODES_ALONE = 64  # nodes up to which every node is left out, or kept, alone; chosen, never measured
# Most promising sets of ranks that are searched in a round; fewer with more ranks. Chosen, never measured.
_SEARCHED, _SEARCHED_OF_MANY, _MANY_TO_SEARCH = 4, 1, 64
# Budgets of a short and of a longer probe, in seconds of `EvaluationBudget`. The slack is how much slower than the
# longer probe, or than the whole search, the result of a probe may be. Chosen, never measured.
_PROBE_S, _PROBE_SLACK = 0.01, 1.4
_LONG_PROBE_S, _LONG_PROBE_SLACK = 0.03, 1.01


@dataclass(frozen=True, kw_only=True)
class FewerRanks:
    """A job without some ranks that is faster than the job of all ranks."""

    left_out: tuple[int, ...]  # ranks to leave out
    planned: PlannedSchedule  # schedule of the remaining ranks, numbered from 0 in their order

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "ranks": list(self.left_out),
            "iteration_s": self.planned.prediction.iteration_s,
            "schedule": self.planned.schedule.to_dict(),
        }


class _KeptRanks(NamedTuple):
    """Ranks of a smaller job, and a lower bound of its step, by which a list of such jobs is sorted."""

    least_s: float  # lower bound of a step on these ranks
    ranks: tuple[int, ...]


def faster_with_fewer_ranks(cost: CostModel, planned: PlannedSchedule, layout: str | None = None) -> FewerRanks | None:
    """Search ranks without which the job is faster by `MIN_ADVICE_GAIN` or more; None if there are none.

    The ranks that are tried are those that the schedule leaves idle, every node, all nodes but one, and the slowest
    kinds of devices; then the same among the remaining ranks. Most sets are ruled out by a bound, unless ZeRO's traffic
    over all ranks takes a large part of the step.

    Args:
        cost: cost model of all ranks, for a job of one replica.
        planned: the best schedule of all ranks.
        layout: ``"zigzag"`` or ``"contiguous"``; None for the planner's choice.
    """
    has_weights_of_ranks = isinstance(cost.workload.experts, tuple)
    if cost.workload.data_parallel > 1 or cost.workload.zero_cluster is not None or has_weights_of_ranks:
        return None
    kept, best = tuple(range(cost.cluster.num_ranks)), planned
    for _ in range(_LEFT_OUT_ROUNDS):
        limit_s = (1 - MIN_ADVICE_GAIN) * best.prediction.iteration_s
        fastest_ranks = _fastest_of(cost, _most_promising(cost, best, limit_s), limit_s, layout)
        faster = _planned(cost, fastest_ranks, layout)
        if faster is None or faster.prediction.iteration_s >= limit_s:
            break
        kept, best = tuple(kept[rank] for rank in fastest_ranks), faster
        cost = _cost_of(cost, fastest_ranks)
    left_out = tuple(sorted({*planned.schedule.ranks}.difference(kept)))
    return FewerRanks(left_out=left_out, planned=best) if left_out else None


def _most_promising(cost: CostModel, planned: PlannedSchedule, limit_s: float) -> list[_KeptRanks]:
    """Return sets of ranks that may take less than ``limit_s``, most promising first.

    Every schedule of a set is also a schedule of all ranks, with the other ranks idle; there it takes at least as long
    as the best schedule. Without the idle ranks it can be faster only by the time that does not depend on the schedule
    (`_fixed_s`). That gives a lower bound.
    """
    all_ranks = range(cost.cluster.num_ranks)
    kept = set()
    for left_out in _left_out(cost.cluster, planned):
        kept.add(tuple(rank for rank in all_ranks if rank not in left_out))
    now_s, fixed_s = planned.prediction.iteration_s, _fixed_s(cost)
    sets = []
    for ranks in kept:
        if 0 < len(ranks) < len(all_ranks):
            reduced_cost = _cost_of(cost, ranks)
            least_s = max(step_lower_bound_s(reduced_cost), now_s - fixed_s + _fixed_s(reduced_cost))
            sets.append(_KeptRanks(least_s, ranks))
    promising = sorted(kept_ranks for kept_ranks in sets if kept_ranks.least_s < limit_s)
    return promising[: _SEARCHED if len(all_ranks) <= _MANY_TO_SEARCH else _SEARCHED_OF_MANY]


def _fastest_of(cost: CostModel, sets: Sequence[_KeptRanks], limit_s: float, layout: str | None) -> tuple[int, ...]:
    """Return the set of ranks that is fastest by short searches; empty if none comes near ``limit_s`` or below."""
    fastest_ranks: tuple[int, ...] = ()
    fastest_s = limit_s * _LONG_PROBE_SLACK
    for least_s, ranks in sets:
        if least_s >= fastest_s:
            continue
        reduced_cost = _cost_of(cost, ranks)
        problem, rank_of = make_problem(reduced_cost, layout=layout)
        if _probe_s(reduced_cost, problem, rank_of, _PROBE_S) < _PROBE_SLACK * fastest_s:
            time_s = _probe_s(reduced_cost, problem, rank_of, _LONG_PROBE_S)
            if time_s < fastest_s:
                fastest_ranks, fastest_s = ranks, time_s
    return fastest_ranks


def _left_out(cluster: Cluster, planned: PlannedSchedule) -> Iterator[Sequence[int]]:
    """Yield ranks to leave out: the idle ones, each node, all nodes but one, the slowest kinds of devices."""
    yield planned.idle_ranks
    num_nodes = len(cluster.nodes)
    if 1 < num_nodes <= _MAX_NODES_ALONE:
        for node in range(num_nodes):
            yield np.flatnonzero(cluster.node_of_rank == node).tolist()
            yield np.flatnonzero(cluster.node_of_rank != node).tolist()
    peaks = np.array([device.peak_flops_per_s for device in cluster.devices])
    for peak in distinct(peaks)[:-1]:
        yield np.flatnonzero(peaks <= peak).tolist()


def _fixed_s(cost: CostModel) -> float:
    """Time of a step that does not depend on the schedule: ZeRO's traffic, launches of the host, the optimizer."""
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    micro_batch_s = cost.model.num_layers * cost.floor_s + outside.get("loss_s", 0.0)
    return cost.workload.micro_batches * micro_batch_s + once_s(outside)


def _probe_s(cost: CostModel, problem: Problem, rank_of: Ints, budget_s: float) -> float:
    """Return the time of a step by a short search; infinite if it finds nothing that fits."""
    assignment = first_look(problem, EvaluationBudget(budget_s))
    if assignment is None:
        return np.inf
    return cost.predict(schedule_of(problem, assignment, rank_of)).iteration_s


def _cost_of(cost: CostModel, ranks: Sequence[int]) -> CostModel:
    """Return the cost model of a job with these ranks alone."""
    work = cost.workload
    left_out = set(range(cost.cluster.num_ranks)).difference(ranks)
    if work.zero_weights is not None:
        work = replace(work, zero_weights=tuple(work.zero_weights[rank] for rank in ranks))
    return make_cost_model(cost.name, cost.cluster.without(left_out), cost.model, work)


def _planned(cost: CostModel, ranks: Sequence[int], layout: str | None) -> PlannedSchedule | None:
    """Return the best schedule of these ranks alone; None if nothing fits, or for no ranks."""
    if not ranks:
        return None
    reduced = _cost_of(cost, ranks)
    try:
        return plan(reduced.cluster, reduced.model, reduced.workload, cost_model=reduced.name, layout=layout)
    except PlanError:
        return None
