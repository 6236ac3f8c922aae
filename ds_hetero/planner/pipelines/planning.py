"""The front door: a cluster, a model, a length and a global batch in; a plan of pipelines and the reasons for it out.

Uniform grids and pure sequence parallelism are always candidates, and so are HexiScale's and Tangram's plans where
their searches are cheap (`rivals`): a plan is never slower than the best of them under the same cost model. The search
begins at those plans, under the choice of recomputation with the best of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import MAX_BATCH, expect_whole_number
from ds_hetero.cost.objective import TOO_LONG, Objective
from ds_hetero.cost.stages.calibrated import INNERS, CalibratedStageCosts
from ds_hetero.cost.stages.stage import Pools, StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.block_ranks import can_be_placed
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, value_of
from ds_hetero.planner.pipeline_search.finish import Finished, finish, to_plan
from ds_hetero.planner.pipeline_search.search import Progress, Search, SearchResult, default_effort_s
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.explain import nothing_fits, reasons_of
from ds_hetero.planner.pipelines.rivals import best_grid, best_sequence, other_plans, predicted_step_s
from ds_hetero.planner.published.registry import expect_describable, find_planner
from ds_hetero.planner.results.pipelines import PlannedPipelines, Rival
from ds_hetero.values.plans import Plan

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner exact` and ``growth`` say what plans with them
# miss.
MICRO_BATCH_SIZES = (1, 2, 4)
FINISHED = 2  # plans of a search whose micro-batches in flight are chosen
SECOND_SHARE = 0.5  # of the effort, for the search with the other choice of recomputation
FIRST_SHARE = 0.1  # of the effort, for a first plan, and for all that follows an interrupt before the search
OWNERS_SHARE = 0.1  # of the effort, for the search with owners of optimizer state fitted to memory


_Found = tuple[StageCosts, SearchResult]
_Begun = tuple[StageCosts, tuple[PlanCandidate, ...]]
"""A cost model, and other planners' plans under it, best first."""


