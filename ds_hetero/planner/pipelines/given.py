"""Predict the time and memory of a given plan, for example of a plan file, under a cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.hexiscale import make_stage_costs
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, Pools, StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.block_times import stage_options
from ds_hetero.planner.pipeline_search.finish import Finished
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.explain import block_text, memory_text
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.stages import Ranks


def check_given_plan(plan: Plan, cluster: Cluster, model: ModelSpec) -> None:
    """Check that a plan is for this model and cluster. Raises `PlanError`, with the numbers of both, if it is not."""
    if plan.model is not None:
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            planned, actual = getattr(plan.model, name), getattr(model, name)
            if planned != actual:
                raise PlanError(
                    f"the plan is for a model with {name}={planned}, but {model.name} has {actual}. Give the model "
                    "for which the plan was made, or plan again."
                )
    missing = [rank for rank in plan.ranks if rank >= cluster.num_ranks]
    if missing:
        raise PlanError(
            f"the plan gives work to ranks {missing}, but the cluster has ranks 0 to {cluster.num_ranks - 1}. Give the "
            "cluster for which the plan was made, or plan again."
        )


def placed_of(plan: Plan, pools: Pools) -> tuple[PlacedPipeline, ...]:
    """Return the pipelines of a plan with their blocks of devices, as the cost model takes them.

    Raises:
        PlanError: the plan lacks layers or micro-batches, or a stage spans kinds of devices without sharing sequences.
    """
    model_layers = plan.model.num_layers if plan.model else 0
    placed = []
    for i, pipeline in enumerate(plan.pipelines):
        layers = tuple(stage.num_layers or model_layers for stage in pipeline.stages)
        if not all(layers) or not pipeline.micro_batch_size or not pipeline.micro_batches:
            raise PlanError(
                f"pipelines[{i}] lacks its layers, micro_batch_size or micro_batches. Add them to the plan file, as "
                "ds-hetero plan --parallel full --out writes them."
            )
        blocks = [_block(f"pipelines[{i}].stages[{j}]", stage, pools) for j, stage in enumerate(pipeline.stages)]
        placed.append(PlacedPipeline(tuple(blocks), layers, pipeline.micro_batch_size, pipeline.micro_batches))
    return tuple(placed)


def _block(where: str, stage: Stage, pools: Pools) -> DeviceBlock:
    """Return the block of a stage. Raises `PlanError` if it spans kinds or nodes and does not share sequences.

    Args:
        where: place of the stage in the plan, for the error.
    """
    if any(len({pools.of_rank[rank] for rank in holders}) > 1 for holders in _tensor_groups(stage)):
        raise PlanError(
            f"{where} has tensor groups {[list(holders) for holders in _tensor_groups(stage)]}, one of which spans "
            "devices of several kinds or nodes. Their time is predicted for equal devices of one node: give each group "
            "ranks of one node and kind."
        )
    counts = Counter(pools.of_rank[rank] for rank in stage.ranks)
    if len(counts) > 1 and stage.inner != "sequence":
        raise PlanError(
            f"{where} spans devices of several kinds or nodes, ranks {list(stage.ranks)}; only a stage with inner "
            '"sequence" may, since tensor parallelism is predicted for equal devices of one node. Give the stage ranks '
            'of one node and kind, or inner "sequence".'
        )
    if len(counts) > 1:
        parts = [PoolPart(pool.kind, pool.node, count) for pool, count in counts.items()]
        return DeviceBlock.of_parts(parts, stage.tensor_size)
    (pool,) = counts
    inner = stage.inner if len(stage.ranks) > 1 else "one"
    return DeviceBlock(pool.kind, pool.node, len(stage.ranks), inner, tensor_size=stage.tensor_size)


def _tensor_groups(stage: Stage) -> tuple[Ranks, ...]:
    """Return the ranks of every tensor group of a stage; none without tensor groups."""
    return stage.token_holders if stage.tensor_size > 1 else ()


def judge_given(
    plan: Plan, cost_model: str, cluster: Cluster, model: ModelSpec, workload: Workload
) -> tuple[StageCosts, Finished]:
    """Predict a plan, with the recomputation and the owners of optimizer state that the plan states.

    Args:
        cost_model: one of `ds_hetero.cost.stages.hexiscale.STAGE_COSTS`.

    Returns:
        The cost model with this recomputation and these owners, and the plan with its predicted times.

    Raises:
        PlanError: see `judge_plan`.
    """
    if plan.activation_checkpointing is not None:
        workload = replace(workload, activation_checkpointing=plan.activation_checkpointing)
    costs = with_owners_of(make_stage_costs(cost_model, cluster, model, workload, ScheduleFinder()), plan)
    return costs, judge_plan(costs, plan, costs.time_objective())


def judge_plan(costs: StageCosts, plan: Plan, objective: Objective) -> Finished:
    """Predict the times of a plan, with the micro-batches in flight that the plan states.

    Raises:
        PlanError: the plan is for another model or cluster, or does not fit into memory.
    """
    costs = with_owners_of(costs, plan)
    placed = placed_of(plan, costs.pools)
    _use_schedules_of(plan, costs, placed)
    candidate = evaluate_with_layers(costs, objective, placed)
    if candidate is None:
        raise PlanError(
            f"the plan does not fit {costs.model.name} with sequences of {costs.seq_len} tokens on this cluster under "
            f"the {costs.name} cost model: {_misfit_text(costs, placed)}. Give the cluster for which the plan was "
            "made, or plan again."
        )
    in_flight, pipeline_s = [], []
    for pipeline, cut, number in zip(plan.pipelines, candidate.cuts, candidate.micro_batches, strict=True):
        by_stage = tuple(pipeline.in_flight(j) for j in range(len(pipeline.stages)))
        in_flight.append(by_stage)
        pipeline_s.append(costs.pipeline_s(*cut.times, number, by_stage))
    slowest = candidate.cuts[pipeline_s.index(max(pipeline_s))]
    step_s = costs.step_s(max(pipeline_s), candidate.sync, slowest.overlap_s)
    return Finished(candidate, tuple(in_flight), tuple(pipeline_s), step_s)


def _misfit_text(costs: StageCosts, placed: Sequence[PlacedPipeline]) -> str:
    """Say which stage cannot run, or which stage exceeds its devices' memory most."""
    worst_bytes, text = 0.0, "owners of optimizer state have no room for it"
    for i, pipeline in enumerate(placed):
        last = len(pipeline.blocks) - 1
        stages = zip(pipeline.blocks, pipeline.layers, costs.kept_by_default(last + 1), strict=True)
        for j, (block, layers, in_flight) in enumerate(stages):
            options = stage_options(costs, (block,), pipeline.micro_batch_size, len(placed))
            where = f"stage {j} of pipeline {i}, {layers} layers on {block_text(costs, block)}"
            if options is None:
                return f"{where}, cannot run: its devices do not divide the heads, or cannot share a sequence"
            for part in options[0].parts:
                need_bytes = part.memory_bytes(layers, j == 0, j == last, in_flight)
                if need_bytes - part.capacity_bytes > worst_bytes:
                    worst_bytes = need_bytes - part.capacity_bytes
                    text = f"{where}, needs {memory_text(part, need_bytes, first=j == 0, last=j == last)}"
    return text


