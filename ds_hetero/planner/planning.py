"""The planner's front door: a cluster, a model and a workload in, a schedule and the reasons for it out.

The search proposes, the baselines are always candidates, and the fastest one that fits wins; at equal time the simplest
one. So under the cost model a planned schedule is never slower than the best of Ulysses, Ring and all USP meshes.

Every strategy by name: the planner's choice, the baselines, and published planners of schedules.

Advice that goes beyond the best schedule of all devices: fewer devices, or another ZeRO stage.

A schedule may leave ranks idle, but they stay in the job: ZeRO's gathers and reductions go over every rank, whatever
the schedule, so that a device behind a slow link can cost more than it adds. Only a job without it ends that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Ints, distinct
from ds_hetero.common.reading import JsonDict, shortened
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, once_s
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import MemoryPlanError, PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.planned import (
    AS_FAST,
    Baselines,
    PlannedSchedule,
    Rejected,
    ScheduleCandidate,
    compared,
    describe,
    does_not_fit,
    fastest,
    idle_ranks,
)
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.problem import Problem
from ds_hetero.planner.search.search import first_look, search
from ds_hetero.values.baselines import COMPARED, STRATEGIES, even, proportional
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import LAYOUTS, Schedule

if TYPE_CHECKING:
    from ds_hetero.planner.published.interface import ProfileTable

MAX_REJECTED = 4  # alternatives of the search that are explained


def plan(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload | int,
    *,
    cost_model: str = "calibrated",
    layout: str | None = None,
    token_unit: int = 1,
    planner: str | None = None,
) -> PlannedSchedule:
    """Search the best schedule for one replica on a cluster.

    Args:
        cluster: every device works for this replica.
        workload: the batch and how DeepSpeed trains it; a number stands for a `Workload` of that many tokens.
        cost_model: ``"calibrated"`` or ``"published"``.
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
        token_unit: tokens are handed out in multiples of this.
        planner: a published planner of schedules that takes the place of the search; the baselines are only compared
            with then.

    Returns:
        The schedule with its prediction and its reasons, and as ``plan`` the `Plan` that a job runs.

    Raises:
        MemoryPlanError: nothing fits into memory; the message says by how many GiB on which rank, and what would fit.
        PlanError: there are fewer tokens than ranks, an argument is out of range, or the planner is unknown or cannot
            describe the cluster or the model.
    """
    started = time.perf_counter()
    if not isinstance(workload, Workload):
        workload = Workload(seq_len=workload)
    _check_arguments(cluster, workload, layout, token_unit)
    cost = make_cost_model(cost_model, cluster, model, workload)
    baselines = Baselines.under(cost)
    if planner is None:
        searched = searched_candidates(cost, layout, token_unit)
        best = fastest(searched, baselines.candidates)
    else:
        searched = [_of_published(planner, cost, layout)]
        best = fastest(searched, ())
    if best is None:
        raise MemoryPlanError(does_not_fit(cost, (*searched, *baselines.candidates)))
    best_of = {kind: baselines.best(kind) for kind in COMPARED}
    return PlannedSchedule(
        plan=Plan.of_replicas((best.schedule,)),
        prediction=best.prediction,
        name=describe(best.schedule, cluster),
        search_s=time.perf_counter() - started,
        step_s=best.prediction.iteration_s,
        tokens=workload.step_tokens,
        baselines={kind: candidate.prediction if candidate else None for kind, candidate in best_of.items()},
        baseline_names={kind: candidate.name for kind, candidate in best_of.items() if candidate},
        baseline_reasons={kind: baselines.why_not(kind) for kind, candidate in best_of.items() if not candidate},
        planner=planner,
        rejected=tuple(_rejected(best, describe(best.schedule, cluster), searched, baselines)),
        idle_ranks=idle_ranks(best.schedule),
    )


def check_workload(cluster: Cluster, workload: Workload) -> None:
    """Refuse numbers that make no sense before anything is computed. Raises `PlanError`: the field and its value."""
    weights = workload.zero_weights
    if weights is not None and len(weights) != cluster.num_ranks:
        raise PlanError(f"zero_weights has {len(weights)} entries, the cluster {cluster.num_ranks} ranks.")
    if workload.seq_len < cluster.num_ranks:
        raise PlanError(
            f"{cluster.num_ranks} ranks cannot share a sequence of {workload.seq_len} tokens. "
            f"Use at least {cluster.num_ranks} tokens or fewer sequence-parallel ranks."
        )


def _check_arguments(cluster: Cluster, workload: Workload, layout: str | None, token_unit: int) -> None:
    check_workload(cluster, workload)
    if layout is not None and layout not in LAYOUTS:
        raise PlanError(f"layout {shortened(layout)} is unknown; it is one of {', '.join(LAYOUTS)}.")
    if not 1 <= token_unit <= workload.seq_len:
        raise PlanError(f"token_unit must be between 1 and seq_len={workload.seq_len}, got {shortened(token_unit)}.")


def searched_candidates(cost: CostModel, layout: str | None = None, token_unit: int = 1) -> list[ScheduleCandidate]:
    """The best schedules that the search finds, best first; none if nothing fits into memory.

    Args:
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
    """
    problem, rank_of = make_problem(cost, layout=layout, token_unit=token_unit)
    found = search(problem)[: 1 + MAX_REJECTED]
    return [ScheduleCandidate.of(schedule_of(problem, assignment, rank_of), cost) for assignment in found]


def _of_published(name: str, cost: CostModel, layout: str | None) -> ScheduleCandidate:
    """The schedule of a published planner."""
    from ds_hetero.planner.published.registry import expect_describable, find_planner

    planner = find_planner(name, "schedule")
    expect_describable(planner, cost.cluster, cost.model)
    assert planner.schedule is not None
    schedule = planner.schedule(cost, None)
    if layout is not None:
        schedule = replace(schedule, layout=layout)
    return ScheduleCandidate.of(schedule, cost)


def _rejected(
    best: ScheduleCandidate, chosen: str, searched: Sequence[ScheduleCandidate], baselines: Baselines
) -> Iterator[Rejected]:
    """The candidates that were not chosen, once each; ``chosen`` is the description of the best."""
    for candidate in baselines.candidates:
        if candidate.schedule != best.schedule:
            yield compared(candidate.name, candidate.prediction, best.prediction)
    for name, reason in baselines.missing.items():
        yield Rejected(name=name, prediction=None, reason=reason)
    shown: set[tuple[str, str]] = set()
    for candidate in searched:
        if candidate.name == chosen and candidate.prediction.iteration_s < AS_FAST * best.prediction.iteration_s:
            continue
        other = compared(candidate.name, candidate.prediction, best.prediction)
        if (other.name, other.reason) not in shown:
            shown.add((other.name, other.reason))
            yield other


def strategy(name: str, cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """A strategy's schedule, by its name. Raises `PlanError`: an unknown name, or nothing legal fits.

    ``usp`` is the best legal mesh that fits.

    Args:
        table: measured times for ``lut`` and ``formula``; left out, `hetero_ring.table_of`: measured on the
            ranks, or predicted.
    """
    heads = (cost.model.num_heads, cost.model.num_kv_heads)
    if name == "plan":
        return plan(cost.cluster, cost.model, cost.workload, cost_model=cost.name).schedule
    if name in COMPARED:
        baselines = Baselines.under(cost)
        if not baselines.of_kind(name):
            raise PlanError(f"{name}: {baselines.missing[name]}.")
        candidates = baselines.of_kind(name)
        return min(candidates, key=lambda each: (not each.prediction.feasible, each.prediction.iteration_s)).schedule
    if name == "even":
        return even(cost.cluster.num_ranks, *heads)
    if name == "proportional":
        return proportional(cost.attention_speeds, *heads)
    from ds_hetero.planner.published.registry import expect_describable, planners_of

    published = {planner.name: planner for planner in planners_of("schedule")}
    if name not in published:
        names = dict.fromkeys((*STRATEGIES, *published))
        raise PlanError(f"strategy {shortened(name)} is unknown; it is one of {', '.join(names)}.")
    expect_describable(published[name], cost.cluster, cost.model)
    make_schedule = published[name].schedule
    assert make_schedule is not None
    return make_schedule(cost, table)


_WORTH = 0.95  # of the time: a smaller gain is not told
_ROUNDS = 3  # of leaving out more
_TRIED = 4  # sets of ranks in a round, the most promising ones
_TRIED_OF_MANY, _MANY_RANKS = 1, 64
_SHORT_LOOK_S, _OVER_LOOK = 0.01, 1.4  # budget of a short look, and how many times as long as a look it seldom finds
_LOOK_S, _OVER_SEARCH = 0.03, 1.01  # the same of a look against a whole search
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
    within: bool  # with shards inside nodes, `Workload.zero_within`
    iteration_s: float  # time of an optimizer step

    @property
    def name(self) -> str:
        """With the key of the section that it needs."""
        return f"{self.stage}" + (' with shards inside nodes ("zero_within": "node")' if self.within else "")

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"stage": self.stage, "within_nodes": self.within, "iteration_s": self.iteration_s}


def faster_with_fewer_ranks(cost: CostModel, planned: PlannedSchedule, layout: str | None = None) -> FewerRanks | None:
    """Search ranks without which the job is faster by at least 5 %; None where there are none.

    Nothing is searched unless what ZeRO moves over all ranks costs that much. Tried are the ranks that the schedule
    leaves idle, every node, all nodes but one, and the slowest kinds of devices; then the same of what is left.

    Args:
        cost: the cost model of all ranks; of one replica, with ZeRO's partition over it alone.
    """
    if cost.workload.data_parallel > 1 or cost.workload.zero_cluster is not None:
        return None
    left, best = tuple(range(cost.cluster.num_ranks)), planned
    for _ in range(_ROUNDS):
        limit_s = _WORTH * best.prediction.iteration_s
        kept = _fastest_look(cost, _most_promising(cost, best, limit_s), limit_s, layout)
        faster = _planned(cost, kept, layout)
        if faster is None or faster.prediction.iteration_s >= limit_s:
            break
        left, best = tuple(left[rank] for rank in kept), faster
        cost = _cost_of(cost, kept)
    left_out = tuple(sorted({*planned.schedule.ranks}.difference(left)))
    return FewerRanks(left_out=left_out, planned=best) if left_out else None


def faster_zero_stage(cost: CostModel, schedule: Schedule, now_s: float) -> OtherStage | None:
    """The ZeRO stage under which a schedule is fastest, if that is 5 % faster than ``now_s``; else None.

    Stage 3 also with shards inside nodes, which gathers nothing between them.
    """
    work = cost.workload
    on_devices = not (work.offload_optimizer or work.offload_parameters)
    has_nodes = cost.name == "calibrated" and len(cost.cluster.nodes) > 1 and work.data_parallel == 1 and on_devices
    found = []
    for stage, within in [(0, False), (1, False), (2, False), (3, False), *([(3, True)] if has_nodes else [])]:
        changed = replace(work, zero_stage=stage, zero_within=within)
        prediction = make_cost_model(cost.name, cost.cluster, cost.model, changed).predict(schedule)
        if prediction.feasible:
            found.append(OtherStage(stage=stage, within=within, iteration_s=prediction.iteration_s))
    best = min(found, key=lambda other: other.iteration_s, default=None)
    return None if best is None or best.iteration_s >= _WORTH * now_s else best


def _most_promising(cost: CostModel, planned: PlannedSchedule, limit_s: float) -> list[tuple[float, tuple[int, ...]]]:
    """Ranks to keep, most promising first, with a time below ``limit_s`` that no schedule of theirs undercuts.

    A schedule of theirs is one of all ranks too, with the others idle, where it takes no less than the best one. What
    it takes less without them is at most what stands whatever the schedule.
    """
    every = range(cost.cluster.num_ranks)
    kept = {tuple(rank for rank in every if rank not in out) for out in _left_out(cost.cluster, planned)}
    now_s, standing_s = planned.prediction.iteration_s, _standing_s(cost)
    least = []
    for ranks in kept:
        if 0 < len(ranks) < len(every):
            of_part = _cost_of(cost, ranks)
            least.append((max(_least_s(of_part), now_s - standing_s + _standing_s(of_part)), ranks))
    promising = sorted(each for each in least if each[0] < limit_s)
    return promising[: _TRIED if len(every) <= _MANY_RANKS else _TRIED_OF_MANY]


def _fastest_look(
    cost: CostModel, parts: Sequence[tuple[float, tuple[int, ...]]], limit_s: float, layout: str | None
) -> tuple[int, ...]:
    """The ranks of `_most_promising` that are fastest at a look; none where none may take less than ``limit_s``."""
    fastest_of: tuple[int, ...] = ()
    limit_s *= _OVER_SEARCH
    for least_s, ranks in parts:
        if least_s >= limit_s:
            continue
        of_part = _cost_of(cost, ranks)
        look_s = partial(_look_s, of_part, *make_problem(of_part, layout=layout))
        if look_s(_SHORT_LOOK_S) < _OVER_LOOK * limit_s:
            time_s = look_s(_LOOK_S)
            if time_s < limit_s:
                fastest_of, limit_s = ranks, time_s
    return fastest_of


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


def _standing_s(cost: CostModel) -> float:
    """Time of an optimizer step that is the same under any schedule: of ZeRO, the host's launches, the optimizer."""
    outside = cost.outside_blocks_s(np.zeros(cost.cluster.num_ranks))
    of_micro_batch = cost.model.num_layers * cost.floor_s + outside.get("loss_s", 0.0)
    return cost.workload.micro_batches * of_micro_batch + once_s(outside)


def _look_s(cost: CostModel, problem: Problem, rank_of: Ints, budget_s: float) -> float:
    """Time of a step by a short search of its problem; infinite where it finds nothing that fits."""
    found = first_look(problem, EvaluationBudget(budget_s))
    return np.inf if found is None else cost.predict(schedule_of(problem, found, rank_of)).iteration_s


def _cost_of(cost: CostModel, ranks: Sequence[int]) -> CostModel:
    """The cost model of a job of these ranks alone."""
    work, left_out = cost.workload, set(range(cost.cluster.num_ranks)).difference(ranks)
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