@dataclass(frozen=True, slots=True)
class _Finalist:
    """A candidate of one cost model, with micro-batches in flight chosen."""

    costs: StageCosts
    finished: Finished
    value: float
    others: tuple[PlanCandidate, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    """Task of a search."""

    global_batch: int
    sizes: tuple[int, ...]
    objective: Objective
    progress: Progress | None


def plan_pipelines(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    global_batch: int,
    *,
    costs: StageCosts | None = None,
    objective: str = "time",
    at_most_s: float | None = None,
    micro_batch_sizes: Sequence[int] = MICRO_BATCH_SIZES,
    inners: Sequence[str] = INNERS,
    effort_s: float | None = None,
    progress: Progress | None = None,
    planner: str | None = None,
    from_published: bool = True,
) -> PlannedPipelines:
    """Search pipelines of unequal stages.

    Args:
        cluster: all devices; some may stay idle.
        workload: length, attention and loss. Batches and recomputation are chosen here.
        costs: the cost model, which fixes recomputation; left out, the calibrated one with and without it.
        objective: one of `ds_hetero.cost.objective.OBJECTIVES`.
        at_most_s: longest step that is acceptable.
        inners: ways in which ranks of a stage may share its work, where ``costs`` is left out.
        effort_s: of the search, in seconds of a usual core by a count of evaluations.
        progress: called with every better plan.
        planner: a published planner of pipelines that takes the place of the search; grids and sequence parallelism
            are only compared with then.
        from_published: the search begins also at published planners' plans where these are cheap.

    Raises:
        PlanError: nothing fits, and the message says by how much; the global batch cannot be made up; the objective
            lacks a price; or the planner is unknown or cannot describe the cluster or the model.
    """
    started = time.perf_counter()
    check_global_batch(global_batch, micro_batch_sizes)
    devices = [kind.device for kind in Pools(cluster).kinds]
    goal = Objective.of(objective, devices, global_batch * workload.seq_len, at_most_s)
    task = _Task(global_batch, tuple(micro_batch_sizes), goal, progress)
    models = [costs] if costs is not None else recomputing_or_not(cluster, model, workload, inners)
    effort_s = default_effort_s(cluster.num_ranks) if effort_s is None else effort_s
    if planner is None:
        searched = _searched(models, task, effort_s, fit_owners=costs is None, from_published=from_published)
    else:
        searched = _Searched(_of_published(planner, models, task), False, 0, ())
    finalists, interrupted = searched.finalists, searched.interrupted
    rivals: dict[str, Rival] = {}
    try:
        rivals["grid"] = _best_grid(models, task, finalists if planner is None else [])
        if costs is None and "sequence" in inners:
            known = min((finalist.value for finalist in finalists), default=inf)
            rivals["sequence"] = best_sequence(cluster, model, workload, global_batch, task.sizes, goal, known)
    except KeyboardInterrupt:
        if not finalists:
            raise
        interrupted = True
    best, plan, value, reasons = _winner(finalists, None if planner else rivals.get("sequence"))
    if plan is None and planner is not None:
        raise PlanError(
            f"planner {planner}: none of its plans fits into memory and makes up the batch. "
            "Leave --planner out, change the batch, or use shorter sequences."
        )
    if plan is None:
        raise PlanError(nothing_fits(models, at_most_s))
    return PlannedPipelines(
        plan=plan,
        costs=models[0] if best is None else best.costs,
        finished=None if best is None else best.finished,
        objective=goal,
        value=value,
        global_batch=global_batch,
        search_s=time.perf_counter() - started,
        step_s=predicted_step_s(plan),
        tokens=global_batch * workload.seq_len,
        idle_ranks=tuple(sorted(set(range(cluster.num_ranks)) - set(plan.ranks))),
        num_evaluated=searched.num_evaluated,
        interrupted=interrupted,
        rivals=rivals,
        reasons=(*reasons, *searched.reasons),
        planner=planner,
    )


class _Searched(NamedTuple):
    """Result of a search."""

    finalists: list[_Finalist]  # that may win
    interrupted: bool  # by the user
    num_evaluated: int  # plans looked at
    reasons: tuple[str, ...]  # what the reader should know of the search


def _searched(
    models: Sequence[StageCosts], task: _Task, effort_s: float, *, fit_owners: bool, from_published: bool
) -> _Searched:
    """Search under all models."""
    interrupted = False
    begun: list[_Begun] = [(costs, ()) for costs in models]
    try:
        _report_first(models[0], task, effort_s * FIRST_SHARE)
        if from_published:
            begun = _with_others(models, task)
    except KeyboardInterrupt:
        interrupted, effort_s = True, effort_s * FIRST_SHARE
    results = _search(begun, task, effort_s)
    if fit_owners and not results:
        results += _with_fitted_owners(models, task, effort_s)
    finalists = [finalist for tried, result in results for finalist in _finalists(tried, task.objective, result)]
    finalists += [_finalist(costs, task.objective, plan) for costs, others in begun for plan in others]
    stopped = interrupted or any(result.interrupted for _, result in results)
    starts = any(others for _, others in begun)
    reasons = ("the search began also at plans of published planners",) if starts else ()
    return _Searched(finalists, stopped, sum(result.num_evaluated for _, result in results), reasons)


def _of_published(name: str, models: Sequence[StageCosts], task: _Task) -> list[_Finalist]:
    """Plans of a published planner, with and without recomputation."""
    planner = find_planner(name, "pipelines")
    expect_describable(planner, models[0].cluster, models[0].model)
    assert planner.pipelines is not None
    plans = [(costs, planner.pipelines(costs, task.objective, task.global_batch, task.sizes)) for costs in models]
    return [_finalist(costs, task.objective, plan) for costs, plan in plans if plan is not None]


def _winner(
    finalists: Sequence[_Finalist], sequence: Rival | None
) -> tuple[_Finalist | None, Plan | None, float, list[str]]:
    """The best pipelines, or pure sequence parallelism where that is better; its plan, its value and the reasons."""
    fitting = (each for each in finalists if each.value < TOO_LONG)
    best = min(fitting, key=lambda finalist: finalist.value, default=None)
    least = TOO_LONG if best is None else best.value
    if sequence is not None and sequence.value is not None and sequence.value < least:
        return None, sequence.plan, sequence.value, [f"{sequence.name} is faster than any pipeline found"]
    if best is None:
        return None, None, least, []
    reasons = reasons_of(best.costs, best.finished, best.value, best.others)
    return best, to_plan(best.costs, best.finished), best.value, reasons


def check_global_batch(global_batch: int, micro_batch_sizes: Sequence[int]) -> None:
    """Refuse batches that no numbers of micro-batches make up. Raises `PlanError`: what would be accepted."""
    expect_whole_number("global_batch", global_batch, 1, MAX_BATCH, PlanError)
    for size in micro_batch_sizes:
        expect_whole_number("micro_batch_size", size, 1, MAX_BATCH, PlanError)
    if not any(global_batch % size == 0 for size in micro_batch_sizes):
        raise PlanError(
            f"micro-batches of {' or '.join(map(str, micro_batch_sizes))} samples do not make up a global batch of "
            f"{global_batch}. Use a multiple of them, or allow micro-batches of 1."
        )


def recomputing_or_not(
    cluster: Cluster, model: ModelSpec, workload: Workload, inners: Sequence[str] = INNERS
) -> list[StageCosts]:
    """Return the calibrated cost model with the workload's choice of recomputation, and with the other one."""
    other = replace(workload, activation_checkpointing=not workload.activation_checkpointing)
    find = ScheduleFinder()  # one for both, since schedules do not depend on recomputation
    return [CalibratedStageCosts(cluster, model, work, inners, find=find) for work in (workload, other)]


def _report_first(costs: StageCosts, task: _Task, effort_s: float) -> None:
    """Tell of a first plan before other planners' plans are made, which takes longer."""
    if task.progress is not None:
        first = _search_of(costs, replace(task, progress=None), effort_s).first()
        if first is not None:
            task.progress(first, 0.0)


def _with_others(models: Sequence[StageCosts], task: _Task) -> list[_Begun]:
    """The models with other planners' plans, those first under which these are best."""
    begun = [(costs, other_plans(costs, task.objective, task.global_batch, task.sizes)) for costs in models]
    return sorted(begun, key=lambda each: min((plan.value for plan in each[1]), default=inf))


def _search(begun: Sequence[_Begun], task: _Task, effort_s: float) -> list[_Found]:
    """Search under every model, later ones from the plans of the earlier ones and with less effort."""
    results: list[_Found] = []
    for share, (costs, others) in zip((1.0, SECOND_SHARE), begun, strict=False):
        warm = [result.best.shapes for _, result in results] + [plan.shapes for plan in others]
        result = _search_of(costs, task, effort_s * share).run(warm)
        if result is not None:
            results.append((costs, result))
            if result.interrupted:
                break
    return results


def _search_of(costs: StageCosts, task: _Task, effort_s: float) -> Search:
    evaluate = Evaluator(costs, task.global_batch, task.objective)
    return Search(evaluate, task.sizes, costs.inners or INNERS[:1], effort_s, task.progress)


def _with_fitted_owners(models: Sequence[StageCosts], task: _Task, effort_s: float) -> Iterator[_Found]:
    """Search with owners of optimizer state fitted to memory: devices without room own less."""
    for costs in models:
        fitted = costs.with_owners("fitted")
        result = _search_of(fitted, task, effort_s * OWNERS_SHARE).run()
        if result is not None:
            yield fitted, result


def _finalists(costs: StageCosts, objective: Objective, result: SearchResult) -> list[_Finalist]:
    known = [result.best, *result.others]
    plans = [plan for plan in known if can_be_placed(costs.pools, [shape.blocks for shape in plan.shapes])]
    return [
        _finalist(costs, objective, plan, tuple(plans[:i] + plans[i + 1 :])) for i, plan in enumerate(plans[:FINISHED])
    ]


def _finalist(
    costs: StageCosts, objective: Objective, plan: PlanCandidate, others: tuple[PlanCandidate, ...] = ()
) -> _Finalist:
    finished = finish(costs, plan)
    return _Finalist(costs, finished, value_of(objective, plan, finished.step_s), others)


def _best_grid(models: Sequence[StageCosts], task: _Task, finalists: list[_Finalist]) -> Rival:
    """The best uniform grid under any of the models, which becomes a finalist."""
    rival = None
    for costs in models:
        tried, candidate = best_grid(costs, task.objective, task.global_batch, task.sizes)
        if candidate is not None and candidate.value < TOO_LONG:
            finalists.append(_Finalist(costs, finish(costs, candidate), candidate.value, ()))
        if rival is None or (tried.value is not None and (rival.value is None or tried.value < rival.value)):
            rival = tried
    assert rival is not None
    return rival