def _use_schedules_of(plan: Plan, costs: StageCosts, placed: Sequence[PlacedPipeline]) -> None:
    """Make the cost model use the plan's schedules of stages that share sequences, instead of searching schedules."""
    pool_of_rank = costs.pools.of_rank

    def pool_by_pool(rank: int) -> tuple[int, int, int]:
        """Sort key: ranks in the order of the parts of their block."""
        pool = pool_of_rank[rank]
        return pool.kind, pool.node, rank

    for pipeline, placed_pipeline in zip(plan.pipelines, placed, strict=True):
        for stage, block in zip(pipeline.stages, placed_pipeline.blocks, strict=True):
            schedule = stage.schedule_of(stage.token_holders[0][0])  # that of the first ranks of tensor groups
            if schedule is not None and block.size > 1:
                places = schedule.with_places(sorted(schedule.ranks, key=pool_by_pool))
                costs.keep_schedule(block, placed_pipeline.micro_batch_size, places)


def with_owners_of(costs: StageCosts, plan: Plan) -> StageCosts:
    """Return the cost model with the plan's owners of optimizer state.

    Raises:
        PlanError: the plan is for another model or cluster; or see `owners_of`.
    """
    check_given_plan(plan, costs.cluster, costs.model)
    if costs.owners is None:
        return costs
    owners = owners_of(plan, costs.pools)
    return costs if owners == costs.owners else costs.with_owners(owners)


def owners_of(plan: Plan, pools: Pools) -> str | tuple[float, ...]:
    """Return the plan's owners of optimizer state: ``"even"``, or a weight for every part of every stage.

    Raises:
        PlanError: equal devices of a stage have different weights, or a weight is not positive.
    """
    if plan.zero is None or not plan.zero.owner_weights:
        return "even"
    weight_of_rank = dict(plan.zero.owner_weights)
    weights: list[float] = []
    for i, (pipeline, placed) in enumerate(zip(plan.pipelines, placed_of(plan, pools), strict=True)):
        for j, (stage, block) in enumerate(zip(pipeline.stages, placed.blocks, strict=True)):
            for part in block.parts:
                ranks = [rank for rank in stage.ranks if part.is_of(pools.of_rank[rank])]
                part_weights = {weight_of_rank.get(rank, 0.0) for rank in ranks}
                if len(part_weights) > 1 or not min(part_weights) > 0:
                    raise PlanError(
                        f"zero.owner_weights gives ranks {ranks} of pipelines[{i}].stages[{j}] the weights "
                        f"{sorted(part_weights)}; a plan is judged with one positive weight for equal devices of a "
                        "stage. Give these ranks one weight, or leave owner_weights out."
                    )
                weights += part_weights
    return tuple(weights)
