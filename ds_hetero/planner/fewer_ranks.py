"""Advice: fewer devices. A job without some of its ranks may be faster than the best schedule of all.

A schedule may leave ranks idle, but they stay in the job: ZeRO's gathers and reductions go over every rank, whatever
the schedule, so that a device behind a slow link can cost more than it adds. Only a job without it ends that.
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
from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.problem import Problem
from ds_hetero.planner.search.search import first_look

# Share of the time that advice has to save to be given: noise of two predictions. Chosen, never measured.
MIN_ADVICE_GAIN = 0.05
_LEFT_OUT_ROUNDS = 3  # of leaving out more ranks; chosen, never measured
_MOST_NODES_ALONE = 64  # up to which each node is left out, or kept, alone; chosen, never measured
# Sets of ranks that are searched in a round, the most promising ones; fewer of many ranks. Chosen, never measured.
_SEARCHED, _SEARCHED_OF_MANY, _MANY_TO_SEARCH = 4, 1, 64
# Budgets of a probe and of a longer one, in seconds of `EvaluationBudget`, and how many times as slow as the longer
# one, or as the whole search, a probe seldom is. Chosen, never measured.
_PROBE_S, _PROBE_SLACK = 0.01, 1.4
_LONG_PROBE_S, _LONG_PROBE_SLACK = 0.03, 1.01


@dataclass(frozen=True, kw_only=True)
class FewerRanks:
    """A job without some ranks that is faster than the one of all."""

    left_out: tuple[int, ...]  # these ranks
    planned: PlannedSchedule  # the schedule of the others, which are numbered from 0 in their order

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "ranks": list(self.left_out),
            "iteration_s": self.planned.prediction.iteration_s,
            "schedule": self.planned.schedule.to_dict(),
        }


class _Part(NamedTuple):
    """Ranks to keep."""

    least_s: float  # a step that no schedule of theirs undercuts
    ranks: tuple[int, ...]


def faster_with_fewer_ranks(cost: CostModel, planned: PlannedSchedule, layout: str | None = None) -> FewerRanks | None:
    """Search ranks without which the job is faster by at least 5 %; None where there are none.

    Nothing is searched unless what ZeRO moves over all ranks costs that much. Tried are the ranks that the schedule
    leaves idle, every node, all nodes but one, and the slowest kinds of devices; then the same of the ranks kept.

    Args:
        cost: the cost model of all ranks; of one replica, with ZeRO's partition over it alone.
    """
    if cost.workload.data_parallel > 1 or cost.workload.zero_cluster is not None:
        return None
    kept, best = tuple(range(cost.cluster.num_ranks)), planned
    for _ in range(_LEFT_OUT_ROUNDS):
        limit_s = (1 - MIN_ADVICE_GAIN) * best.prediction.iteration_s
        part = _fastest_of(cost, _most_promising(cost, best, limit_s), limit_s, layout)
        faster = _planned(cost, part, layout)
        if faster is None or faster.prediction.iteration_s >= limit_s:
            break
        kept, best = tuple(kept[rank] for rank in part), faster
        cost = _cost_of(cost, part)
    left_out = tuple(sorted({*planned.schedule.ranks}.difference(kept)))
    return FewerRanks(left_out=left_out, planned=best) if left_out else None


def _most_promising(cost: CostModel, planned: PlannedSchedule, limit_s: float) -> list[_Part]:
    """Parts of the ranks that may take less than ``limit_s``, most promising first.

    A schedule of theirs is one of all ranks too, with the others idle, where it takes no less than the best one. What
    it takes less without them is at most the time that is the same under any schedule.
    """
    all_ranks = range(cost.cluster.num_ranks)
    kept = set()
    for left_out in _left_out(cost.cluster, planned):
        kept.add(tuple(rank for rank in all_ranks if rank not in left_out))
    now_s, standing_s = planned.prediction.iteration_s, _standing_s(cost)
    parts = []
    for ranks in kept:
        if 0 < len(ranks) < len(all_ranks):
            part_cost = _cost_of(cost, ranks)
            least_s = max(_least_s(part_cost), now_s - standing_s + _standing_s(part_cost))
            parts.append(_Part(least_s, ranks))
    promising = sorted(part for part in parts if part.least_s < limit_s)
    return promising[: _SEARCHED if len(all_ranks) <= _MANY_TO_SEARCH else _SEARCHED_OF_MANY]


def _fastest_of(cost: CostModel, parts: Sequence[_Part], limit_s: float, layout: str | None) -> tuple[int, ...]:
    """The ranks of the part that is fastest in a probe; none where none may take less than ``limit_s``."""
    fastest_ranks: tuple[int, ...] = ()
    fastest_s = limit_s * _LONG_PROBE_SLACK
    for least_s, ranks in parts:
        if least_s >= fastest_s:
            continue
        part_cost = _cost_of(cost, ranks)
        problem, rank_of = make_problem(part_cost, layout=layout)
        if _probe_s(part_cost, problem, rank_of, _PROBE_S) < _PROBE_SLACK * fastest_s:
            time_s = _probe_s(part_cost, problem, rank_of, _LONG_PROBE_S)
            if time_s < fastest_s:
                fastest_ranks, fastest_s = ranks, time_s
    return fastest_ranks


def _left_out(cluster: Cluster, planned: PlannedSchedule) -> Iterator[Sequence[int]]:
    """Ranks to leave out: the idle ones, each node, all nodes but one, the slowest kinds of devices."""
    yield planned.idle_ranks
    num_nodes = len(cluster.nodes)
    if 1 < num_nodes <= _MOST_NODES_ALONE:
        for node in range(num_nodes):
            yield np.flatnonzero(cluster.node_of_rank == node).tolist()
            yield np.flatnonzero(cluster.node_of_rank != node).tolist()
    peaks = np.array([device.peak_flops_per_s for device in cluster.devices])
    for peak in distinct(peaks)[:-1]:
        yield np.flatnonzero(peaks <= peak).tolist()


def _least_s(cost: CostModel) -> float:
    """A step that no schedule undercuts: perfect balance, free exchanges, and what is outside the blocks."""
    work, loss_s_D = cost.workload, cost.loss_s_per_token_D
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    balanced_loss_s = work.seq_len / np.sum(1 / loss_s_D) if loss_s_D.all() else 0.0
    loss_s = max(outside.get("loss_s", 0.0), balanced_loss_s)
    return float(work.micro_batches * (cost.model.num_layers * cost.least_block_s + loss_s) + once_s(outside))


def _standing_s(cost: CostModel) -> float:
    """Time of a step that is the same under any schedule: of ZeRO, the host's launches, the optimizer."""
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    of_micro_batch = cost.model.num_layers * cost.floor_s + outside.get("loss_s", 0.0)
    return cost.workload.micro_batches * of_micro_batch + once_s(outside)


def _probe_s(cost: CostModel, problem: Problem, rank_of: Ints, budget_s: float) -> float:
    """Time of a step by a short search of its problem; infinite where it finds nothing that fits."""
    assignment = first_look(problem, EvaluationBudget(budget_s))
    if assignment is None:
        return np.inf
    return cost.predict(schedule_of(problem, assignment, rank_of)).iteration_s


def _cost_of(cost: CostModel, ranks: Sequence[int]) -> CostModel:
    """The cost model of a job of these ranks alone."""
    work = cost.workload
    left_out = set(range(cost.cluster.num_ranks)).difference(ranks)
    if work.zero_weights is not None:
        work = replace(work, zero_weights=tuple(work.zero_weights[rank] for rank in ranks))
    return make_cost_model(cost.name, cost.cluster.without(left_out), cost.model, work)


def _planned(cost: CostModel, ranks: Sequence[int], layout: str | None) -> PlannedSchedule | None:
    """The best schedule of these ranks alone; None where nothing fits, and for no ranks."""
    if not ranks:
        return None
    reduced = _cost_of(cost, ranks)
    try:
        return plan(reduced.cluster, reduced.model, reduced.workload, cost_model=reduced.name, layout=layout)
    except PlanError:
        return None
