"""The plans to measure: ours, those of other planners, uniform grids, and variations of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.lab.planning import model_of
from benchmarks.measure.contenders import Shape
from benchmarks.measure.workloads import workload
from ds_hetero.cluster import Cluster
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipeline_search.evaluate import Evaluator
from ds_hetero.planner.pipeline_search.evaluate import Shape as SearchedShape
from ds_hetero.planner.pipeline_search.finish import finish, to_plan
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipeline_search.uniform_grids import uniform_grids
from ds_hetero.planner.pipelines.baselines import best_sequence
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.published.hexiscale import plan_hexiscale
from ds_hetero.values.baselines import usp_meshes
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage

OURS, HEXISCALE, SEQUENCE, GRID, EQUAL = "ours", "hexiscale", "sequence", "grid", "equal stages"
_GRIDS = 4  # best ones by prediction, of which the best by measurement counts
_SIZES = (1, 2)  # of micro-batches
_MOVES = ((0, -1, 3), (-1, 0, 2), (0, 1, 4))  # stages that give and take layers, and how many: worse plans on purpose


@dataclass(frozen=True)
class Task:
    """A training task.

    Args:
        shape: of the model.
        tokens: of a sequence.
        samples: of an optimizer step.
    """

    shape: Shape
    tokens: int
    samples: int


@dataclass(frozen=True)
class Candidate:
    """A plan to measure.

    Args:
        name: for a kind of plan named in this module, it begins with that name.
        plan: of pipelines, or of one stage of sequence parallelism.
        predicted_s: of a step.
        memory_bytes: predicted, by rank.
    """

    name: str
    plan: Plan
    predicted_s: float
    memory_bytes: dict[int, int]


def candidates(cluster: Cluster, task: Task, most: int) -> list[Candidate]:
    """Return the planner's plan, those of published planners, then others up to ``most`` plans."""
    work = workload(task.tokens)
    model = model_of(task.shape)
    costs = CalibratedStageCosts(cluster, model, work)
    goal = costs.time_objective()
    ours = plan_pipelines(cluster, model, work, task.samples, costs=costs, micro_batch_sizes=_SIZES).plan
    candidates = [_candidate(OURS, ours)]
    other = plan_hexiscale(costs, goal, task.samples, _SIZES)
    if other is not None:
        candidates.append(_candidate(HEXISCALE, to_plan(costs, finish(costs, other))))
    sequence = best_sequence(cluster, model, work, task.samples, (1,), goal)
    if sequence.plan is not None and sequence.step_s is not None:
        candidates.append(Candidate(SEQUENCE, sequence.plan, sequence.step_s, {}))
    candidates += _grids(costs, goal, task)
    for plan in _moved(ours):
        if len(candidates) >= most:
            break
        candidates.append(_candidate(f"moved {len(candidates)}", to_plan(costs, judge_plan(costs, plan, goal))))
    return candidates


