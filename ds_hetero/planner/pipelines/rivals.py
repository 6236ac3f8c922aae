"""Rivals of a plan: uniform grids as for Megatron-LM, sequence parallelism, and published planners.

Plans of published planners, at which our search begins wherever theirs are cheap, so that it is never worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.cost.objective import TOO_LONG, Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.terms.model_states import static_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
from ds_hetero.planner.pipeline_search.given_layers import judge_layers
from ds_hetero.planner.pipeline_search.uniform_grids import uniform_grids
from ds_hetero.planner.pipelines.explain import shape_text
from ds_hetero.planner.planning import searched_candidates
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.planner.published.registry import PLANNERS
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.pipelines import Rival
from ds_hetero.values.plans import BatchSplit, Plan, PlannedModel
from ds_hetero.values.schedule import Schedule

# Ranks up to which a schedule is searched; with more, uniform ones are compared. Chosen, never measured.
SEARCHED_RANKS = 64


def best_grid(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[Rival, PlanCandidate | None]:
    """The best grid of equal pipelines with equal layers over all devices, of micro-batches of ``sizes``."""
    best: tuple[str, PlanCandidate] | None = None
    names = 0
    for name, pipelines in uniform_grids(costs, samples, sizes):
        names += 1
        candidate = judge_layers(costs, objective, pipelines)
        if candidate is not None and (best is None or candidate.value < best[1].value):
            best = name, candidate
    if best is None:
        fits = "fits into memory" if names else "divides devices, layers and batch"
        return Rival(name="uniform grid", reason=f"no uniform grid over all devices {fits}"), None
    name, candidate = best
    return Rival(name=f"uniform grid, {name}", step_s=candidate.step_s, value=candidate.value), candidate


def best_published(
    planner: PublishedPlanner, models: Sequence[StageCosts], objective: Objective, samples: int, sizes: Sequence[int]
) -> Rival:
    """Return the plan of a published planner of pipelines, the best over some cost models."""
    assert planner.pipelines is not None
    plans = [planner.pipelines(costs, objective, samples, sizes) for costs in models]
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)
    if best is None:
        return Rival(name=planner.title, reason="none of its plans fits into memory and makes up the batch")
    return Rival(name=f"{planner.title}, {shape_text(best)}", step_s=best.step_s, value=best.value)


def best_sequence(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    samples: int,
    sizes: Sequence[int],
    objective: Objective,
    known: float = inf,
) -> Rival:
    """Return the best plan of one stage: sequence parallelism over all devices under DeepSpeed's ZeRO.

    Where even perfect balance with free exchanges is worse than what is known, only schedules that need no search are
    tried.

    Args:
        workload: its ZeRO stage is used; its batches are not.
        known: its value for the best other plan.
    """
    name, num_ranks = "sequence parallelism", cluster.num_ranks
    if workload.seq_len < num_ranks:
        return Rival(name=name, reason=f"{num_ranks} ranks cannot share {workload.seq_len} tokens")
    work = replace(workload, micro_batch=1, micro_batches=samples, data_parallel=1)
    cost = make_cost_model("calibrated", cluster, model, work)
    free = (cost.capacity_bytes_D - static_bytes(model, work, cost.cluster)).min()
    if free <= 0:
        return Rival(name=name, reason=f"model states under ZeRO-{work.zero_stage} alone do not fit into memory")
    works = [replace(work, micro_batch=size, micro_batches=samples // size) for size in sizes if samples % size == 0]
    costs = [make_cost_model("calibrated", cluster, model, each) for each in works]
    least_s = min(map(_least_s, costs), default=inf)
    candidates = list(Baselines.under(cost).candidates)
    if num_ranks <= SEARCHED_RANKS and _value(cluster, workload, samples, objective, least_s) < known:
        candidates += searched_candidates(cost)[:1]
    feasible = [candidate for candidate in candidates if candidate.prediction.feasible]
    if not feasible:
        return Rival(name=name, reason=str(candidates[0].prediction.reason))
    fastest = min(feasible, key=lambda candidate: candidate.prediction.iteration_s)
    fitting = [plan for plan in (_plan(each, fastest.schedule) for each in costs) if plan is not None]
    if not fitting:
        return Rival(name=name, reason=f"no micro-batch of {sizes} samples fits and divides the global batch")
    best = min(fitting, key=predicted_step_s)
    value = _value(cluster, workload, samples, objective, predicted_step_s(best))
    return Rival(name=f"sequence parallelism, {fastest.name}", step_s=predicted_step_s(best), value=value, plan=best)


def _least_s(cost: CostModel) -> float:
    """A step that no schedule undercuts: perfect balance with free exchanges, or ZeRO's traffic."""
    return cost.workload.micro_batches * cost.model.num_layers * max(cost.bound_s, cost.floor_s)


def _value(cluster: Cluster, workload: Workload, samples: int, objective: Objective, step_s: float) -> float:
    """Value of an objective for a step of all devices, which are busy all the time."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(cluster.devices))}
    own = Objective.of(objective.name, list(kinds), samples * workload.seq_len, objective.at_most_s)
    per_s = sum(own.per_s[kinds[device]] for device in cluster.devices)
    busy = step_s * sum(own.per_busy_s[kinds[device]] for device in cluster.devices)
    return own.value(step_s, per_s, busy)


def _plan(cost: CostModel, schedule: Schedule) -> Plan | None:
    prediction, model, work = cost.predict(schedule), cost.model, cost.workload
    if not prediction.feasible:
        return None
    batches = BatchSplit(micro_batch_sizes=(work.micro_batch,), micro_batches=(work.micro_batches,))
    plan = Plan.of_replicas((schedule,), batches)
    return replace(
        plan,
        model=PlannedModel(num_layers=model.num_layers, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads),
        seq_len=work.seq_len,
        activation_checkpointing=work.activation_checkpointing,
        predicted={
            "cost_model": "calibrated",
            "step_s": prediction.iteration_s,
            "pipeline_s": [prediction.iteration_s],
            "gradients_s": prediction.parts_s.get("zero_s", 0.0),
            "tokens_per_s": prediction.tokens_per_s,
            "memory_bytes": {str(rank): need for rank, need in enumerate(prediction.memory_bytes)},
        },
    )


def predicted_step_s(plan: Plan) -> float:
    """Return the step that the plan says of itself."""
    assert plan.predicted is not None
    return float(plan.predicted["step_s"])


def other_plans(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[PlanCandidate, ...]:
    """The plans of other searches that are cheap on this cluster, best first, for so many samples."""
    searches = [planner.first_pipelines for planner in reversed(PLANNERS)]
    plans = [search(costs, objective, samples, sizes) for search in searches if search is not None]
    fitting = [plan for plan in plans if plan is not None and plan.value < TOO_LONG]
    return tuple(sorted(fitting, key=lambda plan: plan.value))
