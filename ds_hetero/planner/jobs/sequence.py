"""The best job of one replica: sequence parallelism over some ranks, or one device alone.

A candidate is a set of ranks with settings. Its time is estimated as its lower bound (`step_lower_bound_s`), times the
least ratio of time to bound among earlier candidates of the same ranks and micro-batch, or at least of the same ranks.
Other ranks say nothing about it: over a slow network the ratio is 4, inside one node 1. Candidates are timed with the
schedule of a short search, the smallest estimate first, until the next estimate is no longer near the fastest job so
far. All ranks are searched first and alone, since the short search errs more for more ranks: for 32 of four kinds by a
third, for 24 of them by a tenth. Tiles cost time, so they are added only if a job does not fit without them. For the
fastest sets of ranks, a schedule is then searched for as long as `plan` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.model_states import static_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import MemoryPlanError, PlanError
from ds_hetero.planner.expert_choice import divisions
from ds_hetero.planner.jobs.job import Job, JobTask, Refused, does_not_fit_text
from ds_hetero.planner.jobs.kinds import ONE
from ds_hetero.planner.jobs.quick import LONG_PROBE_S, quick_step_s, short_search, step_lower_bound_s
from ds_hetero.planner.jobs.settings import (
    keeping_attention,
    may_keep_attention,
    micro_batch_sizes,
    offloadings,
    recomputations,
    tilings,
    with_batch,
    zero_settings,
)
from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.planner.search.memory_fit import fits_in_a_simple_grouping, has_room
from ds_hetero.values.schedule import Schedule

# Chosen, never measured.
MIN_GAIN = 1e-3  # of the time; a setting that gains less gives way to a simpler one
MIN_KEPT_GAIN = 0.02  # the same of kept attention, whose job costs a further search
MAX_LOOKS = 32  # combinations of ranks and settings that get a schedule
MAX_PROBED = 3  # sets of ranks that get a schedule of a longer search
ESTIMATE_SLACK = 1.1  # how much slower than the fastest job so far a candidate's estimate may be
# How much slower than the best a short search may find a set of ranks that is then searched for longer.
SHORT_SEARCH_SLACK = 1.25
LONG_SEARCH_SLACK = 1.01  # the same of the longer search, and of sets of ranks that are planned
MANY_RANKS = 64  # above, fewer are looked at, since each search takes longer
MAX_LOOKS_OF_MANY, MAX_PROBED_OF_MANY = 12, 1


class _Candidate(NamedTuple):
    """A set of ranks with settings, without a schedule so far."""

    least_s: float  # lower bound of a step
    order: int  # position in the list of settings, in which simpler ones come first
    ranks: tuple[int, ...]  # of the whole cluster
    cost: CostModel  # of these ranks alone, without tiles beyond those that the user named

    @property
    def shape(self) -> object:
        """Ranks and micro-batch; candidates of one shape have about the same ratio of time to lower bound."""
        return self.ranks, self.cost.workload.micro_batch


class _Looked(NamedTuple):
    """A candidate that fits, with the time of a step under the schedule of a short search."""

    step_s: float
    ranks: tuple[int, ...]
    workload: Workload


@dataclass(slots=True)
class _Looks:
    """Results so far: the fastest settings for every set of ranks and micro-batch, and schedules to try again."""

    limit_s: float = inf  # time of a job that is known already
    best_of: dict[object, _Looked] = field(default_factory=dict)  # by `_Candidate.shape`
    others: list[_Looked] = field(default_factory=list)  # all candidates that fit
    schedules: dict[object, list[Schedule]] = field(default_factory=dict)  # by ranks and recomputation

    # Least ratio of time to lower bound, by `_Candidate.shape` and by ranks.
    over_bound: dict[object, float] = field(default_factory=dict)
    over_bound_of_ranks: dict[tuple[int, ...], float] = field(default_factory=dict)

    def estimate_s(self, candidate: _Candidate) -> float:
        """Return an estimate of a candidate's step: its bound times the least ratio of time to bound for its shape.

        If no candidate of its shape was timed yet, the least ratio of its ranks counts; before that, the bound itself.
        """
        ratio_of_ranks = self.over_bound_of_ranks.get(candidate.ranks, 1.0)
        return candidate.least_s * self.over_bound.get(candidate.shape, ratio_of_ranks)

    def note(self, candidate: _Candidate, looked: _Looked) -> None:
        """Record the time of a candidate that fits."""
        self.others.append(looked)
        ratio = looked.step_s / candidate.least_s
        self.over_bound[candidate.shape] = min(ratio, self.over_bound.get(candidate.shape, inf))
        self.over_bound_of_ranks[candidate.ranks] = min(ratio, self.over_bound_of_ranks.get(candidate.ranks, inf))
        best = self.best_of.get(candidate.shape)
        if best is None or looked.step_s < best.step_s * (1 - MIN_GAIN):
            self.best_of[candidate.shape] = looked

    @property
    def best_s(self) -> float:
        """Time of the fastest job so far."""
        return min((looked.step_s for looked in self.best_of.values()), default=self.limit_s)


def best_replica(task: JobTask, kind: str, rank_sets: Sequence[tuple[int, ...]]) -> Job | Refused:
    """Return the fastest job of one replica over one of the sets of ranks, or why there is none.

    Args:
        kind: what the job is called: `kinds.SEQUENCE` or `kinds.ONE`.
    """
    rank_sets = [ranks for ranks in rank_sets if len(ranks) <= task.workload.seq_len]
    if not rank_sets:
        return Refused(kind=kind, reason=_no_sets_text(task, kind))
    jobs: list[Job] = []
    for with_offloads in _tiers(task):
        for searched_sets in _searched_together(task, kind, rank_sets):
            looks = _Looks(limit_s=min((job.step_s for job in jobs), default=inf))
            _look_at_all(task, _Pass(searched_sets, with_offloads), looks)
            all_ranks = rank_sets[0] if kind != ONE and searched_sets[0] == rank_sets[0] else None
            job = _planned_best(task, kind, all_ranks, looks)
            if job is not None:
                jobs.append(job)
        if jobs:
            kept = _with_kept_attention(task, min(jobs, key=lambda job: job.step_s), with_offloads)
            return _with_divided_experts(task, kind, rank_sets, kept) or kept
    divided = _with_divided_experts(task, kind, rank_sets, None)
    return divided or Refused(kind=kind, reason=shortage_text(task, rank_sets))


def _searched_together(
    task: JobTask, kind: str, rank_sets: Sequence[tuple[int, ...]]
) -> list[Sequence[tuple[int, ...]]]:
    """Return the sets of ranks by search: all ranks alone, then the others; of many ranks everything in one search."""
    if kind == ONE or task.cluster.num_ranks > MANY_RANKS or len(rank_sets) == 1:
        return [rank_sets]
    return [rank_sets[:1], rank_sets[1:]]


def _no_sets_text(task: JobTask, kind: str) -> str:
    if task.cluster.num_ranks == 1:
        return "there is one GPU"
    return f"{task.workload.seq_len} tokens cannot be shared by {task.cluster.num_ranks} ranks"


def _tiers(task: JobTask) -> tuple[tuple[bool, ...], ...]:
    """Return the passes of the search, each as the values of ``with_offloads`` that it tries.

    Whether offloads fit depends on the hosts' memory. If that is known for every node, a single pass tries jobs with
    and without offloads. Else a second pass tries those with offloads, if no job fits without.
    """
    is_known = all(node.host_memory_bytes is not None for node in task.cluster.nodes)
    return ((False, True),) if is_known else ((False,), (True,))


class _Pass(NamedTuple):
    """Part of a search: sets of ranks, and the settings that it tries with them."""

    rank_sets: Sequence[tuple[int, ...]]
    with_offloads: tuple[bool, ...]
    keeps_attention: bool = False  # whether it tries only settings with kept attention that the search has added
    divides_experts: bool = False  # whether it tries only settings whose experts the search has divided


def _look_at_all(task: JobTask, passed: _Pass, looks: _Looks) -> None:
    """Time candidates by a short search, the smallest estimate first, until none can beat the fastest job so far."""
    left = MAX_LOOKS if task.cluster.num_ranks <= MANY_RANKS else MAX_LOOKS_OF_MANY
    candidates = list(_candidates(task, passed))
    while candidates and left:
        candidate = min(candidates, key=lambda one: (looks.estimate_s(one), one.order, one.ranks))
        candidates.remove(candidate)
        if looks.estimate_s(candidate) >= looks.best_s * ESTIMATE_SLACK:
            return
        if candidate.least_s >= looks.best_s * (1 - MIN_GAIN) or not has_room(candidate.cost):
            continue
        looked = _look(task, candidate, looks)
        if looked is None:
            candidates = [other for other in candidates if not _needs_more(other, candidate)]
            continue
        left -= 1
        looks.note(candidate, looked)


def _candidates(task: JobTask, passed: _Pass) -> Iterator[_Candidate]:
    """Yield every set of ranks under every setting whose model states alone fit into memory."""
    for ranks in passed.rank_sets:
        cluster = cluster_of(task.cluster, ranks)
        settings = _divided_settings if passed.divides_experts else _settings
        for order, work in enumerate(settings(task, cluster, passed)):
            cost = make_cost_model("calibrated", cluster, task.model, work)
            if (static_bytes(task.model, work, cluster) < cost.capacity_bytes_D).all():
                yield _Candidate(step_lower_bound_s(cost), order, ranks, cost)


def _settings(task: JobTask, cluster: Cluster, passed: _Pass) -> Iterator[Workload]:
    """Yield workloads by ZeRO, recomputation, offloads and micro-batches, simpler ones first."""
    freedom = task.freedom
    # One rank runs the model's own attention, which keeps nothing.
    base = task.workload if cluster.num_ranks > 1 else replace(task.workload, keep_attention=False, experts=None)
    for size in micro_batch_sizes(base, task.batch, freedom):
        of_size = with_batch(base, size, task.batch)
        for zero in zero_settings(of_size, cluster, freedom):
            works = recomputations(zero, freedom)
            for work in keeping_attention(works) if passed.keeps_attention else works:
                if False in passed.with_offloads:
                    yield work
                if True in passed.with_offloads:
                    yield from offloadings(work, cluster, freedom)


def _divided_settings(task: JobTask, cluster: Cluster, passed: _Pass) -> Iterator[Workload]:
    """Yield the workloads of `_settings` under every division of experts that is tried."""
    for work in _settings(task, cluster, passed):
        yield from divisions(task.model, work, cluster)


def cluster_of(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Return the cluster of a job with these ranks alone."""
    left_out = ranks_left_out(cluster, ranks)
    return cluster.without(left_out) if left_out else cluster


