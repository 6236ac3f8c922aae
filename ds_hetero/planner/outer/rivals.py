"""What a plan is compared with: uniform grids as for Megatron-LM, sequence parallelism, HexiScale and Tangram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.terms.memory import static_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec
from ds_hetero.planner.candidates import Baselines
from ds_hetero.planner.candidates import Candidate as ScheduleCandidate
from ds_hetero.planner.explain import describe
from ds_hetero.planner.outer.explain import shape_text
from ds_hetero.planner.outer.hexiscale import plan_hexiscale
from ds_hetero.planner.outer.planned import Rival
from ds_hetero.planner.outer.search.evaluate import Candidate
from ds_hetero.planner.outer.search.given_layers import judge_layers
from ds_hetero.planner.outer.search.starts import uniform_grids
from ds_hetero.planner.outer.tangram import plan_tangram
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.plans import BatchSplit, Plan, PlannedModel

__all__ = ["best_grid", "best_hexiscale", "best_sequence", "best_tangram"]

SEARCHED_RANKS = 64  # up to so many ranks a schedule is searched; with more, the uniform ones have to do


def best_grid(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[Rival, Candidate | None]:
    """Return the best grid of equal pipelines with equal layers over all devices.

    Args:
        costs: the cost model.
        objective: what is made small.
        samples: the global batch.
        sizes: of micro-batches that may be tried.
    """
    best: tuple[str, Candidate] | None = None
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


def best_hexiscale(models: Sequence[StageCosts], objective: Objective, samples: int, sizes: Sequence[int]) -> Rival:
    """Return HexiScale's plan, the best over some cost models.

    Args:
        models: with and without recomputation, say.
        objective: what is made small.
        samples: the global batch.
        sizes: of micro-batches that may be tried.
    """
    return _best_of("HexiScale", [plan_hexiscale(costs, objective, samples, sizes) for costs in models])


def best_tangram(models: Sequence[StageCosts], objective: Objective, samples: int, sizes: Sequence[int]) -> Rival:
    """Return Tangram's plan, the best over some cost models. The arguments are those of `best_hexiscale`."""
    plans = [plan_tangram(costs, objective, samples, sizes) for costs in models]
    return _best_of("Tangram", [None if plan is None else plan.candidate for plan in plans])


def _best_of(name: str, plans: Sequence[Candidate | None]) -> Rival:
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)
    if best is None:
        return Rival(name=name, reason="none of its plans fits into memory and makes up the batch")
    return Rival(name=f"{name}, {shape_text(best)}", step_s=best.step_s, value=best.value)


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
        cluster: all devices.
        model: what is trained.
        workload: its ZeRO stage is used; its batches are not.
        samples: the global batch.
        sizes: of micro-batches that may be tried.
        objective: what is made small.
        known: its value for the best other plan.
    """
    name, num_ranks = "sequence parallelism", cluster.num_ranks
    if workload.seq_len < num_ranks:
        return Rival(name=name, reason=f"{num_ranks} ranks cannot share {workload.seq_len} tokens")
    work = replace(workload, micro_batch=1, micro_batches=samples, data_parallel=1)
    cost = make_cost_model("calibrated", cluster, model, work)
    free = (cost.capacity_bytes_D - static_bytes(model, work, num_ranks)).min()
    if free <= 0:
        return Rival(name=name, reason=f"model states under ZeRO-{work.zero_stage} alone do not fit into memory")
    works = [replace(work, micro_batch=size, micro_batches=samples // size) for size in sizes if samples % size == 0]
    least_s = min((_least_s(make_cost_model("calibrated", cluster, model, each)) for each in works), default=inf)
    candidates = list(Baselines.under(cost).candidates)
    if num_ranks <= SEARCHED_RANKS and _value(cluster, workload, samples, objective, least_s) < known:
        problem, rank_of = make_problem(cost)
        schedules = [schedule_of(problem, assignment, rank_of) for assignment in search(problem)[:1]]
        candidates += [ScheduleCandidate(describe(each, cluster), each, cost.predict(each)) for each in schedules]
    feasible = [candidate for candidate in candidates if candidate.prediction.feasible]
    if not feasible:
        return Rival(name=name, reason=str(candidates[0].prediction.reason))
    fastest = min(feasible, key=lambda candidate: candidate.prediction.iteration_s)
    plans = [_plan(cluster, model, each, fastest) for each in works]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        return Rival(name=name, reason=f"no micro-batch of {sizes} samples fits and divides the global batch")
    best = min(fitting, key=_step_s)
    value = _value(cluster, workload, samples, objective, _step_s(best))
    return Rival(name=f"sequence parallelism, {fastest.name}", step_s=_step_s(best), value=value, plan=best)


def _least_s(cost: CostModel) -> float:
    """A step that no schedule undercuts: perfect balance with free exchanges, or ZeRO's traffic."""
    return cost.workload.micro_batches * cost.model.num_layers * max(cost.bound_s, cost.floor_s)


def _value(cluster: Cluster, workload: Workload, samples: int, objective: Objective, step_s: float) -> float:
    """What an objective says of a step of all devices, which are busy all the time."""
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(cluster.devices))}
    own = Objective.of(objective.name, list(kinds), samples * workload.seq_len, objective.at_most_s)
    per_s = sum(own.per_s[kinds[device]] for device in cluster.devices)
    busy = step_s * sum(own.per_busy_s[kinds[device]] for device in cluster.devices)
    return own.value(step_s, per_s, busy)


def _plan(cluster: Cluster, model: ModelSpec, work: Workload, chosen: ScheduleCandidate) -> Plan | None:
    prediction = make_cost_model("calibrated", cluster, model, work).predict(chosen.schedule)
    if not prediction.feasible:
        return None
    batches = BatchSplit(micro_batch_sizes=(work.micro_batch,), micro_batches=(work.micro_batches,))
    plan = Plan.of_replicas((chosen.schedule,), batches)
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


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return float(plan.predicted["step_s"])
