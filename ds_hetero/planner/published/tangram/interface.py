"""Interface between Tangram and an inner parallelizer (component 2), and checks of the parallelizer's answers.

    plan(slice, island) -> partial plans        parallelism, latency per micro-batch, memory, shape of the activations

A parallelizer makes plans for a part of the model, the slice, on devices that it takes as equal, the island. All
stages of a composed pipeline have the same degree of data parallelism, so one call returns plans for every degree and
every size of micro-batches.

A partial plan also has a ZeRO stage, recomputation and expert parallelism. Our cost models of stages count one choice
of each for a whole plan; partial plans with other choices are refused. With ``divides_experts`` the devices of a stage
that share sequences divide its experts, too, as in the paper's use of LAER-MoE: tokens travel to their experts inside
an island, and islands exchange activations alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from ds_hetero.common.reading import MAX_BATCH, is_whole
from ds_hetero.cost.stages.stage import DeviceBlock, Pool, StageCosts
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipeline_search.blocks import block_of
from ds_hetero.planner.published.tangram.islands import Island


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive layers of a model."""

    layers: int  # number of layers
    first: bool  # whether the slice has the embedding
    last: bool  # whether the slice has the head


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """Plan of an island for a slice of the model. A lane is a pipeline through the island that has the slice once."""

    data_parallel: int  # number of lanes
    tensor_parallel: int  # devices of a stage that share its weights
    sequence_parallel: int  # devices of a stage that share its sequences; tensor_parallel or this is 1
    expert_parallel: int  # devices of a stage that divide its experts, among which tokens travel
    zero_stage: int  # 0 to 3
    recomputation: bool  # whether the backward recomputes the activations of every layer
    layers: tuple[int, ...]  # layers of the stages of a lane, first to last
    micro_batch_size: int  # samples of a micro-batch
    period_s: float  # forward and backward of a micro-batch on the slowest stage
    latency_s: float  # forward and backward of a micro-batch through all stages, with the sends between them
    memory_bytes: float  # peak memory of the fullest device
    output_shape: tuple[int, int, int]  # activations that leave a lane: samples, tokens, hidden size

    @property
    def stage_size(self) -> int:
        """Number of devices of a stage."""
        return self.tensor_parallel * self.sequence_parallel

    def block(self, pool: Pool) -> DeviceBlock:
        """Return the block of devices of a stage, taken from one pool."""
        return block_of(pool, self.stage_size, "sequence" if self.sequence_parallel > 1 else "tensor")


def counted_zero_stage(costs: StageCosts) -> int:
    """Return the ZeRO stage that a cost model of stages counts: 2, or 0 if it partitions nothing."""
    return 0 if costs.owners is None else 2


def counted_expert_parallel(costs: StageCosts, sequence_parallel: int) -> int:
    """Return how many devices divide the experts of a stage whose ``sequence_parallel`` devices share sequences."""
    return sequence_parallel if costs.divides_experts else 1


class Parallelizer(Protocol):
    """Plans a slice of a model on equal devices."""

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """Return the plans that fit, at most one for each degree of data parallelism and size of micro-batches."""


