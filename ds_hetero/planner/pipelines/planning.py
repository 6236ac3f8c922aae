"""Plan pipelines of unequal stages for a cluster, a model, a sequence length and a global batch.

Uniform grids and pure sequence parallelism are always candidates, and so are HexiScale's and Tangram's plans where
their searches are cheap (`published_starts`). So under the same cost model the chosen plan is never slower than the
best of these. There is one cost model with and one without recomputation. The search begins at the published planners'
plans, first under the cost model with the best of these plans.
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
from ds_hetero.planner.pipeline_search.tensor_groups import shapes_with_tensor_groups
from ds_hetero.planner.pipelines.baselines import best_grid, best_sequence, predicted_step_s
from ds_hetero.planner.pipelines.explain import nothing_fits, reasons_of
from ds_hetero.planner.pipelines.published_starts import published_starts
from ds_hetero.planner.published.registry import expect_describable, find_planner
from ds_hetero.planner.results.pipelines import BaselinePlan, PlannedPipelines
from ds_hetero.values.plans import Plan

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner exact` and ``growth`` say what plans with them
# miss.
MICRO_BATCH_SIZES = (1, 2, 4)  # samples of a micro-batch
MAX_FINISHED_PLANS = 2  # most plans of a search for which micro-batches in flight are chosen
# Shares of the effort of a search:
SECOND_SHARE = 0.5  # for the search under the second cost model
FIRST_SHARE = 0.1  # for a first plan, and for the search after an interrupt by the user
OWNERS_SHARE = 0.1  # for the search with owners of optimizer state fitted to memory


class _SearchStart(NamedTuple):
    """A cost model, and published planners' plans at which the search under it begins."""

    costs: StageCosts
    plans: tuple[PlanCandidate, ...]  # best first


class _SearchOutcome(NamedTuple):
    """A cost model, and the result of the search under it."""

    costs: StageCosts
    result: SearchResult


@dataclass(frozen=True, slots=True)
class _Finalist:
    """A plan that may be chosen, with its micro-batches in flight."""

    costs: StageCosts  # the cost model that predicted it
    finished: Finished
    value: float  # value of the objective
    others: tuple[PlanCandidate, ...]  # other plans of the same search, best first


