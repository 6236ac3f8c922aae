"""Cost model of pipelines as the runtime runs them, at the rates that devices and links achieve.

This module has the formulas of stages whose n devices share layers by tensor parallelism (``tensor``, and ``one`` for
n = 1), for micro-batches of b sequences of S tokens and a hidden size of H:

    layer        Matmuls and attention are split by n, at the efficiency of narrower matmuls; every device computes
                 norms and residuals of the full width. The forward has two all-reduces of b S H elements, the backward
                 two more. Recomputation has one, since the backward does not need the sum of the second all-reduce.
    ends         Embedding, head and loss are split by vocabulary. Embedding and head have an all-reduce of b S H
                 elements each, the loss one of a number and one of two numbers per token.

Devices of tensor groups that share sequences have the same all-reduces, of their group's tokens, beside the times of
their part of the model.

With ``divides_experts`` the devices of a ``sequence`` stage of one pool divide the experts of every layer equally, and
tokens travel to their experts inside the stage (`ds_hetero.cost.divided_experts`). Stages of other kinds hold experts
as without it. No job of pipelines runs this yet; Tangram's plans of mixtures of experts have it.

Other modules have the rest:

    sequence     stages whose devices share sequences             `ds_hetero.cost.stages.sequence`
    hops         transfers between stages                         `ds_hetero.cost.stages.hops`
    gradients    synchronization between pipelines                `ds_hetero.cost.stages.gradients`
    memory       memory of a device                               `ds_hetero.cost.stages.stage_memory`

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
from ds_hetero.cost.stages.hops import BoundarySide, HopTimes
from ds_hetero.cost.stages.sequence import FindSchedule, SequenceStages, fastest_mesh
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, StageCosts, StageOption, SyncTimes
from ds_hetero.cost.stages.stage_loss import loss_workload
from ds_hetero.cost.stages.stage_memory import CalibratedStageMemory, DeviceParameters
from ds_hetero.cost.terms import communicators
from ds_hetero.cost.terms.expert_shares import EQUAL, divided_of_layer, expect_experts
from ds_hetero.cost.terms.layer_memory import WIDE, LayerMemory, LayerShare, layer_memory, logit_bytes
from ds_hetero.cost.terms.trained import largest_trained, layer_weight_bytes, trained_of_ends, trained_of_layer
from ds_hetero.cost.terms.zero import RingCollective
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule

INNERS = ("tensor", "sequence")  # ways in which several ranks share the work of a stage


class CalibratedStageCosts(StageCosts):
    """Calibrated cost model of stages and pipelines.

    Args:
        workload: length, attention, checkpointing, loss and bytes. Its batches and ZeRO stage are ignored, since
            `AsymmetricGradientSync` partitions optimizer state over the holders of every element.
        inners: the kinds of stages in `INNERS` that the model can run.
        find: finds a schedule for a stage on devices of several pools, see `SequenceStages`.
        owners: owners of optimizer state, see `StageCosts`.
        divides_experts: see `StageCosts`; owners of optimizer state are then even.
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
        *,
        divides_experts: bool = False,
    ) -> None:
        if workload.keeps_attention:
            raise PlanError(
                "stages of pipelines compute attention again in a recomputation, but keep_attention is on. Leave it "
                "out, or plan sequence parallelism: --parallel sequence."
            )
        if workload.experts is not None:
            raise PlanError(
                "stages of pipelines hold the experts of their layers, but experts are to be divided among ranks. "
                "Leave --experts out, or plan sequence parallelism: --parallel sequence."
            )
        self._rest = workload  # the workload of everything but divided experts
        if divides_experts:
            self._rest = replace(workload, experts=EQUAL)
            expect_experts(model, self._rest)
            if owners != "even":
                raise PlanError(
                    f"owners of optimizer state are {owners}, and experts are to be divided among the devices of a "
                    "stage, which is predicted for even owners alone. Leave one of both out."
                )
        super().__init__(cluster, model, workload.seq_len, workload.activation_checkpointing)
        self.workload, self.inners, self.owners = workload, tuple(inners), owners
        self.divides_experts = divides_experts
        self._find = find
        self.stage = cache(self.stage)  # type: ignore[method-assign]
        self._sequences = cache(self._make_sequences)  # by size of tensor groups
        self._hops = HopTimes(cluster, model, workload, self.pools)
        memory_s_per_byte = [self._memory_s_per_byte(kind) for kind in range(len(self.pools.kinds))]
        self._gradients = GradientTimes(cluster, model, self._rest, memory_s_per_byte)
        self._expert_gradients: GradientTimes | None = None
        if divides_experts and not workload.adapter_rank:  # beside adapters, experts are frozen
            self._expert_gradients = GradientTimes(cluster, model, self._rest, memory_s_per_byte, experts_alone=True)

    def with_owners(self, owners: str | tuple[float, ...]) -> CalibratedStageCosts:
        """Return the same cost model with other owners of optimizer state."""
        return CalibratedStageCosts(
            self.cluster,
            self.model,
            self.workload,
            self.inners,
            self._find,
            owners,
            divides_experts=self.divides_experts,
        )

    def with_even_shares(self) -> CalibratedStageCosts:
        """Return the same cost model whose stages share sequences equally, by the fastest mesh; unlike devices too."""
        if self._find is fastest_mesh:
            return self
        assert self.owners is not None, "this cost model models owners"
        return CalibratedStageCosts(
            self.cluster,
            self.model,
            self.workload,
            self.inners,
            fastest_mesh,
            self.owners,
            divides_experts=self.divides_experts,
        )

    # --- stages

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Return the times and memory of a block of one kind, see `StageCosts.stage`."""
        if inner not in (*self.inners, "one"):
            return None
        if inner == "tensor" and self.workload.quantization is not None:
            return None  # kernels read whole blocks of packed weights, which cannot be cut by columns or rows
        if inner == "sequence":
            if not _has_neighbours(self.pools.largest[kind].ranks, size):
                return None
            return self.mixed_stage((PoolPart(kind, self.pools.largest[kind].node, size),), micro_batch_size, pipelines)
        if self.model.num_heads % size or self.model.num_kv_heads % size:
            return None
        model, work, device = self.model, self.workload, self.pools.kinds[kind].device
        micro_batch_work = replace(work, micro_batch=micro_batch_size)
        block = BlockPasses(self._devices(kind, 1), model, micro_batch_work, cut=size)
        tokens = micro_batch_size * self.seq_len
        all_reduce_s = self._all_reduce_s(kind, size, tokens)
        forward_s, backward_s = (block.alone_s() + 2 * all_reduce_s).tolist()
        if work.activation_checkpointing:
            backward_s += forward_s - all_reduce_s
        loss_work = loss_workload(micro_batch_work)
        head = BlockPasses(self._devices(kind, 1), model, loss_work) if loss_work != micro_batch_work else block
        loss_s = float((self.seq_len / size * head.loss_s_per_token_D + head.loss_fixed_s_D)[0])
        layer = layer_memory(model, micro_batch_work, LayerShare.of_cut(model, micro_batch_work, size))
        logit_bytes_D = logit_bytes(model, loss_work, np.array([float(self.seq_len)]))
        return StageOption(
            forward_s=forward_s,
            backward_s=backward_s,
            first_s=all_reduce_s,
            last_s=loss_s + all_reduce_s + self._loss_all_reduces_s(kind, size, tokens),
            side_s=2 * device.efficiency.message_overhead_s + self._all_gather_s(kind, size, tokens),
            capacity_bytes=device.usable_bytes,
            memory=self._memory(
                PoolPart(kind, self.pools.largest[kind].node, size),
                layer=layer.mapped(lambda per_rank: float(np.max(per_rank))),
                logits=float(logit_bytes_D[0]) / size,
                ranks=size,
                holders=pipelines,
                cut=size,
            ),
        )

    def _make_sequences(self, tensor_size: int) -> SequenceStages:
        """Return the costs of stages that share sequences between tensor groups of this size."""
        return SequenceStages(
            self.cluster,
            self.model,
            self.workload,
            self.pools,
            self._find,
            tensor_size,
            divides_experts=self.divides_experts,
        )

    def _all_reduce_s(self, kind: int, size: int, tokens: float) -> float:
        """Return the time of one all-reduce of the activations of ``tokens`` over ``size`` tensor-parallel devices."""
        if size == 1:
            return 0.0
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        return 2 * self._all_gather_s(kind, size, tokens) - host_s

    def _loss_all_reduces_s(self, kind: int, size: int, tokens: float) -> float:
        """Return the time of the all-reduces of a vocabulary-parallel loss: one and two fp32 numbers per token."""
        if size == 1:
            return 0.0
        reduce = RingCollective.over(self._devices(kind, size))
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        return sum(2 * reduce(WIDE * numbers * tokens) + host_s for numbers in (1, 2))

    def _all_gather_s(self, kind: int, size: int, tokens: float) -> float:
        """Return the time of one all-gather of the activations of ``tokens`` over ``size`` tensor-parallel devices."""
        if size == 1:
            return 0.0
        volume = tokens * self.model.hidden_size * self.workload.element_bytes
        host_s = self.pools.kinds[kind].device.efficiency.message_overhead_s
        return RingCollective.over(self._devices(kind, size))(volume) + host_s

    def mixed_stage(
        self, parts: tuple[PoolPart, ...], micro_batch_size: int, pipelines: int, tensor_size: int = 1
    ) -> StageOption | None:
        """Return the times and memory of devices that share sequences.

        Each holds all parameters of the stage, or with tensor groups its part of them.
        """
        if not self._can_share_sequences(parts, tensor_size):
            return None
        shared = self._sequences(tensor_size).passes(parts, micro_batch_size)
        if shared is None:
            return None
        num_ranks = sum(part.size for part in parts)
        num_holders = num_ranks // tensor_size + pipelines - 1  # other pipelines count as one holder each
        devices = [self.pools.kinds[part.kind].device for part in parts]
        side_s = 2 * max(device.efficiency.message_overhead_s for device in devices)
        # The group whose all-reduces last longest: the others wait for it in the exchange of attention that follows.
        groups = list(zip(parts, shared.tokens, strict=True))
        all_reduce_s = max(self._all_reduce_s(part.kind, tensor_size, tokens) for part, tokens in groups)
        loss_s = max(self._loss_all_reduces_s(part.kind, tensor_size, tokens) for part, tokens in groups)
        gather_s = max(self._all_gather_s(part.kind, tensor_size, tokens) for part, tokens in groups)
        recomputed_s = all_reduce_s if self.workload.activation_checkpointing else 0.0
        options = []
        for part, device, layer, logits in zip(parts, devices, shared.layer, shared.logits, strict=True):
            option = StageOption(
                forward_s=shared.forward_s + 2 * all_reduce_s,
                backward_s=shared.backward_s + 2 * all_reduce_s + recomputed_s,
                first_s=all_reduce_s,
                last_s=shared.loss_s + all_reduce_s + loss_s,
                side_s=side_s + gather_s,
                capacity_bytes=device.usable_bytes,
                memory=self._memory(
                    part,
                    layer,
                    logits,
                    num_ranks,
                    num_holders,
                    cut=tensor_size,
                    expert_holders=pipelines if self.divides_experts else None,
                ),
            )
            options.append(option)
        return replace(options[0], other_parts=tuple(options[1:]))

    def _can_share_sequences(self, parts: tuple[PoolPart, ...], tensor_size: int) -> bool:
        """Whether the model runs on devices that share sequences between tensor groups of this size."""
        if "sequence" not in self.inners:
            return False
        if self.divides_experts:
            # Equal numbers of experts on equal devices; experts that tensor groups cut are not predicted.
            return len(parts) == 1 and tensor_size == 1 and self.model.num_experts % parts[0].size == 0
        if tensor_size == 1:
            return True
        if "tensor" not in self.inners or self.workload.quantization is not None:
            return False
        has_whole_groups = all(part.size % tensor_size == 0 for part in parts)
        return has_whole_groups and self.model.num_heads % tensor_size == self.model.num_kv_heads % tensor_size == 0

    def schedule(self, block: DeviceBlock, micro_batch_size: int) -> Schedule | None:
        """Return the schedule of devices that share sequences, see `SequenceStages.schedule`."""
        return self._sequences(block.tensor_size).schedule(block.parts, micro_batch_size)

    def keep_schedule(self, block: DeviceBlock, micro_batch_size: int, schedule: Schedule) -> None:
        """Make `schedule` return a given schedule for this block, see `SequenceStages.keep`."""
        self._sequences(block.tensor_size).keep(block.parts, micro_batch_size, schedule)

    def _devices(self, kind: int, size: int) -> Cluster:
        """Return a cluster of ``size`` devices of one kind, on the node that has most of them."""
        return self.cluster.subset(self.pools.largest[kind].ranks[:size])

    def _memory_s_per_byte(self, kind: int) -> float:
        """Return the seconds in which a device of this kind reads or writes a byte of its memory."""
        device = self.pools.kinds[kind].device
        return 1 / (device.memory_bytes_per_s * device.efficiency.memory)

    # --- memory

    def _communicator_bytes(self, part: PoolPart, ranks: int, neighbours: int, holders: int) -> float:
        """Return the bytes of NCCL's communicators on a device of ``part`` that its reserve does not cover."""
        needed = communicators.stage_communicator_bytes(
            self.cluster,
            self.cluster.nodes[part.node],
            local_ranks=part.size,
            ranks=ranks,
            neighbours=min(neighbours, self.cluster.num_ranks - ranks),
            holders=holders,
        )
        return communicators.bytes_beyond_reserve(self.pools.kinds[part.kind].device, needed)

    def _memory(
        self,
        part: PoolPart,
        layer: LayerMemory,
        logits: float,
        ranks: int,
        holders: int,
        cut: int = 1,
        expert_holders: int | None = None,
    ) -> CalibratedStageMemory:
        """Return the memory of a device of ``part``.

        With even owners the holders of an element own equal shares of its optimizer state, which count here. With
        unequal owners the shares depend on the whole plan, so no optimizer state counts here: see `owned_bytes`.

        Args:
            part: devices of the stage of one kind on one node.
            logits: bytes of the head's logits on a device.
            ranks: ranks of the stage.
            holders: ranks that hold an element and add to its gradient.
            cut: devices that share the parameters of a layer, of the embedding and of the head.
            expert_holders: ranks that hold an expert, if the ranks of the stage divide them; else None.
        """
        model, work = self.model, self.workload
        if self.pools.kinds[part.kind].device.shares_host_memory:  # offloading checkpoints frees no memory there
            work = replace(work, offload_activations=False)
        embedding = model.vocab_size * model.hidden_size
        trained_embedding = embedding if trained_of_ends(model, work) else 0
        owned_share = 1 / holders / cut if self.owners == "even" or holders == 1 else 0.0
        of_layer = DeviceParameters(
            weight_bytes=layer_weight_bytes(model, work, cut),
            trained=trained_of_layer(model, work, cut),
            owned=trained_of_layer(model, work) * owned_share,
        )
        if expert_holders is not None:
            of_layer = self._with_divided_experts(ranks, holders, expert_holders)
        return CalibratedStageMemory(
            num_layers=model.num_layers,
            workload=work,
            layer=layer,
            logits=logits,
            of_layer=of_layer,
            of_end=DeviceParameters(
                weight_bytes=work.element_bytes * embedding / cut,
                trained=trained_embedding / cut,
                owned=trained_embedding * owned_share,
            ),
            largest=largest_trained(model, work) / cut,
            holders=holders,
            communicators=(
                self._communicator_bytes(part, ranks, 0, holders),
                self._communicator_bytes(part, ranks, 1, holders),
                self._communicator_bytes(part, ranks, 2, holders),
            ),
        )

    def _with_divided_experts(self, ranks: int, holders: int, expert_holders: int) -> DeviceParameters:
        """Return the weights of one layer on a device of a stage whose ``ranks`` divide its experts equally.

        Args:
            holders: ranks that hold the other weights.
            expert_holders: ranks that hold an expert.
        """
        experts = divided_of_layer(self.model, self._rest) / ranks
        trained_experts = 0.0 if self.workload.adapter_rank else experts
        trained = trained_of_layer(self.model, self._rest)
        return DeviceParameters(
            weight_bytes=layer_weight_bytes(self.model, self._rest) + experts * self.workload.element_bytes,
            trained=trained + trained_experts,
            owned=trained / holders + trained_experts / expert_holders,
        )

    # --- hops

    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """Return the time of one transfer in one direction; see `ds_hetero.cost.stages.hops`."""
        sides = [self._boundary_side(block, micro_batch_size) for block in (source, target)]
        return self._hops.hop_s(link, *sides, micro_batch_size)

    def _boundary_side(self, block: DeviceBlock, micro_batch_size: int) -> BoundarySide:
        """Describe a block as one side of a stage boundary."""
        kinds = (block.kind, *(part.kind for part in block.others))
        if not block.others:
            return BoundarySide(kinds, 1 / block.size)
        shared = self._sequences(block.tensor_size).passes(block.parts, micro_batch_size)
        assert shared is not None, "a stage that cannot run has no hops"
        return BoundarySide(kinds, max(shared.tokens) / (micro_batch_size * self.seq_len * block.tensor_size))

    # --- gradients

    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Return the times to synchronize gradients and parameters; infinite if no owners of optimizer state fit."""
        if self.owners == "even":
            times = self._gradients.times(pipelines)
            if self._expert_gradients is None:
                return times
            of_experts = self._expert_gradients.times(pipelines)
            return SyncTimes(times.reduce_s + of_experts.reduce_s, times.exposed_s + of_experts.exposed_s)
        weights_J = self._owner_weights(pipelines)
        return SyncTimes(0.0, inf) if weights_J is None else self._gradients.times(pipelines, weights_J)

    def owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> list[float] | None:
        """Return the weight of every part of every stage as an owner of optimizer state; None if owners are even."""
        weights_J = None if self.owners == "even" else self._owner_weights(pipelines)
        return None if weights_J is None else weights_J.tolist()

    def owned_bytes(self, pipelines: Sequence[PlacedPipeline]) -> Iterable[float]:
        """Return the bytes of optimizer state on a device that `stage` does not count; see `StageCosts.owned_bytes`."""
        weights = self.owner_weights(pipelines)
        if weights is None:
            return itertools.repeat(0.0)
        owned_J = self._gradients.owned_parameters(pipelines, np.array(weights))
        is_counted_J = self._has_one_owner(pipelines)
        return list(map(float, np.where(is_counted_J, 0.0, owned_J * self.workload.optimizer_bytes)))

    def _owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> Floats | None:
        """Return the weight of every part as an owner, ``[J]``: the weights in ``owners``, or weights fitted to memory.

        None if these weights do not fit into memory, or if no fitted weights were found.
        """
        max_owned = []  # parameters whose optimizer state fits into the free memory of a device, by part
        for pipeline in pipelines:
            num_stages = len(pipeline.blocks)
            stages = zip(pipeline.blocks, pipeline.layers, self.kept_by_default(num_stages), strict=True)
            for j, (block, layers, in_flight) in enumerate(stages):
                option = self.of_block(block, pipeline.micro_batch_size, len(pipelines))
                for part in () if option is None else option.parts:
                    need_bytes = part.memory_bytes(layers, j == 0, j == num_stages - 1, in_flight)
                    max_owned.append((part.capacity_bytes - need_bytes) / self.workload.optimizer_bytes)
        max_owned_J = np.where(self._has_one_owner(pipelines), inf, np.array(max_owned))
        if isinstance(self.owners, str):
            return self._gradients.fit(pipelines, max_owned_J)
        weights_J = np.array(self.owners)
        fits = self._gradients.owned_parameters(pipelines, weights_J) <= max_owned_J
        return weights_J if fits.all() else None

    def _has_one_owner(self, pipelines: Sequence[PlacedPipeline]) -> Bools:
        """Return ``[J]`` whether only one rank can own a part's optimizer state, so that `_memory` counts it."""
        is_only_pipeline = len(pipelines) == 1
        blocks = [block for pipeline in pipelines for block in pipeline.blocks]
        has_one_owner = []
        for block in blocks:
            shares_states = block.inner == "sequence" and block.size > 1
            has_one_owner += [is_only_pipeline and not shares_states] * len(block.parts)
        return np.array(has_one_owner)

    def step_s(self, slowest_pipeline_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """Return the time of an optimizer step; the last backward hides up to ``overlap_s`` of sending gradients.

        Args:
            slowest_pipeline_s: time of the slowest pipeline.
        """
        return slowest_pipeline_s + max(0.0, sync.reduce_s - overlap_s) + sync.exposed_s


def _has_neighbours(ranks: Sequence[int], size: int) -> bool:
    """Whether ``size`` of these ascending ranks are consecutive, as the ranks of a schedule must be."""
    return any(last - first == size - 1 for first, last in zip(ranks, ranks[size - 1 :], strict=False))
