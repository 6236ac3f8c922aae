"""A plan file under a cost model: its pipelines in blocks, and what they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.text import bytes_text
from ds_hetero.cost.price import Objective
from ds_hetero.cost.stages.hexiscale import make_stage_costs
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, Pools, StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.block_times import stage_options
from ds_hetero.planner.pipeline_search.finish import Finished
from ds_hetero.planner.pipeline_search.given_layers import judge_layers
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.explain import block_text
from ds_hetero.values.plans import Plan, Stage


def check_given_plan(plan: Plan, cluster: Cluster, model: ModelSpec) -> None:
    """Refuse a plan of another model or cluster. Raises `PlanError`: the numbers of both."""
    if plan.model is not None:
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            theirs, ours = getattr(plan.model, name), getattr(model, name)
            if theirs != ours:
                raise PlanError(
                    f"the plan is for a model with {name}={theirs}, but {model.name} has {ours}. Give the model that "
                    "it was made for, or plan again."
                )
    beyond = [rank for rank in plan.ranks if rank >= cluster.num_ranks]
    if beyond:
        raise PlanError(
            f"the plan gives work to ranks {beyond}, but the cluster has ranks 0 to {cluster.num_ranks - 1}. Give the "
            "cluster that it was made for, or plan again."
        )


def placed_of(plan: Plan, pools: Pools) -> tuple[PlacedPipeline, ...]:
    """The pipelines of a plan in blocks. Raises `PlanError`: stages that span kinds, or too little is said."""
    pool_of = {rank: pool for pool in pools.pools for rank in pool.ranks}

    def block(where: str, stage: Stage) -> DeviceBlock:
        pool = pool_of[stage.ranks[0]]
        if any(pool_of[rank] is not pool for rank in stage.ranks):
            if stage.inner != "sequence":
                raise PlanError(
                    f"{where} spans devices of several kinds or nodes, ranks {list(stage.ranks)}; only a sequence "
                    "stage may. Tensor parallelism is judged on devices of one kind and node."
                )
            counts = Counter(pool_of[rank] for rank in stage.ranks)
            return DeviceBlock.of_parts([PoolPart(pool.kind, pool.node, count) for pool, count in counts.items()])
        return DeviceBlock(pool.kind, pool.node, len(stage.ranks), stage.inner if len(stage.ranks) > 1 else "one")

    placed = []
    for i, pipeline in enumerate(plan.pipelines):
        layers = tuple(stage.num_layers or (plan.model.num_layers if plan.model else 0) for stage in pipeline.stages)
        if not all(layers) or not pipeline.micro_batch_size or not pipeline.micro_batches:
            raise PlanError(f"pipelines[{i}] does not say its layers, micro_batch_size and micro_batches.")
        blocks = tuple(block(f"pipelines[{i}].stages[{j}]", stage) for j, stage in enumerate(pipeline.stages))
        placed.append(PlacedPipeline(blocks, layers, pipeline.micro_batch_size, pipeline.micro_batches))
    return tuple(placed)


def judge_given(
    plan: Plan, cost_model: str, cluster: Cluster, model: ModelSpec, workload: Workload
) -> tuple[StageCosts, Finished]:
    """Predict a plan with its own recomputation and owners. Raises `PlanError`: see `judge_plan`.

    Returns:
        The cost model with what the plan says, and the prediction.
    """
    if plan.activation_checkpointing is not None:
        workload = replace(workload, activation_checkpointing=plan.activation_checkpointing)
    costs = with_owners_of(make_stage_costs(cost_model, cluster, model, workload, ScheduleFinder()), plan)
    return costs, judge_plan(costs, plan, costs.time_objective())


def judge_plan(costs: StageCosts, plan: Plan, objective: Objective) -> Finished:
    """Predict a plan, with its own micro-batches in flight. Raises `PlanError`: another model, or no memory."""
    costs = with_owners_of(costs, plan)
    placed = placed_of(plan, costs.pools)
    _keep_schedules(costs, plan, placed)
    candidate = judge_layers(costs, objective, placed)
    if candidate is None:
        raise PlanError(
            f"the plan does not fit {costs.model.name} with sequences of {costs.seq_len} tokens on this cluster under "
            f"the {costs.name} cost model: {_misfit(costs, placed)}. Give the cluster that it was made for, or plan "
            "again."
        )
    in_flight, times = [], []
    for pipeline, cut, number in zip(plan.pipelines, candidate.cuts, candidate.micro_batches, strict=True):
        own = tuple(pipeline.in_flight(j) for j in range(len(pipeline.stages)))
        in_flight.append(own)
        times.append(costs.pipeline_s(*cut.times, number, own))
    last = candidate.cuts[times.index(max(times))]
    step_s = costs.step_s(max(times), candidate.sync, last.overlap_s)
    return Finished(candidate, tuple(in_flight), tuple(times), step_s)


def _misfit(costs: StageCosts, placed: Sequence[PlacedPipeline]) -> str:
    """The stage that cannot run, or the one that exceeds its devices' memory most."""
    worst, text = 0.0, "owners of optimizer state have no room for it"
    for i, pipeline in enumerate(placed):
        last = len(pipeline.blocks) - 1
        of_stages = zip(pipeline.blocks, pipeline.layers, costs.kept_by_default(last + 1), strict=True)
        for j, (block, layers, kept) in enumerate(of_stages):
            options = stage_options(costs, (block,), pipeline.micro_batch_size, len(placed))
            where = f"stage {j} of pipeline {i}, {layers} layers on {block_text(costs, block)}"
            if options is None:
                return f"{where}, cannot run: its devices do not divide the heads, or cannot share a sequence"
            for part in options[0].parts:
                need = part.memory_bytes(layers, j == 0, j == last, kept)
                if need - part.capacity_bytes > worst:
                    worst = need - part.capacity_bytes
                    text = f"{where}, needs {bytes_text(need)} of {bytes_text(part.capacity_bytes)} GiB a device"
    return text


