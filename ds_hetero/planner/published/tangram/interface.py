"""The narrow interface between Tangram and an inner parallelizer (component 2), and one inner parallelizer.

    plan(slice, island) -> partial plans        parallelism, latency per micro-batch, memory, shape of the activations

A parallelizer sees equal devices and a part of the model. Since all stages of a composed pipeline share one degree of
data parallelism, one call answers for every degree and micro-batch at once. Here it is a homogeneous one, as for
Megatron-LM: data x pipeline x tensor or sequence parallelism of equal stages over the island, chosen by trying all.

A partial plan also says its ZeRO stage, recomputation and expert parallelism. A cost model of stages counts one choice
of the first two for a whole plan, and no experts on ranks of their own: another partial plan is refused by name.

Islands: nodes that are alike enough for a parallelizer that knows equal devices only (Tangram, Algorithm 1).

    clustering  nodes are connected whose compute, memory and memory bandwidth differ by at most tau of the largest;
                islands are the connected components
    merging     two islands become one as long as the estimated bottleneck of the pipeline over all islands grows by
                at most a factor; the cheapest pair first

An island is planned as if all its devices were its slowest and had its smallest memory, so merging costs what its
other devices could have done more. The bottleneck is estimated at perfect balance, where layers go by compute, by
memory or by its bandwidth: of the sums of each over all islands, the one of which merging takes most decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Protocol

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import MAX_BATCH, is_whole
from ds_hetero.cost.stages.stage import DeviceBlock, Pool, Pools, StageCosts
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to

TAU = 0.2  # of the largest value of a metric
MERGE = 1.0  # growth of the bottleneck up to which islands are merged; not printed, and at 1 none that differ are


@dataclass(frozen=True, slots=True)
class Island:
    """Devices that are planned as equal ones."""

    pools: tuple[Pool, ...]  # its nodes, as pools of devices of one kind
    weakest: int  # kind of its slowest device with the least memory, which stands for all of them
    totals: tuple[float, float, float]  # of all its devices, at the least of any: FLOP/s, memory and its bytes/s

    @classmethod
    def of(cls, pools: Pools, members: Iterable[Pool]) -> Island:
        """Return the island of some pools."""
        chosen = tuple(sorted(members, key=lambda pool: (pool.node, pool.kind)))
        devices = {pool.kind: pools.kinds[pool.kind].device for pool in chosen}
        weakest = min(devices, key=lambda kind: (devices[kind].memory_bytes, devices[kind].peak_flops_per_s, kind))
        count = sum(len(pool.ranks) for pool in chosen)
        flops, memory, bandwidth = map(min, zip(*map(_metrics, devices.values()), strict=True))
        return cls(chosen, weakest, (count * flops, count * memory, count * bandwidth))

    @property
    def flops_per_s(self) -> float:
        """Of all its devices, at the speed of the slowest."""
        return self.totals[0]

    @property
    def num_devices(self) -> int:
        """Devices of all its nodes."""
        return sum(len(pool.ranks) for pool in self.pools)


def form_islands(pools: Pools, tau: float = TAU, merge: float = MERGE) -> list[Island]:
    """Return the islands of a cluster, fastest first.

    Args:
        tau: largest difference of two connected nodes in any metric, relative to the metric's largest value.
        merge: factor by which the bottleneck may grow when two islands become one.
    """
    islands = [Island.of(pools, members) for members in _components(pools, tau)]
    while len(islands) > 1:
        pairs = itertools.combinations(range(len(islands)), 2)
        merged = [(Island.of(pools, islands[a].pools + islands[b].pools), a, b) for a, b in pairs]
        sums = [sum(column) for column in zip(*(island.totals for island in islands), strict=True)]
        growth = [zip(sums, islands[a].totals, islands[b].totals, new.totals, strict=True) for new, a, b in merged]
        costs = [max(whole / (whole - one - other + new) for whole, one, other, new in each) for each in growth]
        cheapest = min(range(len(merged)), key=costs.__getitem__)
        if costs[cheapest] > merge:
            break
        new, a, b = merged[cheapest]
        islands = [island for i, island in enumerate(islands) if i not in (a, b)] + [new]
    return sorted(islands, key=lambda island: (-island.flops_per_s, island.pools[0].node))


def _metrics(device: DeviceSpec) -> tuple[float, float, float]:
    """FLOP/s, memory and its bytes/s, by which nodes are alike."""
    return device.peak_flops_per_s, device.memory_bytes, device.memory_bytes_per_s


def _components(pools: Pools, tau: float) -> list[list[Pool]]:
    """Connected components of the nodes whose metrics differ by at most ``tau``."""
    metrics = [_metrics(kind.device) for kind in pools.kinds]
    largest = [max(column) for column in zip(*metrics, strict=True)]

    def alike(a: int, b: int) -> bool:
        pairs = zip(metrics[a], metrics[b], largest, strict=True)
        return all(abs(x - y) <= tau * most for x, y, most in pairs)

    components: list[set[int]] = []
    for kind in range(len(metrics)):
        near = [component for component in components if any(alike(kind, other) for other in component)]
        components = [component for component in components if component not in near]
        components.append({kind}.union(*near))
    return [[pool for pool in pools.pools if pool.kind in component] for component in components]


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


class UniformParallelizer:
    """Tries every data, pipeline, tensor or sequence-parallel degree, and these sizes of micro-batches."""

    def __init__(self, costs: StageCosts, samples: int, sizes: Sequence[int]) -> None:
        self._costs, self._samples, self._sizes = costs, samples, tuple(sizes)

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """See `Parallelizer.plan`: by period and latency for the micro-batches that a lane then has."""
        best: dict[tuple[int, int], tuple[float, PartialPlan]] = {}
        for size in sizes_up_to(min(len(pool.ranks) for pool in island.pools)):
            blocks = sum(len(pool.ranks) // size for pool in island.pools)
            for data, samples in itertools.product(range(1, blocks + 1), self._sizes):
                stages = min(blocks // data, part.layers)
                if blocks % data and blocks // data == blocks // (data + 1):
                    continue  # another lane fits as well
                if self._samples % (data * samples):
                    continue
                for inner in self._costs.inners if size > 1 else ("tensor",):
                    plan = self._try(part, island.weakest, (data, stages, size), inner, samples)
                    if plan is None:
                        continue
                    count = self._samples // (data * samples)
                    time_s = (count - 1) * plan.period_s + plan.latency_s
                    if (data, samples) not in best or time_s < best[data, samples][0]:
                        best[data, samples] = time_s, plan
        return [plan for _, plan in best.values()]

    def _try(
        self, part: Slice, kind: int, degrees: tuple[int, int, int], inner: str, samples: int
    ) -> PartialPlan | None:
        """One choice of degrees (lanes, stages, devices of a stage); None if it does not fit."""
        data, stages, size = degrees
        pool = self._costs.pools.largest[kind]
        block = block_of(pool, size, inner)
        option = self._costs.stage(kind, size, block.inner, samples, data)
        if option is None:
            return None
        layers = tuple(ceil((part.layers - j) / stages) for j in range(stages))
        link = int(self._costs.cluster.link_class[pool.node, pool.node])
        hop_s = self._costs.hop_s(link, block, block, samples) if stages > 1 else 0.0
        seconds, memory = [], []
        for j, (count, kept) in enumerate(zip(layers, self._costs.kept_by_default(stages), strict=True)):
            first, last = part.first and j == 0, part.last and j == stages - 1
            seconds.append(count * option.layer_s + option.extra_s(first, last))
            memory.append(option.memory_bytes(count, first, last, kept))
        if max(memory) > option.capacity_bytes:
            return None
        return PartialPlan(
            data_parallel=data,
            tensor_parallel=1 if inner == "sequence" else size,
            sequence_parallel=size if inner == "sequence" else 1,
            expert_parallel=1,
            zero_stage=counted_zero_stage(self._costs),
            recomputation=self._costs.activation_checkpointing,
            layers=layers,
            micro_batch_size=samples,
            period_s=max(seconds) + (hop_s if self._costs.hop_in_step else 0.0),
            latency_s=sum(seconds) + 2 * hop_s * (stages - 1),
            memory_bytes=max(memory),
            output_shape=(samples, self._costs.seq_len, self._costs.model.hidden_size),
        )