def tensor_candidates(cluster: Cluster, task: Task, most: int) -> list[Candidate]:
    """Return six plans with tensor stages, ``most`` of them at most, on two nodes of two equal ranks each.

    They are pairs after pairs, pairs beside single ranks on either side of the slow link, and pipelines of equal and of
    different degrees.
    """
    costs = CalibratedStageCosts(cluster, model_of(task.shape), workload(task.tokens))
    goal, layers = costs.time_objective(), task.shape.num_layers
    speeds = [costs.pools.kinds[pool.kind].device.peak_flops_per_s for pool in costs.pools.pools]
    cut, samples = (round(whole * speeds[0] / sum(speeds)) for whole in (layers, task.samples))
    a, b = (pool.ranks for pool in costs.pools.pools)

    def run(count: int, *stages: tuple[tuple[int, ...], int]) -> Pipeline:
        ends = [sum(own for _, own in stages[: j + 1]) for j in range(len(stages))]
        return Pipeline(
            stages=tuple(
                Stage(ranks=ranks, layers=(end - own, end), inner="one" if len(ranks) == 1 else "tensor")
                for (ranks, own), end in zip(stages, ends, strict=True)
            ),
            micro_batch_size=1,
            micro_batches=count,
        )

    shorter, rest, half = cut - layers // 8, layers - cut, layers // 2
    singles_a = ((a[:1], cut // 2), (a[1:], cut - cut // 2))
    singles_b = ((b[:1], rest // 2), (b[1:], rest - rest // 2))
    plans = {
        "2-2": [run(task.samples, (a, cut), (b, rest))],
        "2-2, other layers": [run(task.samples, (a, shorter), (b, layers - shorter))],
        "2-1-1": [run(task.samples, (a, cut), *singles_b)],
        "1-1-2": [run(task.samples, *singles_a, (b, rest))],
        "2 beside 2": [run(samples, (a, layers)), run(task.samples - samples, (b, layers))],
        "2 beside 1-1": [
            run(samples, (a, layers)),
            run(task.samples - samples, (b[:1], half), (b[1:], layers - half)),
        ],
    }
    model = PlannedModel(num_layers=layers, num_heads=task.shape.num_heads, num_kv_heads=task.shape.num_kv_heads)
    judged = {
        name: judge_plan(costs, Plan(pipelines=tuple(pipelines), model=model, seq_len=task.tokens), goal)
        for name, pipelines in list(plans.items())[:most]
    }
    return [_candidate(f"tensor {name}", to_plan(costs, finished)) for name, finished in judged.items()]


def grouped_candidates(cluster: Cluster, task: Task, most: int) -> list[Candidate]:
    """Return a plan with tensor groups of two and tokens by speed, then uniform grids, up to ``most`` plans.

    The grids share sequences evenly, between tensor groups of two ranks or (the best one by prediction) between single
    ranks; or they are the best grids of tensor-parallel stages and pipelines.
    """
    model = model_of(task.shape)
    costs = CalibratedStageCosts(cluster, model, workload(task.tokens), find=ScheduleFinder())
    goal, parts = (
        costs.time_objective(),
        [PoolPart(pool.kind, pool.node, len(pool.ranks)) for pool in costs.pools.pools],
    )
    found = Evaluator(costs, task.samples, goal)([SearchedShape((DeviceBlock.of_parts(parts, 2),), 1)])
    if found is None:
        raise PlanError("tensor groups do not fit into memory.")
    ours = to_plan(costs, finish(costs, found))
    candidates = [_candidate(OURS, ours)]
    (pipeline,) = ours.pipelines
    for size in (2, 1):
        grids = []
        num_members = cluster.num_ranks // size
        for mesh in usp_meshes(num_members, model.num_heads // size, model.num_kv_heads // size):
            schedule = mesh.of_tensor_groups(range(cluster.num_ranks), size)
            stage = replace(pipeline.stages[0], schedule=schedule, tensor_size=size)
            grid = replace(ours, pipelines=(replace(pipeline, stages=(stage,)),), predicted=None)
            fresh = CalibratedStageCosts(cluster, model, costs.workload)  # a cost model knows one schedule of a stage
            judged = to_plan(fresh, judge_plan(fresh, grid, goal))
            grids.append(_candidate(f"{GRID} tp{size} cp{num_members} in {mesh.ring_size} groups", judged))
        grids.sort(key=lambda candidate: candidate.predicted_s)
        candidates += grids if size > 1 else grids[:1]
    return [*candidates, *_grids(costs, goal, task)][:most]


def equal_stages(cluster: Cluster, task: Task) -> Candidate:
    """Return the pipeline with one equal stage per rank, which DeepSpeed's own engine also runs."""
    costs = CalibratedStageCosts(cluster, model_of(task.shape), workload(task.tokens))
    goal = costs.time_objective()
    grids = dict(uniform_grids(costs, task.samples, (1,)))
    candidate = evaluate_with_layers(costs, goal, grids[f"tp1 pp{cluster.num_ranks} dp1 b1"])
    if candidate is None:
        raise PlanError("equal stages do not fit into memory.")
    return _candidate(EQUAL, to_plan(costs, finish(costs, candidate)))


def predicted_s(cluster: Cluster, task: Task, plan: Plan) -> float:
    """Return the seconds of a step of a plan on a cluster, which may differ from the one that it was made for."""
    work = workload(task.tokens)
    if plan.is_replicas:
        cost = make_cost_model("calibrated", cluster, model_of(task.shape), replace(work, micro_batches=task.samples))
        return cost.predict(plan.schedules[0]).iteration_s
    costs = CalibratedStageCosts(cluster, model_of(task.shape), work)
    return judge_plan(costs, plan, costs.time_objective()).step_s


def _candidate(name: str, plan: Plan) -> Candidate:
    assert plan.predicted is not None
    memory = {int(rank): int(size) for rank, size in plan.predicted["memory_bytes"].items()}
    return Candidate(name, plan, float(plan.predicted["step_s"]), memory)


def _grids(costs: CalibratedStageCosts, goal: Objective, task: Task) -> list[Candidate]:
    """Return the best uniform grids by prediction."""
    judged = []
    for name, pipelines in uniform_grids(costs, task.samples, _SIZES):
        candidate = evaluate_with_layers(costs, goal, pipelines)
        if candidate is not None:
            judged.append(_candidate(f"{GRID} {name}", to_plan(costs, finish(costs, candidate))))
    return sorted(judged, key=lambda candidate: candidate.predicted_s)[:_GRIDS]


def _moved(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with some layers moved between stages of the first pipeline that has several."""
    at = next((i for i, pipeline in enumerate(plan.pipelines) if len(pipeline.stages) > 1), None)
    if at is None:
        return
    stages = plan.pipelines[at].stages
    for giver, taker, number in _MOVES:
        layers = [stage.num_layers or 0 for stage in stages]
        giver, taker = giver % len(stages), taker % len(stages)
        num_moved = min(number, layers[giver] - 1)
        if giver == taker or not num_moved:
            continue
        layers[giver] -= num_moved
        layers[taker] += num_moved
        changed = replace(plan.pipelines[at], stages=_with_layers(stages, layers))
        yield replace(plan, pipelines=(*plan.pipelines[:at], changed, *plan.pipelines[at + 1 :]), predicted=None)


def _with_layers(stages: Sequence[Stage], layers: Sequence[int]) -> tuple[Stage, ...]:
    ends = [sum(layers[: j + 1]) for j in range(len(layers))]
    return tuple(replace(stage, layers=(end - own, end)) for stage, own, end in zip(stages, layers, ends, strict=True))