def _keep_schedules(costs: StageCosts, plan: Plan, placed: Sequence[PlacedPipeline]) -> None:
    """Judge sequence stages by the schedules of the plan."""
    pool_of = {rank: (pool.kind, pool.node) for pool in costs.pools.pools for rank in pool.ranks}
    for pipeline, blocks in zip(plan.pipelines, placed, strict=True):
        for stage, block in zip(pipeline.stages, blocks.blocks, strict=True):
            if stage.schedule is not None and block.size > 1:
                order = sorted(stage.ranks, key=lambda rank: (pool_of[rank], rank))  # part by part
                schedule = stage.schedule.with_places(order)
                costs.keep_schedule(block.parts, blocks.micro_batch_size, schedule)


def with_owners_of(costs: StageCosts, plan: Plan) -> StageCosts:
    """The cost model with the plan's owners of optimizer state. Raises `PlanError`: see `owners_of`."""
    check_given_plan(plan, costs.cluster, costs.model)
    if costs.owners is None:
        return costs
    owners = owners_of(plan, costs.pools)
    return costs if owners == costs.owners else costs.with_owners(owners)


def owners_of(plan: Plan, pools: Pools) -> str | tuple[float, ...]:
    """Owners of optimizer state, as `StageCosts` has them. Raises `PlanError`: alike devices have unlike weights."""
    if plan.zero is None or not plan.zero.owner_weights:
        return "even"
    given, pool_of = dict(plan.zero.owner_weights), {rank: pool for pool in pools.pools for rank in pool.ranks}
    weights: list[float] = []
    for i, (pipeline, placed) in enumerate(zip(plan.pipelines, placed_of(plan, pools), strict=True)):
        for j, (stage, block) in enumerate(zip(pipeline.stages, placed.blocks, strict=True)):
            for part in block.parts:
                own = [
                    rank for rank in stage.ranks if (pool_of[rank].kind, pool_of[rank].node) == (part.kind, part.node)
                ]
                of_part = {given.get(rank, 0.0) for rank in own}
                if len(of_part) > 1 or not min(of_part) > 0:
                    raise PlanError(
                        f"zero.owner_weights gives ranks {own} of pipelines[{i}].stages[{j}] the weights "
                        f"{sorted(of_part)}; a plan is judged with one positive weight for equal devices of a stage."
                    )
                weights += of_part
    return tuple(weights)
