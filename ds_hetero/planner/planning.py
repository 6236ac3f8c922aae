"""Plan the schedule of one replica for a cluster, a model and a workload, with reasons.

Candidates are the results of the search and the baselines. The fastest one that fits is chosen; at equal time, a
baseline, since it is simpler. So under the cost model a planned schedule is never slower than the best of Ulysses, Ring
and all USP meshes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.expert_shares import expert_weights
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import MemoryPlanError, PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.results.does_not_fit import does_not_fit
from ds_hetero.planner.results.schedule import PlannedSchedule, Rejected, compared
from ds_hetero.planner.results.sentences import MAX_EQUAL_RATIO, describe, idle_ranks
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.coupled_order import least_coupled
from ds_hetero.planner.search.search import search
from ds_hetero.values.baselines import COMPARED
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import LAYOUTS

MAX_REJECTED = 4  # rejected results of the search that are listed; chosen so that they fit on a screen


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
        cluster: devices of the replica; the schedule may leave some idle.
        workload: batch, length and DeepSpeed's settings; a number is the tokens of a sequence in a default `Workload`.
        cost_model: ``"calibrated"`` or ``"published"``.
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
        token_unit: every rank gets a multiple of so many tokens; what is no multiple goes to the last rank with tokens.
        planner: name of a published planner of schedules that replaces the search; the baselines are then only compared
            with it, and are never chosen.

    Returns:
        The schedule with its prediction and the rejected candidates; its ``plan`` is the `Plan` that a job runs.

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
        best = fastest(
            searched, [each for each in baselines.candidates if _is_in_units(each, workload.seq_len, token_unit)]
        )
    else:
        searched = [_published_candidate(planner, cost, layout)]
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
    """Check a workload against a cluster before anything is computed.

    Raises:
        PlanError: there are fewer tokens than ranks, or another number of ZeRO or expert weights than ranks.
    """
    weights = workload.zero_weights
    if weights is not None and len(weights) != cluster.num_ranks:
        raise PlanError(
            f"zero_weights has {len(weights)} entries, the cluster {cluster.num_ranks} ranks. Give one weight per rank."
        )
    if isinstance(workload.experts, tuple):
        expert_weights(workload.experts, cluster)
    if workload.seq_len < cluster.num_ranks:
        raise PlanError(
            f"{cluster.num_ranks} ranks cannot share a sequence of {workload.seq_len} tokens. "
            f"Use at least {cluster.num_ranks} tokens or fewer sequence-parallel ranks."
        )


def _check_arguments(cluster: Cluster, workload: Workload, layout: str | None, token_unit: int) -> None:
    """Check the arguments of `plan`. Raises `PlanError`, which names the argument and its value."""
    check_workload(cluster, workload)
    if layout is not None and layout not in LAYOUTS:
        raise PlanError(f"layout {shortened(layout)} is unknown; it is one of {', '.join(LAYOUTS)}.")
    if not 1 <= token_unit <= workload.seq_len:
        raise PlanError(f"token_unit must be between 1 and seq_len={workload.seq_len}, got {shortened(token_unit)}.")


def _is_in_units(candidate: ScheduleCandidate, seq_len: int, token_unit: int) -> bool:
    """Return True if every rank has a multiple of ``token_unit`` tokens, but for one with the tokens that are left."""
    num_others = sum(tokens % token_unit > 0 for tokens in candidate.schedule.tokens(seq_len).values())
    return num_others <= (1 if seq_len % token_unit else 0)


def searched_candidates(cost: CostModel, layout: str | None = None, token_unit: int = 1) -> list[ScheduleCandidate]:
    """Return the best schedules that the search finds, best first; empty if nothing fits into memory.

    Args:
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
    """
    problem, rank_of = make_problem(cost, layout=layout, token_unit=token_unit)
    assignments = search(problem)[: 1 + MAX_REJECTED]
    if assignments:  # the others are only listed
        assignments[0] = least_coupled(problem, assignments[0])
    return [ScheduleCandidate.of(schedule_of(problem, assignment, rank_of), cost) for assignment in assignments]


def _published_candidate(name: str, cost: CostModel, layout: str | None) -> ScheduleCandidate:
    """Return the schedule of the published planner ``name``. Raises `PlanError`: it cannot plan cluster or model."""
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
    """Yield the candidates that were not chosen, without repetition, with reasons.

    Args:
        chosen: description of the best schedule.
    """
    for candidate in baselines.candidates:
        if candidate.schedule != best.schedule:
            yield compared(candidate.name, candidate.prediction, best.prediction)
    for name, reason in baselines.missing.items():
        yield Rejected(name=name, prediction=None, reason=reason)
    shown: set[tuple[str, str]] = set()
    for candidate in searched:
        if (
            candidate.name == chosen
            and candidate.prediction.iteration_s < MAX_EQUAL_RATIO * best.prediction.iteration_s
        ):
            continue
        rejected = compared(candidate.name, candidate.prediction, best.prediction)
        if (rejected.name, rejected.reason) not in shown:
            shown.add((rejected.name, rejected.reason))
            yield rejected