@dataclass(frozen=True, slots=True)
class _Task:
    """Batch and objective of one request, the same in all its searches."""

    global_batch: int
    sizes: tuple[int, ...]  # samples of a micro-batch that are tried
    objective: Objective
    progress: Progress | None  # called with every better plan


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
    with_sequence: bool = True,
) -> PlannedPipelines:
    """Search the best plan of pipelines of unequal stages.

    Args:
        cluster: all devices; the plan may leave some idle.
        workload: length, attention and loss. Batches and recomputation are chosen here.
        costs: the cost model, which fixes recomputation; left out, the calibrated one, with and without recomputation.
        objective: one of `ds_hetero.cost.objective.OBJECTIVES`.
        at_most_s: longest step that is acceptable; None for any.
        micro_batch_sizes: samples of a micro-batch that are tried.
        inners: ways in which the ranks of a stage may share its work, if ``costs`` is left out.
        effort_s: effort of the search, counted as `Evaluator.spent_s`; left out, `default_effort_s`.
        progress: called with every better plan.
        planner: name of a published planner of pipelines that replaces the search; grids and sequence parallelism are
            then baselines only, and are never chosen.
        from_published: whether the search also begins at published planners' plans, where these are cheap.
        with_sequence: whether sequence parallelism over all devices is a candidate, too.

    Raises:
        PlanError: nothing fits (the message says by how much); no numbers of micro-batches give the global batch; a
            price or power that the objective needs is missing; or the planner is unknown or cannot describe the cluster
            or the model.
    """
    started = time.perf_counter()
    check_global_batch(global_batch, micro_batch_sizes)
    devices = [kind.device for kind in Pools(cluster).kinds]
    goal = Objective.of(objective, devices, global_batch * workload.seq_len, at_most_s)
    task = _Task(global_batch, tuple(micro_batch_sizes), goal, progress)
    models = [costs] if costs is not None else recomputing_or_not(cluster, model, workload, inners)
    effort_s = default_effort_s(cluster.num_ranks) if effort_s is None else effort_s
    if planner is None:
        outcome = _search_all(models, task, effort_s, fit_owners=costs is None, from_published=from_published)
    else:
        outcome = _Outcome(_published_finalists(planner, models, task), False, 0, ())
    finalists, interrupted = outcome.finalists, outcome.interrupted
    baselines: dict[str, BaselinePlan] = {}
    try:
        baselines["grid"] = _best_grid(models, task, finalists if planner is None else [])
        if with_sequence and costs is None and "sequence" in inners:
            best_value = min((finalist.value for finalist in finalists), default=inf)
            baselines["sequence"] = best_sequence(cluster, model, workload, global_batch, task.sizes, goal, best_value)
    except KeyboardInterrupt:
        if not finalists:
            raise
        interrupted = True
    winner = _choose_winner(finalists, None if planner else baselines.get("sequence"))
    if winner is None and planner is not None:
        raise PlanError(
            f"planner {planner}: none of its plans fits into memory with {global_batch} samples per step. "
            "Leave --planner out, change the global batch, or use shorter sequences."
        )
    if winner is None:
        raise PlanError(nothing_fits(models, at_most_s))
    plan, finalist = winner.plan, winner.finalist
    return PlannedPipelines(
        plan=plan,
        costs=models[0] if finalist is None else finalist.costs,
        finished=None if finalist is None else finalist.finished,
        objective=goal,
        value=winner.value,
        global_batch=global_batch,
        search_s=time.perf_counter() - started,
        step_s=predicted_step_s(plan),
        tokens=global_batch * workload.seq_len,
        idle_ranks=tuple(sorted(set(range(cluster.num_ranks)) - set(plan.ranks))),
        num_evaluated=outcome.num_evaluated,
        interrupted=interrupted,
        baselines=baselines,
        reasons=(*winner.reasons, *outcome.reasons),
        planner=planner,
    )


class _Outcome(NamedTuple):
    """Result of the searches under all cost models."""

    finalists: list[_Finalist]  # plans that may be chosen
    interrupted: bool  # whether the user stopped the search
    num_evaluated: int  # number of plans that were evaluated
    reasons: tuple[str, ...]  # sentences about the search for the reader of the plan


def _search_all(
    models: Sequence[StageCosts], task: _Task, effort_s: float, *, fit_owners: bool, from_published: bool
) -> _Outcome:
    """Search under every cost model.

    Args:
        fit_owners: whether to search once more with fitted owners of optimizer state if nothing fits.
        from_published: whether to begin at published planners' plans.
    """
    interrupted = False
    starts = [_SearchStart(costs, ()) for costs in models]
    try:
        _report_first(models[0], task, effort_s * FIRST_SHARE)
        if from_published:
            starts = _starts_from_published(models, task)
    except KeyboardInterrupt:
        interrupted, effort_s = True, effort_s * FIRST_SHARE
    outcomes = _search(starts, task, effort_s)
    if fit_owners and not outcomes:
        outcomes += _with_fitted_owners(models, task, effort_s)
    finalists: list[_Finalist] = []
    for outcome in outcomes:
        finalists += _finalists(outcome, task.objective)
    for start in starts:
        finalists += [_finalist(start.costs, task.objective, plan) for plan in start.plans]
    interrupted = interrupted or any(outcome.result.interrupted for outcome in outcomes)
    if not interrupted:
        plans = [finalist.finished.candidate for finalist in finalists]
        try:
            for finalist in _with_tensor_groups(models, task, plans):
                finalists.append(finalist)
        except KeyboardInterrupt:
            if not finalists:
                raise
            interrupted = True
    has_published_starts = any(start.plans for start in starts)
    reasons = ("the search began also at plans of published planners",) if has_published_starts else ()
    num_evaluated = sum(outcome.result.num_evaluated for outcome in outcomes)
    return _Outcome(finalists, interrupted, num_evaluated, reasons)


