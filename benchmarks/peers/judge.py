"""Judge a peer's plan by our cost model: all samples counted, with the best recomputation for the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.stage import DeviceBlock, Pools, StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipeline_search.block_ranks import ranks_of_blocks
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.planner.pipelines.planning import plan_pipelines, recomputing_or_not
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage

SIZES = (1, 2, 4)
MAX_PLANS = 500  # of a peer that are tried until one fits into memory


class NoPlan(Exception):
    """A peer has no plan, or one that ours cannot express; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """A planning task for all planners.

    Args:
        name: for the table.
        cluster: the devices.
        model: to train.
        batch: samples of a step.
        seq_len: tokens of a sequence.
    """

    name: str
    cluster: Cluster
    model: ModelSpec
    batch: int
    seq_len: int = 4096


@dataclass(frozen=True, slots=True)
class PeerStage:
    """A stage of a peer's pipeline.

    Args:
        node: of its devices.
        size: number of devices, between which tensor parallelism divides it.
        layers: of the stage.
    """

    node: int
    size: int
    layers: int


def plan_of(case: Case, pipelines: Sequence[Sequence[PeerStage]], batches: Sequence[tuple[int, int]]) -> Plan:
    """Return a peer's pipelines as a `Plan`.

    Args:
        case: the task.
        pipelines: stages in order; the devices of a node are of one kind.
        batches: samples of a micro-batch and number of micro-batches, by pipeline.

    Raises:
        NoPlan: the samples are not the batch, or ours cannot express the plan.
    """
    samples = sum(size * count for size, count in batches)
    if samples != case.batch:
        raise NoPlan(f"its plan trains {samples} of {case.batch} samples")
    pools = Pools(case.cluster)
    kind_of = {pool.node: pool.kind for pool in pools.pools}
    blocks = [
        [DeviceBlock(kind_of[s.node], s.node, s.size, "one" if s.size == 1 else "tensor") for s in stages]
        for stages in pipelines
    ]
    ranks = ranks_of_blocks(pools, blocks)
    model = case.model
    values = []
    for stages, pipeline_ranks, (size, count) in zip(pipelines, ranks, batches, strict=True):
        stops = list(accumulate(stage.layers for stage in stages))
        inner = ["one" if stage.size == 1 else "tensor" for stage in stages]
        placed = zip(stages, pipeline_ranks, stops, inner, strict=True)
        parts = tuple(Stage(ranks=r, layers=(stop - s.layers, stop), inner=how) for s, r, stop, how in placed)
        values.append(Pipeline(stages=parts, micro_batch_size=size, micro_batches=count))
    try:
        return Plan(
            pipelines=tuple(values),
            model=PlannedModel(num_layers=model.num_layers, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads),
            seq_len=case.seq_len,
        )
    except PlanError as error:
        raise NoPlan(f"its plan is none of ours: {error}") from None


def best_that_fits(case: Case, plans: Iterable[Plan]) -> tuple[int, float]:
    """Return the first of a peer's plans that fits into memory: its rank, counted from 1, and its step.

    The step is that with the best recomputation for the plan.

    Raises:
        NoPlan: there is no plan, or none of the first ones fits.
    """
    models = recomputing_or_not(case.cluster, case.model, Workload(seq_len=case.seq_len))
    reason = "it has no plan that ours can say"
    for rank, plan in enumerate(islice(plans, MAX_PLANS), 1):
        outcomes = [_step_s_or_reason(costs, plan) for costs in models]
        steps = [outcome for outcome in outcomes if isinstance(outcome, float)]
        if steps:
            return rank, min(steps)
        reason = f"its first {rank} plans: {outcomes[0]}"
    raise NoPlan(reason)


def _step_s_or_reason(costs: StageCosts, plan: Plan) -> float | str:
    try:
        goal = costs.time_objective()
        return judge_plan(costs, plan, goal).step_s
    except PlanError as error:
        return str(error).partition(",")[0]


def our_s(case: Case) -> float:
    """Return the step of our plan for the same case."""
    work = Workload(seq_len=case.seq_len)
    return plan_pipelines(case.cluster, case.model, work, case.batch, micro_batch_sizes=SIZES).step_s


def shared_evenly(samples: int, pipelines: int, size: int) -> list[tuple[int, int]]:
    """Return the micro-batches of equal pipelines: as even as possible, more for the first ones."""
    number, remainder = divmod(samples // size, pipelines)
    return [(size, number + (i < remainder)) for i in range(pipelines)]


def row_text(row: dict[str, Any]) -> str:
    """Return a cell of the table: seconds over ours, or the reason."""
    if "over_ours" not in row:
        return str(row["reason"])
    rank = f", its plan {row['its_rank']}" if row.get("its_rank", 1) > 1 else ""
    return f"{row['step_s']:.3f} s ({row['over_ours']:.2f} x{rank})"
