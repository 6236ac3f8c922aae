"""An inner parallelizer of equal devices: data x pipeline x tensor or sequence parallelism, chosen by trying all.

Stages are equal over the island, as Megatron-LM has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import ceil

from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to
from ds_hetero.planner.published.tangram.interface import PartialPlan, Slice, counted_zero_stage
from ds_hetero.planner.published.tangram.islands import Island


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