def _with_tensor_groups(
    models: Sequence[StageCosts], task: _Task, plans: Sequence[PlanCandidate]
) -> Iterator[_Finalist]:
    """Yield the best plan with tensor groups under each cost model, if one fits; see `shapes_with_tensor_groups`.

    Args:
        plans: good plans without tensor groups.
    """
    for costs in models:
        evaluate = Evaluator(costs, task.global_batch, task.objective)
        candidates = []
        for shapes in shapes_with_tensor_groups(costs, plans, task.sizes):
            if not can_be_placed(costs.pools, [shape.blocks for shape in shapes]):
                continue
            candidate = evaluate(shapes)
            if candidate is not None:  # it fits into memory
                candidates.append(candidate)
        if candidates:
            yield _finalist(costs, task.objective, min(candidates, key=lambda candidate: candidate.value))


def _published_finalists(name: str, models: Sequence[StageCosts], task: _Task) -> list[_Finalist]:
    """Return the plans of a published planner, one under each cost model under which it finds a plan.

    Raises:
        PlanError: the planner is unknown, or cannot plan the cluster or the model.
    """
    planner = find_planner(name, "pipelines")
    expect_describable(planner, models[0].cluster, models[0].model)
    assert planner.pipelines is not None
    plans = [(costs, planner.pipelines(costs, task.objective, task.global_batch, task.sizes)) for costs in models]
    return [_finalist(costs, task.objective, plan) for costs, plan in plans if plan is not None]


class _Winner(NamedTuple):
    """The chosen plan, with its value and the reasons for it."""

    plan: Plan
    finalist: _Finalist | None  # None if pure sequence parallelism won
    value: float  # value of the objective
    reasons: list[str]  # sentences that say why the plan looks as it does


def _choose_winner(finalists: Sequence[_Finalist], sequence: BaselinePlan | None) -> _Winner | None:
    """Choose the best finalist, or pure sequence parallelism if that is better; None if nothing fits.

    Args:
        sequence: the plan of pure sequence parallelism; None if it may not be chosen.
    """
    acceptable = (finalist for finalist in finalists if finalist.value < TOO_LONG)
    best = min(acceptable, key=lambda finalist: finalist.value, default=None)
    best_value = TOO_LONG if best is None else best.value
    if sequence is not None and sequence.value is not None and sequence.value < best_value:
        assert sequence.plan is not None
        return _Winner(sequence.plan, None, sequence.value, [f"{sequence.name} is faster than any pipeline found"])
    if best is None:
        return None
    reasons = reasons_of(best.costs, best.finished, best.value, best.others)
    return _Winner(to_plan(best.costs, best.finished), best, best.value, reasons)


def check_global_batch(global_batch: int, micro_batch_sizes: Sequence[int]) -> None:
    """Check that micro-batches of one of the sizes add up to the global batch. Raises `PlanError` if they cannot."""
    expect_whole_number("global_batch", global_batch, 1, MAX_BATCH, PlanError)
    for size in micro_batch_sizes:
        expect_whole_number("micro_batch_size", size, 1, MAX_BATCH, PlanError)
    if not any(global_batch % size == 0 for size in micro_batch_sizes):
        raise PlanError(
            f"micro-batches of {' or '.join(map(str, micro_batch_sizes))} samples do not make up a global batch of "
            f"{global_batch}. Make the global batch a multiple of one of them, or allow micro-batches of 1."
        )


def recomputing_or_not(
    cluster: Cluster, model: ModelSpec, workload: Workload, inners: Sequence[str] = INNERS
) -> list[StageCosts]:
    """Return the calibrated cost model with the workload's choice of recomputation, and with the other one.

    Selective recomputation has no other one: only a user who has it names it.
    """
    find = ScheduleFinder()  # one for both, since schedules do not depend on recomputation
    works = [workload]
    if not workload.selective_checkpointing:
        works.append(replace(workload, activation_checkpointing=not workload.activation_checkpointing))
    return [CalibratedStageCosts(cluster, model, work, inners, find=find) for work in works]


