"""The planner's front door: a cluster, a model and a workload in, a schedule and the reasons for it out.

The search proposes, the baselines are always candidates, and the fastest one that fits wins; at equal time the simplest
one. So under the cost model a planned schedule is never slower than the best of Ulysses, Ring and all USP meshes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import MemoryPlanError, PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.results.does_not_fit import does_not_fit
from ds_hetero.planner.results.schedule import PlannedSchedule, Rejected, compared
from ds_hetero.planner.results.sentences import AS_FAST, describe, idle_ranks
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.values.baselines import COMPARED
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import LAYOUTS

MAX_REJECTED = 4  # alternatives of the search that are explained; chosen, so that they fit on a screen


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
    best_baselines = {kind: baselines.best(kind) for kind in COMPARED}
    return PlannedSchedule(
        plan=Plan.of_replicas((best.schedule,)),
        prediction=best.prediction,
        name=describe(best.schedule, cluster),
        search_s=time.perf_counter() - started,
        step_s=best.prediction.iteration_s,
        tokens=workload.step_tokens,
        baselines={kind: candidate.prediction if candidate else None for kind, candidate in best_baselines.items()},
        baseline_names={kind: candidate.name for kind, candidate in best_baselines.items() if candidate},
        baseline_reasons={kind: baselines.why_not(kind) for kind, candidate in best_baselines.items() if not candidate},
        planner=planner,
        rejected=tuple(_rejected(best, describe(best.schedule, cluster), searched, baselines)),
        idle_ranks=idle_ranks(best.schedule),
    )


def check_workload(cluster: Cluster, workload: Workload) -> None:
    """Refuse numbers that make no sense before anything is computed. Raises `PlanError`: the field and its value."""
    weights = workload.zero_weights
    if weights is not None and len(weights) != cluster.num_ranks:
        raise PlanError(
            f"zero_weights has {len(weights)} entries, the cluster {cluster.num_ranks} ranks. Give one weight per rank."
        )
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
    assignments = search(problem)[: 1 + MAX_REJECTED]
    return [ScheduleCandidate.of(schedule_of(problem, assignment, rank_of), cost) for assignment in assignments]


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
