"""Costs and schedules of pipeline stages whose devices share sequences, from `CalibratedCostModel` on those devices.

Devices of one pool share sequences evenly, by the fastest mesh of Ulysses and ring. Devices of several pools get a
schedule with tokens and heads by speed, which the planner finds or a plan file gives. The schedule is chosen for a
model of one layer; memory then limits the layers of the stage.

The *place* of a device is its number among the devices of the stage, counted part by part. Schedules that enter or
leave this module have places as ranks. Example: the first part of a stage has the devices 4 and 5, the second part has
device 1. Their places are 0, 1 and 2.

With tensor groups, a stage is described by the first device of each group, and by the part of the model that this
device computes: 1 / n of the heads, columns and words for groups of n devices (`column_model`). The other devices of
the groups do the same at the same time.

Dimension key: D ranks of the stage, in ascending order of its devices; with tensor groups the first of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.rounding import ceil_div
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.stage import PoolPart, Pools
from ds_hetero.cost.stages.stage_loss import loss_workload
from ds_hetero.cost.terms.expert_shares import EQUAL, share_of_experts_D
from ds_hetero.cost.terms.layer_memory import LayerMemory, LayerShare, layer_memory, logit_bytes
from ds_hetero.cost.terms.memory_parts import Bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.baselines import usp_meshes
from ds_hetero.values.schedule import Schedule

FindSchedule = Callable[[CalibratedCostModel], Schedule | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPass:
    """Times and memory of one layer on devices that share its sequences.

    Tuples have one value per part of the stage: that of the part's device with the largest value.
    """

    forward_s: float  # forward of one layer
    backward_s: float  # backward of one layer, recomputation included
    loss_s: float  # forward and backward of the head
    tokens: tuple[float, ...]  # tokens of a device, all samples of a micro-batch together
    layer: tuple[LayerMemory, ...]  # memory of one layer
    logits: tuple[float, ...]  # bytes of the head's logits


class SequenceStages:
    """Costs and schedules of stages whose devices share sequences.

    Args:
        find: finds a schedule for devices of several pools; it returns None if there is none. Without ``find``, stages
            of several pools exist only if `keep` gave them a schedule.
        tensor_size: devices of each tensor group; 1 for none.
        divides_experts: whether the devices divide the experts of a layer equally, and tokens travel to them.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        workload: Workload,
        pools: Pools,
        find: FindSchedule | None,
        tensor_size: int = 1,
        *,
        divides_experts: bool = False,
    ) -> None:
        self._cluster, self._workload, self._find, self._tensor_size = cluster, workload, find, tensor_size
        self._experts = EQUAL if divides_experts else None
        self._model = column_model(model, tensor_size)
        self._ranks_of_pool = {(pool.kind, pool.node): pool.ranks for pool in pools.pools}
        self._largest = pools.largest
        self._fixed_schedules: dict[tuple[object, ...], Schedule] = {}  # those of `keep`
        self._best_schedules: dict[tuple[object, ...], Schedule | None] = {}  # cache of `_best`
        self.passes = cache(self._passes)

    def schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        """Return the schedule of these devices, with places as ranks; None if none works."""
        fixed = self._fixed_schedules.get(self._key(parts, micro_batch_size))
        if fixed is not None:
            return fixed
        # Schedules of several pools are searched once for all micro-batch sizes, on which shares hardly depend.
        key = self._key(parts, micro_batch_size if len(parts) == 1 else 1)
        if key not in self._best_schedules:
            self._best_schedules[key] = self._best(parts, micro_batch_size)
        return self._best_schedules[key]

    def keep(self, parts: tuple[PoolPart, ...], micro_batch_size: int, schedule: Schedule) -> None:
        """Make `schedule` return a given schedule for these devices. Raises `PlanError`: they have another one."""
        key = self._key(parts, micro_batch_size)
        if self._fixed_schedules.setdefault(key, schedule) != schedule:
            raise PlanError(
                "the plan has stages with equal devices and equal micro-batches but different schedules, and the cost "
                "model knows one for both. Give them the same schedule."
            )
        self.passes.cache_clear()

    def _best(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        """Find the fastest schedule for these devices; None if none works."""
        size = sum(map(self._members, parts))
        if size < 2 or self._workload.seq_len < size:
            return None
        if len(parts) == 1:
            return fastest_mesh(self._cost(parts, micro_batch_size, True))
        if self._find is None:
            return None
        schedule = self._find(self._cost(parts, 1, True))
        return None if schedule is None else schedule.on_ranks(self._places(parts))

    def _passes(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> SharedPass | None:
        """Compute times and memory of one layer under the schedule of these devices; None if they have none."""
        schedule = self.schedule(parts, micro_batch_size)
        if schedule is None:
            return None
        places = self._places(parts)
        rank_of = sorted(range(len(places)), key=places.__getitem__)  # rank at every place
        checkpointed_cost = self._cost(parts, micro_batch_size, True)
        plain_cost = self._cost(parts, micro_batch_size, False)
        grouping, tokens_D, heads_D = checkpointed_cost.arrays(schedule.on_ranks(rank_of))
        # Checkpointing repeats the forward, so the difference of both block times is one forward.
        checkpointed_s = checkpointed_cost.block_s(grouping, tokens_D, heads_D)
        forward_s = checkpointed_s - plain_cost.block_s(grouping, tokens_D, heads_D)
        cost = checkpointed_cost if self._workload.activation_checkpointing else plain_cost
        if self._workload.selective_checkpointing:
            cost = self._cost(parts, micro_batch_size, False, selective=True)

        share = LayerShare.of_sequence(cost.model, cost.workload, grouping, tokens_D, heads_D)
        if not cost.workload.adapter_rank:
            share = share._replace(residual_cut=self._tensor_size)
        if self._experts is not None:
            share = share._replace(
                experts=share_of_experts_D(cost.model, cost.workload, cost.cluster),
                expert_tokens=share.tokens.sum(axis=-1, keepdims=True),
            )
        memory = layer_memory(cost.model, cost.workload, share)
        loss_work = loss_workload(cost.workload)
        loss_cost = cost if loss_work == cost.workload else CalibratedCostModel(cost.cluster, cost.model, loss_work)
        logits_D = logit_bytes(cost.model, loss_work, tokens_D)
        stops = list(accumulate(map(self._members, parts)))  # first place after every part

        def largest_of_part(stop: int, size: int) -> Callable[[Bytes], float]:
            """Return a function of values per rank: the largest in the part whose ``size`` places end at ``stop``."""
            part_ranks = rank_of[stop - size : stop]
            return lambda per_rank: float(np.broadcast_to(per_rank, (len(places),))[part_ranks].max())

        reductions = [largest_of_part(stop, self._members(part)) for part, stop in zip(parts, stops, strict=True)]
        return SharedPass(
            forward_s=forward_s,
            backward_s=cost.block_s(grouping, tokens_D, heads_D) - forward_s,
            loss_s=loss_cost.outside_blocks_s(tokens_D)["loss_s"],
            tokens=tuple(largest(tokens_D * micro_batch_size) for largest in reductions),
            layer=tuple(memory.mapped(largest) for largest in reductions),
            logits=tuple(largest(logits_D) for largest in reductions),
        )

    def _cost(
        self, parts: tuple[PoolPart, ...], micro_batch_size: int, checkpointing: bool, *, selective: bool = False
    ) -> CalibratedCostModel:
        """Make the cost model of one layer on the stage's devices.

        ZeRO stage 1 is set, since it has no traffic during a layer; gradients between pipelines are counted elsewhere.

        Args:
            checkpointing: whether whole layers are recomputed.
            selective: whether norms and activations alone are recomputed.
        """
        work = self._workload
        stage_workload = Workload(
            seq_len=work.seq_len,
            micro_batch=micro_batch_size,
            causal=work.causal,
            zero_stage=1,
            activation_checkpointing=checkpointing,
            tiled_logits=work.tiled_logits,
            tiled_mlp=work.tiled_mlp,
            tile_tokens=work.tile_tokens,
            element_bytes=work.element_bytes,
            adapter_rank=work.adapter_rank,
            trains_embedding=work.trains_embedding,
            quantization=work.quantization,
            logit_bytes=work.logit_bytes,
            fused_kernels=work.fused_kernels,
            compiled=work.compiled,
            selective_checkpointing=selective,
            experts=self._experts,
            ring_gradients=work.ring_gradients,
        )
        one_layer = replace(self._model, num_layers=1)
        # The other devices of the tensor groups are not in this subset, which gets its share of NICs and switches.
        return CalibratedCostModel(self._cluster.subset(self._devices(parts)), one_layer, stage_workload)

    def _devices(self, parts: Sequence[PoolPart]) -> list[int]:
        """Return the cluster's ranks for the devices of a stage, part by part: the first of every tensor group.

        A stage of a single part gets ranks of the largest pool of its kind, since pools of one kind are equally fast.
        """
        step = self._tensor_size
        if len(parts) == 1:
            return list(self._largest[parts[0].kind].ranks[: parts[0].size : step])
        devices: list[int] = []
        for part in parts:
            devices += self._ranks_of_pool[part.kind, part.node][: part.size : step]
        return devices

    def _members(self, part: PoolPart) -> int:
        """Return how many devices of a part the schedule has: one of every tensor group."""
        return part.size // self._tensor_size

    def _places(self, parts: Sequence[PoolPart]) -> list[int]:
        """Return the place of every rank of the stage's cluster, whose ranks are the devices in ascending order.

        If the parts have devices 4, 5 and 1, rank 0 of the cluster is device 1, at place 2: places are 2, 0, 1.
        """
        devices = self._devices(parts)
        return sorted(range(len(devices)), key=devices.__getitem__)

    def _key(self, parts: Sequence[PoolPart], micro_batch_size: int) -> tuple[object, ...]:
        """Return the cache key of a schedule: kinds, sizes, shared nodes and links of the parts, micro-batch size."""
        nodes = list(dict.fromkeys(part.node for part in parts))
        if len(parts) == 1:
            return parts[0].kind, parts[0].size, micro_batch_size
        links = tuple(int(self._cluster.link_class[a, b]) for a, b in combinations(nodes, 2))
        return tuple((part.kind, nodes.index(part.node), part.size) for part in parts), links, micro_batch_size


def fastest_mesh(cost: CalibratedCostModel) -> Schedule:
    """Return the fastest mesh of Ulysses and ring with equal shares, for the devices of a cost model."""
    meshes = usp_meshes(cost.cluster.num_ranks, cost.model.num_heads, cost.model.num_kv_heads)
    return min(meshes, key=lambda schedule: cost.block_s(*cost.arrays(schedule)))


def column_model(model: ModelSpec, tensor_size: int) -> ModelSpec:
    """Return the part of a model that each device of a tensor group computes: a part of its heads, columns and words.

    Norms and the residual stream keep their width. A size that the devices cannot share equally is rounded up.
    """
    if tensor_size == 1:
        return model
    return replace(
        model,
        num_heads=model.num_heads // tensor_size,
        num_kv_heads=model.num_kv_heads // tensor_size,
        mlp_size=ceil_div(model.mlp_size, tensor_size),
        shared_mlp_size=ceil_div(model.shared_mlp_size, tensor_size),
        vocab_size=ceil_div(model.vocab_size, tensor_size),
    )