class CheckedParallelizer:
    """Calls a parallelizer, counts its ``calls``, and raises an error if a partial plan is invalid."""

    def __init__(self, parallelizer: Parallelizer, costs: StageCosts, samples: int) -> None:
        self._parallelizer, self._costs, self._samples = parallelizer, costs, samples
        self.calls = 0

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """Return the plans of the parallelizer, see `Parallelizer.plan`.

        Raises:
            PlanError: a partial plan breaks a rule; the message names the parallelizer, the rule and the values.
        """
        self.calls += 1
        plans = self._parallelizer.plan(part, island)
        for plan in plans:
            if (rule := self._broken_rule(plan, part, island)) is not None:
                raise PlanError(
                    f"parallelizer {type(self._parallelizer).__name__} answered a slice of {part.layers} layers on an "
                    f"island of {island.num_devices} devices with an invalid partial plan: {rule}."
                )
        batches = [(plan.data_parallel, plan.micro_batch_size) for plan in plans]
        if repeated := next((batch for batch in batches if batches.count(batch) > 1), None):
            data_parallel, micro_batch_size = repeated
            raise PlanError(
                f"parallelizer {type(self._parallelizer).__name__} gave two partial plans for "
                f"data_parallel={data_parallel}, micro_batch_size={micro_batch_size}; it must give at most one."
            )
        return plans

    def _broken_rule(self, plan: PartialPlan, part: Slice, island: Island) -> str | None:
        """Return the first rule that a partial plan breaks, with the values; None if the plan is valid."""
        names = ("data_parallel", "tensor_parallel", "sequence_parallel", "expert_parallel", "micro_batch_size")
        counts = {name: getattr(plan, name) for name in names}
        if not plan.layers or not all(is_whole(count, 1, MAX_BATCH) for count in (*counts.values(), *plan.layers)):
            counts_text = ", ".join(f"{name}={count}" for name, count in counts.items())
            return f"{counts_text} and layers={plan.layers} must be whole numbers >= 1"
        if (uncounted := self._uncounted_choice(plan)) is not None:
            return uncounted
        size, num_stages = plan.stage_size, len(plan.layers)
        if sum(plan.layers) != part.layers:
            return f"layers={plan.layers} sum to {sum(plan.layers)}"
        num_blocks = sum(len(pool.ranks) // size for pool in island.pools)
        if plan.data_parallel * num_stages > num_blocks:
            return (
                f"data_parallel={plan.data_parallel} x {num_stages} stages of {size} devices need "
                f"{plan.data_parallel * num_stages} blocks of devices of one node, there are {num_blocks}"
            )
        if self._samples % (plan.data_parallel * plan.micro_batch_size):
            return (
                f"data_parallel={plan.data_parallel} x micro_batch_size={plan.micro_batch_size} does not divide the "
                f"global batch of {self._samples}"
            )
        if not 0 < plan.period_s <= plan.latency_s < inf:
            return f"0 < period_s <= latency_s must hold, got {plan.period_s!r} and {plan.latency_s!r}"
        least_bytes = min(self._costs.pools.kinds[pool.kind].device.memory_bytes for pool in island.pools)
        if not 0 <= plan.memory_bytes <= least_bytes:
            return f"memory_bytes={plan.memory_bytes!r}, the island's smallest device has {least_bytes}"
        shape = plan.micro_batch_size, self._costs.seq_len, self._costs.model.hidden_size
        if plan.output_shape != shape:
            return f"output_shape={plan.output_shape}, the next island expects {shape}"
        return None

    def _uncounted_choice(self, plan: PartialPlan) -> str | None:
        """Return the first choice of a partial plan that the cost model has no costs for; None if there is none."""
        costs, zero_stage = self._costs, counted_zero_stage(self._costs)
        if plan.expert_parallel != (counted := counted_expert_parallel(costs, plan.sequence_parallel)):
            return (
                f"expert_parallel={plan.expert_parallel} with sequence_parallel={plan.sequence_parallel}, for which "
                f"this cost model counts {counted}: with divides_experts, devices that share sequences divide experts"
            )
        if plan.sequence_parallel > 1 and ("sequence" not in costs.inners or plan.tensor_parallel > 1):
            return (
                f"sequence_parallel={plan.sequence_parallel} with tensor_parallel={plan.tensor_parallel}; the devices "
                f"of a stage share its work in one way, one of {', '.join(costs.inners)}"
            )
        if plan.zero_stage != zero_stage:
            return f"zero_stage={plan.zero_stage}, the {costs.name} cost model counts stage {zero_stage} in pipelines"
        if plan.recomputation != costs.activation_checkpointing:
            return (
                f"recomputation={plan.recomputation}, but this plan is made with {costs.activation_checkpointing} for "
                "all its stages; the other choice is planned separately"
            )
        return None
