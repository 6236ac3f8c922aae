"""The narrow interface between Tangram and an inner parallelizer (component 2).

    plan(slice, island) -> partial plans        parallelism, latency per micro-batch, memory, shape of the activations

A parallelizer sees equal devices and a part of the model. Since all stages of a composed pipeline share one degree of
data parallelism, one call answers for every degree and micro-batch at once.

A partial plan also says its ZeRO stage, recomputation and expert parallelism. A cost model of stages counts one choice
of the first two for a whole plan, and no experts on ranks of their own: another partial plan is refused by name.
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

    layers: int  # how many
    first: bool  # the embedding is among them
    last: bool  # the head is among them


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """How an island trains a slice."""

    data_parallel: int  # lanes, each with a copy of the slice
    tensor_parallel: int  # devices of a stage that share its weights
    sequence_parallel: int  # devices of a stage that share its sequences; this or the former is 1
    expert_parallel: int  # devices that share experts
    zero_stage: int  # 0 to 3
    recomputation: bool  # of the activations of every layer, in the backward
    layers: tuple[int, ...]  # of the stages of a lane, first to last
    micro_batch_size: int  # samples of a micro-batch
    period_s: float  # of the slowest stage, for one micro-batch forward and backward
    latency_s: float  # of all stages and the hops between them, likewise
    memory_bytes: float  # of the fullest device
    output_shape: tuple[int, int, int]  # of the activations that leave a lane: samples, tokens, hidden size

    @property
    def stage_size(self) -> int:
        """Devices of a stage."""
        return self.tensor_parallel * self.sequence_parallel

    def block(self, pool: Pool) -> DeviceBlock:
        """Return a stage's devices, of a pool."""
        return block_of(pool, self.stage_size, "sequence" if self.sequence_parallel > 1 else "tensor")


def counted_zero_stage(costs: StageCosts) -> int:
    """The ZeRO stage that a cost model of stages counts: optimizer state partitioned and gradients freed, or none."""
    return 0 if costs.owners is None else 2


class Parallelizer(Protocol):
    """Plans a slice of a model on equal devices."""

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """Return the plans that fit, at most one per degree of data parallelism and micro-batch."""


class CheckedParallelizer:
    """Asks a parallelizer, counts its ``calls``, and refuses partial plans that cannot be carried out."""

    def __init__(self, parallelizer: Parallelizer, costs: StageCosts, samples: int) -> None:
        self._parallelizer, self._costs, self._samples = parallelizer, costs, samples
        self.calls = 0

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """See `Parallelizer.plan`. Raises `PlanError`: a plan is invalid; names parallelizer, rule and values."""
        self.calls += 1
        plans = self._parallelizer.plan(part, island)
        for plan in plans:
            if (rule := self._broken_rule(plan, part, island)) is not None:
                raise PlanError(
                    f"parallelizer {type(self._parallelizer).__name__} answered a slice of {part.layers} layers on an "
                    f"island of {island.num_devices} devices with an invalid partial plan: {rule}."
                )
        batches = [(plan.data_parallel, plan.micro_batch_size) for plan in plans]
        if twice := next((batch for batch in batches if batches.count(batch) > 1), None):
            raise PlanError(
                f"parallelizer {type(self._parallelizer).__name__} gave two partial plans for "
                f"data_parallel={twice[0]}, micro_batch_size={twice[1]}; at most one is asked for."
            )
        return plans

    def _broken_rule(self, plan: PartialPlan, part: Slice, island: Island) -> str | None:
        """The first rule that a partial plan breaks, with the values; None if it is valid."""
        named = ("data_parallel", "tensor_parallel", "sequence_parallel", "expert_parallel", "micro_batch_size")
        counts = {name: getattr(plan, name) for name in named}
        if not plan.layers or not all(is_whole(count, 1, MAX_BATCH) for count in (*counts.values(), *plan.layers)):
            listed = ", ".join(f"{name}={count}" for name, count in counts.items())
            return f"{listed} and layers={plan.layers} must be whole numbers >= 1"
        if (uncounted := self._uncounted(plan)) is not None:
            return uncounted
        size, stages = plan.stage_size, len(plan.layers)
        if sum(plan.layers) != part.layers:
            return f"layers={plan.layers} sum to {sum(plan.layers)}"
        blocks = sum(len(pool.ranks) // size for pool in island.pools)
        if plan.data_parallel * stages > blocks:
            return (
                f"data_parallel={plan.data_parallel} x {stages} stages of {size} devices need "
                f"{plan.data_parallel * stages} blocks of devices of one node, there are {blocks}"
            )
        if self._samples % (plan.data_parallel * plan.micro_batch_size):
            return (
                f"data_parallel={plan.data_parallel} x micro_batch_size={plan.micro_batch_size} does not divide the "
                f"global batch of {self._samples}"
            )
        if not 0 < plan.period_s <= plan.latency_s < inf:
            return f"0 < period_s <= latency_s must hold, got {plan.period_s!r} and {plan.latency_s!r}"
        room = min(self._costs.pools.kinds[pool.kind].device.memory_bytes for pool in island.pools)
        if not 0 <= plan.memory_bytes <= room:
            return f"memory_bytes={plan.memory_bytes!r}, the island's smallest device has {room}"
        shape = plan.micro_batch_size, self._costs.seq_len, self._costs.model.hidden_size
        if plan.output_shape != shape:
            return f"output_shape={plan.output_shape}, the next island expects {shape}"
        return None

    def _uncounted(self, plan: PartialPlan) -> str | None:
        """The first choice of a partial plan that the cost model of stages does not count; None if it counts all."""
        costs, zero_stage = self._costs, counted_zero_stage(self._costs)
        if plan.expert_parallel > 1:
            return f"expert_parallel={plan.expert_parallel}, and no cost model sends tokens to experts on other devices"
        if plan.sequence_parallel > 1 and ("sequence" not in costs.inners or plan.tensor_parallel > 1):
            return (
                f"sequence_parallel={plan.sequence_parallel} beside tensor_parallel={plan.tensor_parallel}; a stage is "
                f"shared in one way, of {', '.join(costs.inners)}"
            )
        if plan.zero_stage != zero_stage:
            return f"zero_stage={plan.zero_stage}, the {costs.name} cost model counts stage {zero_stage} in pipelines"
        if plan.recomputation != costs.activation_checkpointing:
            return (
                f"recomputation={plan.recomputation}, this plan is made with {costs.activation_checkpointing} for all "
                "its stages; the other choice is a plan of its own"
            )
        return None
