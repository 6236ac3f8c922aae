"""Advice that goes beyond the best schedule of all devices: fewer devices, or another ZeRO stage.

A schedule may leave ranks idle, but they stay in the job: ZeRO's gathers and reductions go over every rank, whatever
the schedule, so that a device behind a slow link can cost more than it adds. Only a job without it ends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import distinct
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, once_s
from ds_hetero.errors import PlanError
from ds_hetero.planner.planned import PlannedSchedule
from ds_hetero.planner.planning import plan
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import first_look

_WORTH = 0.95  # of the time: a smaller gain is not told
_ROUNDS = 3  # of leaving out more
_TRIED = 4  # sets of ranks in a round, the most promising ones
_TRIED_OF_MANY, _MANY_RANKS = 1, 64
_FIRST_LOOK_BUDGET_S, _FIRST_LOOK = 0.01, 1.1  # of a search that says which sets are worth a whole one
_MOST_NODES = 64  # each of which is left out, or kept, alone


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


@dataclass(frozen=True, kw_only=True)
class OtherStage:
    """A ZeRO stage under which the same schedule is faster, and fits."""

    stage: int  # of ZeRO
    iteration_s: float  # time of an optimizer step

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"stage": self.stage, "iteration_s": self.iteration_s}


def faster_with_fewer_ranks(cost: CostModel, planned: PlannedSchedule, layout: str | None = None) -> FewerRanks | None:
    """Search ranks without which the job is faster by at least 5 %; None where there are none.

    Nothing is searched unless ZeRO's traffic over all ranks costs that much. Tried are the ranks that the schedule
    leaves idle, every node, all nodes but one, and the slowest kinds of devices; then the same of what is left.

    Args:
        cost: the cost model of all ranks; of one replica, with ZeRO's partition over it alone.
        planned: the best schedule of all ranks.
        layout: as for `plan`.
    """
    if cost.workload.data_parallel > 1 or cost.workload.zero_cluster is not None:
        return None
    left, best = tuple(range(cost.cluster.num_ranks)), planned
    for _ in range(_ROUNDS):
        limit_s = _WORTH * best.prediction.iteration_s
        if _without_zero_s(cost, best) >= limit_s:
            break
        tried = _most_promising(cost, best, limit_s)
        tried = [kept for kept in tried if _first_look_s(_cost_of(cost, kept), layout) < _FIRST_LOOK * limit_s]
        found = [(best_of, kept) for kept in tried if (best_of := _planned(cost, kept, layout)) is not None]
        faster, kept = min(found, key=lambda each: each[0].prediction.iteration_s, default=(best, ()))
        if not kept or faster.prediction.iteration_s >= limit_s:
            break
        left, best = tuple(left[rank] for rank in kept), faster
        cost = _cost_of(cost, kept)
    left_out = tuple(sorted({*planned.schedule.ranks}.difference(left)))
    return FewerRanks(left_out=left_out, planned=best) if left_out else None


def faster_zero_stage(cost: CostModel, planned: PlannedSchedule) -> OtherStage | None:
    """The ZeRO stage under which the schedule is fastest, if that is 5 % faster than the workload's; else None."""
    times: dict[int, float] = {}
    for stage in range(4):
        other = make_cost_model(cost.name, cost.cluster, cost.model, replace(cost.workload, zero_stage=stage))
        prediction = other.predict(planned.schedule)
        if prediction.feasible:
            times[stage] = prediction.iteration_s
    stage = min(times, key=lambda each: times[each], default=cost.workload.zero_stage)
    if times.get(stage, np.inf) >= _WORTH * planned.prediction.iteration_s:
        return None
    return OtherStage(stage=stage, iteration_s=times[stage])


def _without_zero_s(cost: CostModel, planned: PlannedSchedule) -> float:
    """Time of a step if ZeRO moved nothing."""
    workload = replace(cost.workload, zero_cluster=cost.cluster.subset([0]))
    return make_cost_model(cost.name, cost.cluster, cost.model, workload).predict(planned.schedule).iteration_s


def _most_promising(cost: CostModel, planned: PlannedSchedule, limit_s: float) -> list[tuple[int, ...]]:
    """Ranks to keep, of which no schedule is known to take ``limit_s`` or longer; the most promising first."""
    every = range(cost.cluster.num_ranks)
    kept = {tuple(rank for rank in every if rank not in out) for out in _left_out(cost.cluster, planned)}
    least_s = {ranks: _least_s(_cost_of(cost, ranks)) for ranks in kept if 0 < len(ranks) < len(every)}
    promising = sorted(
        (ranks for ranks in least_s if least_s[ranks] < limit_s), key=lambda ranks: (least_s[ranks], ranks)
    )
    return promising[: _TRIED if len(every) <= _MANY_RANKS else _TRIED_OF_MANY]


def _left_out(cluster: Cluster, planned: PlannedSchedule) -> Iterator[Sequence[int]]:
    yield planned.idle_ranks
    nodes = range(len(cluster.nodes)) if 1 < len(cluster.nodes) <= _MOST_NODES else []
    for node in nodes:
        yield np.flatnonzero(cluster.node_of_rank == node).tolist()
        yield np.flatnonzero(cluster.node_of_rank != node).tolist()
    peaks = np.array([device.peak_flops_per_s for device in cluster.devices])
    for peak in distinct(peaks)[:-1]:
        yield np.flatnonzero(peaks <= peak).tolist()


def _least_s(cost: CostModel) -> float:
    """A time that no schedule undercuts: perfect balance, free exchanges, and what is outside the blocks."""
    work, loss_s_D = cost.workload, cost.loss_s_per_token_D
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    loss_s = max(outside.get("loss_s", 0.0), work.seq_len / np.sum(1 / loss_s_D) if loss_s_D.all() else 0.0)
    return float(work.micro_batches * (cost.model.num_layers * cost.least_block_s + loss_s) + once_s(outside))


def _first_look_s(cost: CostModel, layout: str | None) -> float:
    """Time of a step by a short search; infinite where it finds nothing that fits."""
    problem, rank_of = make_problem(cost, layout=layout)
    found = first_look(problem, EvaluationBudget(_FIRST_LOOK_BUDGET_S))
    return np.inf if found is None else cost.predict(schedule_of(problem, found, rank_of)).iteration_s


def _cost_of(cost: CostModel, ranks: Sequence[int]) -> CostModel:
    """The cost model of a job of these ranks alone."""
    work, left_out = cost.workload, set(range(cost.cluster.num_ranks)).difference(ranks)
    if work.zero_weights is not None:
        work = replace(work, zero_weights=tuple(work.zero_weights[rank] for rank in ranks))
    return make_cost_model(cost.name, cost.cluster.without(left_out), cost.model, work)


def _planned(cost: CostModel, ranks: Sequence[int], layout: str | None) -> PlannedSchedule | None:
    """The best schedule of these ranks alone; None where nothing fits."""
    reduced = _cost_of(cost, ranks)
    try:
        return plan(reduced.cluster, reduced.model, reduced.workload, cost_model=reduced.name, layout=layout)
    except PlanError:
        return None
