"""Cost model of pipelines as the runtime runs them, at the rates that devices and links achieve.

Formulas of stages whose devices cut layers stand here, the others in modules of their own:

    one, tensor  products and attention cut by n at the efficiency of narrower ones, norms and residuals by every rank,
                 two all-reduces of b S H elements in the forward and two in the backward of a layer, one when it is
                 computed again, since nothing in the backward needs what the second adds up; embedding, head and loss
                 cut by words, with an all-reduce of b S H elements each, and of the loss two of numbers by token
    sequence     `ds_hetero.cost.stages.sequence`
    hops         `ds_hetero.cost.stages.hops`
    gradients    `ds_hetero.cost.stages.gradients`
    memory       `ds_hetero.cost.stages.stage_memory`

Dimension key: J parts of stages of all pipelines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Bools, Floats
from ds_hetero.cost.passes import BlockPasses
from ds_hetero.cost.stages.gradients import GradientTimes
from ds_hetero.cost.stages.hops import HopEnd, HopTimes
from ds_hetero.cost.stages.sequence import FindSchedule, SequenceStages
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, StageCosts, StageOption, SyncTimes
from ds_hetero.cost.stages.stage_memory import CalibratedStageMemory, DeviceParameters
from ds_hetero.cost.terms import communicators
from ds_hetero.cost.terms.layer_memory import WIDE, LayerMemory, LayerShare, layer_memory, logit_bytes
from ds_hetero.cost.terms.zero import RingCollective
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

INNERS = ("tensor", "sequence")  # ways in which several ranks share the work of a stage


class CalibratedStageCosts(StageCosts):
    """Cost model of what the runtime does.

    Args:
        workload: length, attention, checkpointing, loss and bytes; its batches and ZeRO stage take no part, since
            `AsymmetricGradientSync` partitions optimizer state over the holders of every element.
        inners: those of `INNERS` that the model can run.
        find: schedules for stages on devices of several pools, see `SequenceStages`.
        owners: of optimizer state, see `StageCosts`.
    """

    name = "calibrated"

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        workload: Workload,
        inners: Sequence[str] = INNERS,
        find: FindSchedule | None = None,
        owners: str | tuple[float, ...] = "even",
    ) -> None:
        if workload.adapter_rank or workload.fused_kernels or workload.selective_checkpointing:
            raise PlanError(
                "stages of pipelines have no memory model of adapters, Liger's kernels and selective recomputation. "
                "Plan sequence parallelism: --parallel sequence."
            )
        super().__init__(cluster, model, workload.seq_len, workload.activation_checkpointing)
        self.workload, self.inners, self.owners = workload, tuple(inners), owners
        self._find = find
        self.stage = cache(self.stage)  # type: ignore[method-assign]
        self.sequence = SequenceStages(cluster, model, workload, self.pools, find)
        self._hops = HopTimes(cluster, model, workload, self.pools)
        memory_s_per_byte = [self._memory_s_per_byte(kind) for kind in range(len(self.pools.kinds))]
        self._gradients = GradientTimes(cluster, model, workload, memory_s_per_byte)

    def with_owners(self, owners: str | tuple[float, ...]) -> CalibratedStageCosts:
        """Return the same cost model with other owners of optimizer state."""
        return CalibratedStageCosts(self.cluster, self.model, self.workload, self.inners, self._find, owners)

    # --- stages

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """See `StageCosts.stage`."""
        if inner not in (*self.inners, "one"):
            return None
        if inner == "sequence":
            if not _has_neighbours(self.pools.largest[kind].ranks, size):
                return None
            return self.mixed_stage((PoolPart(kind, self.pools.largest[kind].node, size),), micro_batch_size, pipelines)
        if self.model.num_heads % size or self.model.num_kv_heads % size:
            return None
        model, work, device = self.model, self.workload, self.pools.kinds[kind].device
        of_batch = replace(work, micro_batch=micro_batch_size)
        block = BlockPasses(self._devices(kind, 1), model, of_batch, cut=size)
        reduced_s = self._reduced_s(kind, size, micro_batch_size)
        forward_s, backward_s = (block.alone_s() + 2 * reduced_s).tolist()
        if work.activation_checkpointing:
            backward_s += forward_s - reduced_s
        loss_s = float((self.seq_len / size * block.loss_s_per_token_D + block.loss_fixed_s_D)[0])
        layer = layer_memory(model, of_batch, LayerShare.of_cut(model, of_batch, size))
        return StageOption(
            forward_s=forward_s,
            backward_s=backward_s,
            first_s=reduced_s,
            last_s=loss_s + reduced_s + self._exchanged_s(kind, size, micro_batch_size),
            side_s=2 * device.efficiency.message_overhead_s + self._gathered_s(kind, size, micro_batch_size),
            capacity_bytes=device.usable_bytes,
            memory=self._memory(
                PoolPart(kind, self.pools.largest[kind].node, size),
                layer=layer.mapped(lambda alone: float(np.max(alone))),
                logits=float(logit_bytes(model, of_batch, np.array([float(self.seq_len)]))[0]) / size,
                ranks=size,
                holders=pipelines,
                cut=size,
            ),
        )

    def _reduced_s(self, kind: int, size: int, micro_batch_size: int) -> float:
        """An all-reduce of the activations of a micro-batch on devices that cut a layer, which has two in each pass."""
        if size == 1:
            return 0.0
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        return 2 * self._gathered_s(kind, size, micro_batch_size) - host_s

    def _exchanged_s(self, kind: int, size: int, micro_batch_size: int) -> float:
        """The all-reduces of a loss whose words are cut: of a number by token, and of two, in fp32."""
        if size == 1:
            return 0.0
        reduce = RingCollective.over(self._devices(kind, size))
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        tokens = micro_batch_size * self.seq_len
        return sum(2 * reduce(WIDE * numbers * tokens) + host_s for numbers in (1, 2))

    def _gathered_s(self, kind: int, size: int, micro_batch_size: int) -> float:
        """A gather of the activations of a micro-batch, of which each device that cuts a layer has a part."""
        if size == 1:
            return 0.0
        volume = micro_batch_size * self.seq_len * self.model.hidden_size * self.workload.element_bytes
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        return RingCollective.over(self._devices(kind, size))(volume) + host_s

    def mixed_stage(self, parts: tuple[PoolPart, ...], micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Every device holds the parameters of its stage whole."""
        shared = self.sequence.passes(parts, micro_batch_size) if "sequence" in self.inners else None
        if shared is None:
            return None
        ranks = sum(part.size for part in parts)
        holders = ranks + pipelines - 1
        memory = []
        for part, layer, logits in zip(parts, shared.layer, shared.logits, strict=True):
            memory.append(
                StageOption(
                    forward_s=shared.forward_s,
                    backward_s=shared.backward_s,
                    last_s=shared.loss_s,
                    side_s=2 * max(self.pools.kinds[each.kind].device.efficiency.message_overhead_s for each in parts),
                    capacity_bytes=self.pools.kinds[part.kind].device.usable_bytes,
                    memory=self._memory(part, layer, logits, ranks, holders),
                )
            )
        return replace(memory[0], beside=tuple(memory[1:]))

    def schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        """See `SequenceStages.schedule`."""
        return self.sequence.schedule(parts, micro_batch_size)

    def keep_schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int, schedule: Schedule) -> None:
        """See `SequenceStages.keep`."""
        self.sequence.keep(parts, micro_batch_size, schedule)

    def _devices(self, kind: int, size: int) -> Cluster:
        return self.cluster.subset(self.pools.largest[kind].ranks[:size])

    def _memory_s_per_byte(self, kind: int) -> float:
        device = self.pools.kinds[kind].device
        return 1 / (device.memory_bytes_per_s * device.efficiency.memory)

    # --- memory

    def _communicator_bytes(self, part: PoolPart, ranks: int, neighbours: int, holders: int) -> float:
        """Of NCCL on a device of ``part``, beyond its reserve; see `communicators.of_stage`."""
        needed = communicators.of_stage(
            self.cluster,
            self.cluster.nodes[part.node],
            local_ranks=part.size,
            ranks=ranks,
            neighbours=min(neighbours, self.cluster.num_ranks - ranks),
            holders=holders,
        )
        return communicators.beyond_reserve(self.pools.kinds[part.kind].device, needed)

    def _memory(
        self, part: PoolPart, layer: LayerMemory, logits: float, ranks: int, holders: int, cut: int = 1
    ) -> CalibratedStageMemory:
        """Owners of an element are those who add to its gradient; where owners differ, what they own is on top.

        Args:
            part: the devices of the stage that are alike, on one node.
            logits: of the head on a device.
            ranks: of the stage.
            holders: who add to a gradient.
            cut: devices that cut the parameters of a layer, of embedding and of head.
        """
        model, work = self.model, self.workload
        if self.pools.kinds[part.kind].device.shares_host_memory:  # offloaded checkpoints stay in it
            work = replace(work, offload_activations=False)
        table, matrix = model.vocab_size * model.hidden_size / cut, model.mlp_size * model.hidden_size / cut
        owns = 1 / holders / cut if self.owners == "even" or holders == 1 else 0.0
        return CalibratedStageMemory(
            num_layers=model.num_layers,
            workload=work,
            layer=layer,
            logits=logits,
            of_layer=DeviceParameters(model.layer_parameters / cut, model.layer_parameters * owns),
            of_end=DeviceParameters(table, table * cut * owns),
            largest=max(table, matrix),
            holders=holders,
            communicators=(
                self._communicator_bytes(part, ranks, 0, holders),
                self._communicator_bytes(part, ranks, 1, holders),
                self._communicator_bytes(part, ranks, 2, holders),
            ),
        )

    # --- hops

    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """One direction; see `ds_hetero.cost.stages.hops`."""
        ends = [self._hop_end(block, micro_batch_size) for block in (source, target)]
        return self._hops.hop_s(link, *ends, micro_batch_size)

    def _hop_end(self, block: DeviceBlock, micro_batch_size: int) -> HopEnd:
        kinds = (block.kind, *(part.kind for part in block.others))
        if not block.others:
            return HopEnd(kinds, 1 / block.size)
        shared = self.sequence.passes(block.parts, micro_batch_size)
        assert shared is not None, "a stage that cannot run has no hops"
        return HopEnd(kinds, max(shared.tokens) / (micro_batch_size * self.seq_len))

    # --- gradients

    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """See `ds_hetero.cost.stages.gradients`; infinite where owners of optimizer state do not fit into memory."""
        if self.owners == "even":
            return self._gradients.times(pipelines)
        weights_J = self._owner_weights(pipelines)
        return SyncTimes(0.0, inf) if weights_J is None else self._gradients.times(pipelines, weights_J)

    def owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> list[float] | None:
        """Weight as an owner of optimizer state, by part of every stage of every pipeline; None if all own alike."""
        weights_J = None if self.owners == "even" else self._owner_weights(pipelines)
        return None if weights_J is None else weights_J.tolist()

    def owned_bytes(self, pipelines: Sequence[PlacedPipeline]) -> Iterable[float]:
        """See `StageCosts.owned_bytes`."""
        weights = self.owner_weights(pipelines)
        if weights is None:
            return itertools.repeat(0.0)
        owned_J = self._gradients.owned_parameters(pipelines, np.array(weights))
        counted_J = self._counts_owned(pipelines)
        return list(map(float, np.where(counted_J, 0.0, owned_J * self.workload.optimizer_bytes)))

    def _owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> Floats | None:
        """The given ones where they fit, or fitted ones."""
        free = []
        for pipeline in pipelines:
            stages = len(pipeline.blocks)
            of_stages = zip(pipeline.blocks, pipeline.layers, self.kept_by_default(stages), strict=True)
            for j, (block, layers, kept) in enumerate(of_stages):
                option = self.of_block(block, pipeline.micro_batch_size, len(pipelines))
                for part in () if option is None else option.parts:
                    need = part.memory_bytes(layers, j == 0, j == stages - 1, kept)
                    free.append((part.capacity_bytes - need) / self.workload.optimizer_bytes)
        most_J = np.where(self._counts_owned(pipelines), inf, np.array(free))
        if isinstance(self.owners, str):
            return self._gradients.fit(pipelines, most_J)
        weights_J = np.array(self.owners)
        fits = self._gradients.owned_parameters(pipelines, weights_J) <= most_J
        return weights_J if fits.all() else None

    def _counts_owned(self, pipelines: Sequence[PlacedPipeline]) -> Bools:
        """Whether the memory of a stage counts its optimizer state: where nobody else can own it, by part."""
        alone = len(pipelines) == 1
        blocks = [block for pipeline in pipelines for block in pipeline.blocks]
        return np.array([alone and (b.inner != "sequence" or b.size == 1) for b in blocks for _ in b.parts])

    def step_s(self, pipelines_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """Gradients leave while the last micro-batch goes backward, as far as they are ready."""
        return pipelines_s + max(0.0, sync.reduce_s - overlap_s) + sync.exposed_s


def _has_neighbours(ranks: Sequence[int], size: int) -> bool:
    """Whether ``size`` of these ascending ranks follow one another, as those of a schedule must."""
    return any(last - first == size - 1 for first, last in zip(ranks, ranks[size - 1 :], strict=False))