def _report_first(costs: StageCosts, task: _Task, effort_s: float) -> None:
    """Report the first plan that fits to ``task.progress``, since the plans of published planners take longer."""
    if task.progress is not None:
        first = _make_search(costs, replace(task, progress=None), effort_s).first()
        if first is not None:
            task.progress(first, 0.0)


def _starts_from_published(models: Sequence[StageCosts], task: _Task) -> list[_SearchStart]:
    """Make the published planners' plans under every cost model; the cost model with the best of them comes first."""
    starts = []
    for costs in models:
        plans = published_starts(costs, task.objective, task.global_batch, task.sizes)
        starts.append(_SearchStart(costs, plans))

    def best_value(start: _SearchStart) -> float:
        return min((plan.value for plan in start.plans), default=inf)

    return sorted(starts, key=best_value)


def _search(starts: Sequence[_SearchStart], task: _Task, effort_s: float) -> list[_SearchOutcome]:
    """Search under up to two cost models; the second search begins at the first one's plan and has less effort."""
    outcomes: list[_SearchOutcome] = []
    for share, start in zip((1.0, SECOND_SHARE), starts, strict=False):
        warm = [outcome.result.best.shapes for outcome in outcomes] + [plan.shapes for plan in start.plans]
        result = _make_search(start.costs, task, effort_s * share).run(warm)
        if result is not None:
            outcomes.append(_SearchOutcome(start.costs, result))
            if result.interrupted:
                break
    return outcomes


def _make_search(costs: StageCosts, task: _Task, effort_s: float) -> Search:
    evaluate = Evaluator(costs, task.global_batch, task.objective)
    return Search(evaluate, task.sizes, costs.inners or INNERS[:1], effort_s, task.progress)


def _with_fitted_owners(models: Sequence[StageCosts], task: _Task, effort_s: float) -> Iterator[_SearchOutcome]:
    """Search with owners of optimizer state fitted to memory: devices with less free memory own less of it."""
    for costs in models:
        fitted = costs.with_owners("fitted")
        result = _make_search(fitted, task, effort_s * OWNERS_SHARE).run()
        if result is not None:
            yield _SearchOutcome(fitted, result)


def _finalists(outcome: _SearchOutcome, objective: Objective) -> list[_Finalist]:
    """Return the best plans of a search as finalists, without plans whose stages cannot have the ranks they need.

    A stage that shares sequences needs consecutive ranks.
    """
    costs, result = outcome
    plans = []
    for plan in (result.best, *result.others):
        if can_be_placed(costs.pools, [shape.blocks for shape in plan.shapes]):
            plans.append(plan)
    finalists = []
    for i, plan in enumerate(plans[:MAX_FINISHED_PLANS]):
        others = tuple(plans[:i] + plans[i + 1 :])
        finalists.append(_finalist(costs, objective, plan, others))
    return finalists


def _finalist(
    costs: StageCosts, objective: Objective, plan: PlanCandidate, others: tuple[PlanCandidate, ...] = ()
) -> _Finalist:
    """Return a plan as a finalist: choose its micro-batches in flight, and compute its value with them.

    Args:
        others: other plans of the same search, best first.
    """
    finished = finish(costs, plan)
    return _Finalist(costs, finished, value_of(objective, plan, finished.step_s), others)


def _best_grid(models: Sequence[StageCosts], task: _Task, finalists: list[_Finalist]) -> BaselinePlan:
    """Return the best uniform grid under any of the cost models; add the best grid under each to ``finalists``."""
    best = None
    for costs in models:
        even_costs = costs.with_even_shares()  # by which the candidate's schedules are found
        baseline, candidate = best_grid(even_costs, task.objective, task.global_batch, task.sizes)
        if candidate is not None and candidate.value < TOO_LONG:
            finalists.append(_Finalist(even_costs, finish(even_costs, candidate), candidate.value, ()))
        if best is None or _is_better(baseline, best):
            best = baseline
    assert best is not None
    return best


def _is_better(baseline: BaselinePlan, other: BaselinePlan) -> bool:
    """Whether ``baseline`` has a plan, and a better one than ``other``."""
    return baseline.value is not None and (other.value is None or baseline.value < other.value)
