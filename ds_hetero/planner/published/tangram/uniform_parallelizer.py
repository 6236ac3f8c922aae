"""An inner parallelizer of equal devices: it tries all degrees of data, pipeline, and tensor or sequence parallelism.

All stages of an island have equally many devices, as in Megatron-LM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to
from ds_hetero.planner.published.tangram.interface import (
    PartialPlan,
    Slice,
    counted_expert_parallel,
    counted_zero_stage,
)
from ds_hetero.planner.published.tangram.islands import Island


class _TimedPlan(NamedTuple):
    """A partial plan, and its time for all micro-batches of a lane."""

    time_s: float
    plan: PartialPlan


class UniformParallelizer:
    """Plans a slice on an island by trying all degrees of parallelism, see `Parallelizer`.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """

    def __init__(self, costs: StageCosts, samples: int, sizes: Sequence[int]) -> None:
        self._costs, self._samples, self._sizes = costs, samples, tuple(sizes)

    def plan(self, part: Slice, island: Island) -> Sequence[PartialPlan]:
        """Return the fastest plan for every degree of data parallelism and size of micro-batches.

        The time is that of a lane's share of the global batch, by period and latency.
        """
        best: dict[tuple[int, int], _TimedPlan] = {}
        for size in sizes_up_to(min(len(pool.ranks) for pool in island.pools)):
            num_blocks = sum(len(pool.ranks) // size for pool in island.pools)
            for num_lanes, samples in itertools.product(range(1, num_blocks + 1), self._sizes):
                num_stages = min(num_blocks // num_lanes, part.layers)
                if num_blocks % num_lanes and num_blocks // num_lanes == num_blocks // (num_lanes + 1):
                    continue  # with one more lane, the lanes would have as many stages
                if self._samples % (num_lanes * samples):
                    continue
                for inner in self._costs.inners if size > 1 else ("tensor",):
                    plan = self._try(part, island.weakest, (num_lanes, num_stages, size), inner, samples)
                    if plan is None:
                        continue
                    micro_batches = self._samples // (num_lanes * samples)
                    time_s = (micro_batches - 1) * plan.period_s + plan.latency_s
                    if (num_lanes, samples) not in best or time_s < best[num_lanes, samples].time_s:
                        best[num_lanes, samples] = _TimedPlan(time_s, plan)
        return [timed.plan for timed in best.values()]

    def _try(
        self, part: Slice, kind: int, degrees: tuple[int, int, int], inner: str, samples: int
    ) -> PartialPlan | None:
        """Return the plan with these degrees: lanes, stages of a lane, devices of a stage; None if it does not fit.

        Args:
            kind: kind of the devices, an index into `Pools.kinds`.
            inner: how the devices of a stage share its work.
            samples: samples of a micro-batch.
        """
        num_lanes, num_stages, size = degrees
        pool = self._costs.pools.largest[kind]
        block = block_of(pool, size, inner)
        option = self._costs.stage(kind, size, block.inner, samples, num_lanes)
        if option is None:
            return None
        layers = tuple(ceil((part.layers - j) / num_stages) for j in range(num_stages))  # 7 in 3 stages: 3, 2, 2
        link = int(self._costs.cluster.link_class[pool.node, pool.node])
        hop_s = self._costs.hop_s(link, block, block, samples) if num_stages > 1 else 0.0
        stage_s, stage_bytes = [], []
        for j, (count, in_flight) in enumerate(zip(layers, self._costs.kept_by_default(num_stages), strict=True)):
            first, last = part.first and j == 0, part.last and j == num_stages - 1
            stage_s.append(count * option.layer_s + option.extra_s(first, last))
            stage_bytes.append(option.memory_bytes(count, first, last, in_flight))
        if max(stage_bytes) > option.capacity_bytes:
            return None
        sequence_parallel = size if inner == "sequence" else 1
        return PartialPlan(
            data_parallel=num_lanes,
            tensor_parallel=1 if inner == "sequence" else size,
            sequence_parallel=sequence_parallel,
            expert_parallel=counted_expert_parallel(self._costs, sequence_parallel),
            zero_stage=counted_zero_stage(self._costs),
            recomputation=self._costs.activation_checkpointing,
            layers=layers,
            micro_batch_size=samples,
            period_s=max(stage_s) + (hop_s if self._costs.hop_in_step else 0.0),
            latency_s=sum(stage_s) + 2 * hop_s * (num_stages - 1),
            memory_bytes=max(stage_bytes),
            output_shape=(samples, self._costs.seq_len, self._costs.model.hidden_size),
        )
