"""Baselines that a plan of pipelines is compared with: uniform grids, sequence parallelism, published planners."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.terms.model_states import static_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipeline_search.uniform_grids import context_parallel_grids, uniform_grids
from ds_hetero.planner.pipelines.explain import shape_text
from ds_hetero.planner.planning import searched_candidates
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.pipelines import BaselinePlan
from ds_hetero.values.plans import BatchSplit, Plan, PlannedModel
from ds_hetero.values.schedule import Schedule

# Most ranks with which a schedule is searched; with more, only uniform schedules are compared. Chosen, never measured.
SEARCHED_RANKS = 64


def best_grid(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[BaselinePlan, PlanCandidate | None]:
    """Return the best uniform grid over all devices, as a baseline and as a candidate for the plan.

    If no grid fits, the baseline says why, and the candidate is None. Stages that share sequences share them equally:
    the candidate's schedules are those of `StageCosts.with_even_shares`.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """
    best: PlanCandidate | None = None
    best_name = ""
    num_grids = 0
    even_costs = costs.with_even_shares()
    grids = itertools.chain(
        uniform_grids(even_costs, samples, sizes), context_parallel_grids(even_costs, samples, sizes)
    )
    for name, pipelines in grids:
        num_grids += 1
        candidate = evaluate_with_layers(even_costs, objective, pipelines)
        if candidate is not None and (best is None or candidate.value < best.value):
            best, best_name = candidate, name
    if best is None:
        fits = "fits into memory" if num_grids else "divides devices, layers and batch"
        return BaselinePlan(name="uniform grid", reason=f"no uniform grid over all devices {fits}"), None
    return BaselinePlan(name=f"uniform grid, {best_name}", step_s=best.step_s, value=best.value), best


def best_published(
    planner: PublishedPlanner, models: Sequence[StageCosts], objective: Objective, samples: int, sizes: Sequence[int]
) -> BaselinePlan:
    """Return the best plan of a published planner of pipelines under any of the cost models, or why there is none.

    Args:
        models: cost models of the same cluster, for example with and without recomputation.
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """
    assert planner.pipelines is not None
    plans = [planner.pipelines(costs, objective, samples, sizes) for costs in models]
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)
    if best is None:
        return BaselinePlan(
            name=planner.title, reason=f"none of its plans fits into memory with {samples} samples per step"
        )
    return BaselinePlan(name=f"{planner.title}, {shape_text(best)}", step_s=best.step_s, value=best.value)


def best_sequence(
    cluster: Cluster,
    model: ModelSpec,
    workload: Workload,
    samples: int,
    sizes: Sequence[int],
    objective: Objective,
    best_value: float = inf,
) -> BaselinePlan:
    """Return the best plan of a single stage: sequence parallelism over all devices under DeepSpeed's ZeRO.

    A schedule is searched only if it could win, that is if perfect balance with free communication would be better than
    ``best_value``. Otherwise only Ulysses, Ring and USP are tried. The result says why if nothing fits.

    Args:
        workload: length, attention, loss and ZeRO stage. Batches are chosen here.
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
        best_value: value of the objective for the best plan of pipelines.
    """
    name, num_ranks = "sequence parallelism", cluster.num_ranks
    if workload.seq_len < num_ranks:
        return BaselinePlan(name=name, reason=f"{num_ranks} ranks cannot share {workload.seq_len} tokens")
    work = replace(workload, micro_batch=1, micro_batches=samples, data_parallel=1)
    cost = make_cost_model("calibrated", cluster, model, work)
    least_free_bytes = (cost.capacity_bytes_D - static_bytes(model, work, cost.cluster)).min()
    if least_free_bytes <= 0:
        return BaselinePlan(name=name, reason=f"model states under ZeRO-{work.zero_stage} alone do not fit into memory")
    # The schedule is chosen for micro-batches of one sample, and then the size of micro-batches for this schedule.
    work_by_size = [
        replace(work, micro_batch=size, micro_batches=samples // size) for size in sizes if samples % size == 0
    ]
    costs_by_size = [make_cost_model("calibrated", cluster, model, sized_work) for sized_work in work_by_size]
    bound_s = min(map(_bound_s, costs_by_size), default=inf)
    candidates = list(Baselines.under(cost).candidates)
    if num_ranks <= SEARCHED_RANKS and _value(cluster, workload, samples, objective, bound_s) < best_value:
        candidates += searched_candidates(cost)[:1]
    feasible = [candidate for candidate in candidates if candidate.prediction.feasible]
    if not feasible:
        return BaselinePlan(name=name, reason=str(candidates[0].prediction.reason))
    fastest = min(feasible, key=lambda candidate: candidate.prediction.iteration_s)
    plans = [_plan_of_replica(sized_cost, fastest.schedule) for sized_cost in costs_by_size]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        return BaselinePlan(name=name, reason=f"no micro-batch of {sizes} samples fits and divides the global batch")
    best = min(fitting, key=predicted_step_s)
    value = _value(cluster, workload, samples, objective, predicted_step_s(best))
    return BaselinePlan(
        name=f"sequence parallelism, {fastest.name}", step_s=predicted_step_s(best), value=value, plan=best
    )


def _bound_s(cost: CostModel) -> float:
    """Return a lower bound of a step under any schedule: perfect balance with free communication, or ZeRO's traffic."""
    return cost.workload.micro_batches * cost.model.num_layers * max(cost.bound_s, cost.floor_s)


def _value(cluster: Cluster, workload: Workload, samples: int, objective: Objective, step_s: float) -> float:
    """Return the value of the objective for a step of ``step_s`` in which all devices compute all the time."""
    index_of_kind = {device: index for index, device in enumerate(dict.fromkeys(cluster.devices))}
    # The same objective with the kinds of this cluster, which may be numbered in another way than in `objective`.
    own_objective = Objective.of(objective.name, list(index_of_kind), samples * workload.seq_len, objective.at_most_s)
    per_s = sum(own_objective.per_s[index_of_kind[device]] for device in cluster.devices)
    busy = step_s * sum(own_objective.per_busy_s[index_of_kind[device]] for device in cluster.devices)
    return own_objective.value(step_s, per_s, busy)


def _plan_of_replica(cost: CostModel, schedule: Schedule) -> Plan | None:
    """Return the plan of one replica with this schedule, and its prediction; None if it does not fit into memory."""
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
    """Return the time of a step that the plan predicts of itself, in its ``predicted``."""
    assert plan.predicted is not None
    return float(plan.predicted["step_s"])