def ranks_left_out(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the other ranks of the cluster, in ascending order."""
    return tuple(sorted(set(range(cluster.num_ranks)).difference(ranks)))


def _look(task: JobTask, candidate: _Candidate, looks: _Looks) -> _Looked | None:
    """Time a candidate with the fewest tiles with which it fits; None if it does not fit, however many tiles."""
    tiled = tilings(candidate.cost.workload, task.freedom)
    costs = [candidate.cost, *(_with_workload(candidate.cost, work) for work in tiled[1:])]
    work = candidate.cost.workload
    key = (candidate.ranks, work.activation_checkpointing, work.keeps_attention)
    schedules = looks.schedules.setdefault(key, [])
    looked = _fastest_look(costs, schedules, candidate.ranks)
    if looked is None and fits_in_a_simple_grouping(costs[-1]):
        schedule = short_search(costs[-1])
        if schedule is not None:
            schedules.append(schedule)
            looked = _fastest_look(costs, [schedule], candidate.ranks)
    return looked


def _needs_more(candidate: _Candidate, other: _Candidate) -> bool:
    """Whether ``candidate`` needs at least as much memory on every rank as ``other``, by their settings alone."""
    work, other_work = candidate.cost.workload, other.cost.workload
    return (
        candidate.ranks == other.ranks
        and work.experts == other_work.experts
        and work.micro_batch >= other_work.micro_batch
        and work.zero_stage <= other_work.zero_stage
        and work.zero_within >= other_work.zero_within
        and _kept_activations(work) >= _kept_activations(other_work)
        and work.offload_optimizer <= other_work.offload_optimizer
        and work.offload_activations <= other_work.offload_activations
    )


def _kept_activations(work: Workload) -> int:
    """Return 0 if only inputs of layers stay for the backward, 1 if attention does, too, 2 if all activations do."""
    return 1 if work.keeps_attention else 2 * (not work.activation_checkpointing)


def _fastest_look(costs: Sequence[CostModel], schedules: Sequence[Schedule], ranks: tuple[int, ...]) -> _Looked | None:
    """Return the time and settings under the first cost model for which one of the schedules fits; None if none fits.

    Args:
        costs: cost models of the same candidate with ever more tiles.
    """
    for cost in costs:
        step_s = min((quick_step_s(cost, schedule) for schedule in schedules), default=inf)
        if step_s < inf:
            return _Looked(step_s, ranks, cost.workload)
    return None


def _with_workload(cost: CostModel, work: Workload) -> CostModel:
    return make_cost_model(cost.name, cost.cluster, cost.model, work)


def _planned_best(task: JobTask, kind: str, all_ranks: tuple[int, ...] | None, looks: _Looks) -> Job | None:
    """Return the fastest job after a full search of schedules; None if none fits.

    Schedules are searched for the fastest sets of ranks, and for the job of all ranks with the usual settings. Then
    other settings are tried with the schedule of the fastest job.

    Args:
        all_ranks: all ranks; None if they are not among the sets of this search.
    """
    jobs = [_planned(task, kind, looked.ranks, looked.workload) for looked in _finalists(task, looks)]
    if all_ranks is not None:
        jobs.append(_usual_job(task, kind, all_ranks, jobs))
    planned = [job for job in jobs if job is not None]
    if not planned:
        return None
    best = min(planned, key=lambda job: job.step_s)
    return _with_better_settings(task, best, looks)


def _finalists(task: JobTask, looks: _Looks) -> list[_Looked]:
    """Return the sets of ranks, with settings, that are fastest in a longer probe, for a full search of schedules."""
    fastest = sorted(looks.best_of.values(), key=lambda looked: looked.step_s)
    most = MAX_PROBED if task.cluster.num_ranks <= MANY_RANKS else MAX_PROBED_OF_MANY
    near = [looked for looked in fastest[:most] if looked.step_s <= SHORT_SEARCH_SLACK * looks.best_s]
    if len(near) < 2:
        return near
    probed = []
    for looked in near:
        cost = make_cost_model("calibrated", cluster_of(task.cluster, looked.ranks), task.model, looked.workload)
        schedule = short_search(cost, LONG_PROBE_S)
        step_s = looked.step_s if schedule is None else min(looked.step_s, quick_step_s(cost, schedule))
        probed.append(looked._replace(step_s=step_s))
    probed.sort(key=lambda looked: looked.step_s)
    return [looked for looked in probed if looked.step_s <= LONG_SEARCH_SLACK * probed[0].step_s]


def _usual_job(task: JobTask, kind: str, ranks: tuple[int, ...], jobs: Sequence[Job | None]) -> Job | None:
    """Plan the job of all ranks with the usual settings wherever the user fixed none.

    So the search never returns a slower job than this one. None if it cannot be faster than all ``jobs``, or if nothing
    fits.
    """
    size = task.workload.micro_batch if task.batch % task.workload.micro_batch == 0 else 1
    work = with_batch(task.workload, size, task.batch)
    least_s = step_lower_bound_s(make_cost_model("calibrated", cluster_of(task.cluster, ranks), task.model, work))
    fastest_s = min((job.step_s for job in jobs if job is not None), default=inf)
    return _planned(task, kind, ranks, work) if least_s < fastest_s * (1 - MIN_GAIN) else None


def _planned(task: JobTask, kind: str, ranks: tuple[int, ...], work: Workload) -> Job | None:
    """Search the schedule of these ranks under these settings; None if nothing fits."""
    cluster = cluster_of(task.cluster, ranks)
    try:
        planned = plan(cluster, task.model, work)
    except PlanError:
        return None
    return Job(
        kind=kind,
        cluster=cluster,
        whole_cluster=task.cluster,
        left_out=ranks_left_out(task.cluster, ranks),
        workload=work,
        planned=planned,
        limit=_limit(task, kind, planned),
    )


def _limit(task: JobTask, kind: str, planned: PlannedSchedule) -> str:
    """Say what limits the speed of a job of one replica."""
    if kind != ONE:
        return planned.prediction.bottleneck.text
    peaks = [device.peak_flops_per_s for device in task.cluster.devices]
    if len(peaks) == 1:
        return "it is the only one"
    return f"the other {len(peaks) - 1} would be idle"


def _with_better_settings(task: JobTask, job: Job, looks: _Looks) -> Job:
    """Return a job with other settings, if they are faster with the schedule of ``job``; else ``job`` itself."""
    assert isinstance(job.planned, PlannedSchedule)
    ranks = tuple(rank for rank in range(task.cluster.num_ranks) if rank not in job.left_out)
    best_s, best_work = job.step_s * (1 - MIN_GAIN), None
    for looked in looks.others:
        if looked.ranks == ranks and looked.workload != job.workload:
            cost = make_cost_model("calibrated", job.cluster, task.model, looked.workload)
            step_s = quick_step_s(cost, job.planned.schedule)
            if step_s < best_s:
                best_s, best_work = step_s, looked.workload
    if best_work is None:
        return job
    other = _planned(task, job.kind, ranks, best_work)
    return other if other is not None and other.step_s < job.step_s else job


def _with_kept_attention(task: JobTask, job: Job, with_offloads: tuple[bool, ...]) -> Job:
    """Return a job of the same ranks that keeps attention over recomputation, if that is faster; else ``job`` itself.

    It is tried after everything else, and begins with the schedule of ``job``: so it takes no places of other settings,
    and a schedule is searched for only where kept attention gains by `MIN_KEPT_GAIN`.
    """
    if job.kind == ONE or not may_keep_attention(task.workload, task.freedom):
        return job
    assert isinstance(job.planned, PlannedSchedule)
    ranks = tuple(rank for rank in range(task.cluster.num_ranks) if rank not in job.left_out)
    looks = _Looks(limit_s=job.step_s, schedules={(ranks, True, True): [job.planned.schedule]})
    _look_at_all(task, _Pass([ranks], with_offloads, keeps_attention=True), looks)
    fastest = min(looks.best_of.values(), key=lambda looked: looked.step_s, default=None)
    if fastest is None or fastest.step_s > job.step_s * (1 - MIN_KEPT_GAIN):
        return job
    kept = _planned(task, job.kind, ranks, fastest.workload)
    return kept if kept is not None and kept.step_s < job.step_s else job


def _with_divided_experts(
    task: JobTask, kind: str, rank_sets: Sequence[tuple[int, ...]], job: Job | None
) -> Job | None:
    """Return the best job of all ranks whose experts are divided, if it is faster than ``job``; else ``job`` itself.

    It is tried after everything else, so that models without experts, and users who did not ask, get the same answer
    in the same time.

    Args:
        job: the best job with experts where the tokens are; None if no such job fits.
    """
    if kind == ONE or not task.freedom.divides_experts:
        return job
    looks = _Looks(limit_s=inf if job is None else job.step_s)
    _look_at_all(task, _Pass(rank_sets[:1], (False,), divides_experts=True), looks)
    divided = _planned_best(task, kind, None, looks) if looks.best_of else None
    if job is None or divided is None:
        return divided or job
    return divided if divided.step_s < job.step_s * (1 - MIN_KEPT_GAIN) else job


def strongest_settings(task: JobTask, cluster: Cluster) -> Workload:
    """Return the settings that need the least memory among those that may be chosen."""
    size = min(micro_batch_sizes(task.workload, task.batch, task.freedom), default=1)
    work = with_batch(task.workload, size, task.batch)
    if task.freedom.may_choose("zero_stage", "zero_within"):
        work = replace(work, zero_stage=3)
    work = recomputations(work, task.freedom)[-1]
    work = tilings(work, task.freedom)[-1]
    return (offloadings(work, cluster, task.freedom) or [work])[-1]


def shortage_text(task: JobTask, rank_sets: Sequence[tuple[int, ...]]) -> str:
    """Say how much memory the uniform schedule nearest to fitting lacks, with all settings that save memory."""
    nearest_text, nearest_excess = "no schedule fits", inf
    for ranks in rank_sets:
        cluster = cluster_of(task.cluster, ranks)
        cost = make_cost_model("calibrated", cluster, task.model, strongest_settings(task, cluster))
        for candidate in Baselines.under(cost).candidates:
            excess = float((np.array(candidate.prediction.memory_bytes) - cost.capacity_bytes_D).max())
            if candidate.prediction.reason is not None and excess < nearest_excess:
                nearest_text, nearest_excess = candidate.prediction.reason, excess
    return does_not_fit_text(nearest_text)


def expect_fit(task: JobTask) -> None:
    """Raise the error of a job that does not fit even with all ways to save memory: `MemoryPlanError`."""
    plan(task.cluster, task.model, strongest_settings(task, task.cluster))
    raise MemoryPlanError("no job fits into memory. Give more or larger devices, or shorter sequences.")
