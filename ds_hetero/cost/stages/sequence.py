"""Stages of sequence parallelism: a block of `CalibratedCostModel` on the devices of the stage.

Devices of one pool share sequences evenly, by the fastest mesh of Ulysses and ring. Devices of several pools have a
schedule of their own, with tokens and heads by speed, which the planner finds or a plan file says. A stage holds a few
layers of the model, so its schedule is sought for a model of one layer, and memory then limits its layers.

Schedules and memory are numbered by the places of devices in their parts: part by part, ascending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.stage import PoolPart, Pools
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
    """Times and activations of one layer on devices that share its sequences."""

    forward_s: float  # of a layer
    backward_s: float  # of a layer, with what it repeats
    loss_s: float  # forward and backward of the head
    tokens: tuple[float, ...]  # of the device with most of them, by part, all samples of a micro-batch together
    layer: tuple[LayerMemory, ...]  # memory of a layer, likewise
    logits: tuple[float, ...]  # bytes of the head, likewise


class SequenceStages:
    """Costs and schedules of stages whose devices share sequences.

    Args:
        find: a schedule for devices of several pools; None if there is none, and left out, stages of several pools
            exist only where `keep` gave them one.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, workload: Workload, pools: Pools, find: FindSchedule | None
    ) -> None:
        self._cluster, self._model, self._workload, self._find = cluster, model, workload, find
        self._ranks = {(pool.kind, pool.node): pool.ranks for pool in pools.pools}
        self._largest = pools.largest
        self._kept: dict[tuple[object, ...], Schedule] = {}
        self._by_devices: dict[tuple[object, ...], Schedule | None] = {}
        self.passes = cache(self._passes)

    def schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        """Return the schedule of these devices, whose ranks are places in ``parts``; None if none works."""
        kept = self._kept.get(self._key(parts, micro_batch_size))
        if kept is not None:
            return kept
        key = self._key(parts, micro_batch_size if len(parts) == 1 else 1)  # shares hardly depend on it
        if key not in self._by_devices:
            self._by_devices[key] = self._best(parts, micro_batch_size)
        return self._by_devices[key]

    def keep(self, parts: tuple[PoolPart, ...], micro_batch_size: int, schedule: Schedule) -> None:
        """Use a given schedule, by places, for such devices. Raises `PlanError`: they were given another one."""
        key = self._key(parts, micro_batch_size)
        if self._kept.setdefault(key, schedule) != schedule:
            raise PlanError(
                "the plan has stages of equal devices and micro-batches with different schedules; they are judged "
                "with one. Give them the same schedule."
            )
        self.passes.cache_clear()

    def _best(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        size = sum(part.size for part in parts)
        if size < 2 or self._workload.seq_len < size:
            return None
        if len(parts) == 1:
            cost = self._cost(parts, micro_batch_size, True)
            meshes = usp_meshes(size, self._model.num_heads, self._model.num_kv_heads)
            return min(meshes, key=lambda schedule: cost.block_s(*cost.arrays(schedule)))
        found = None if self._find is None else self._find(self._cost(parts, 1, True))
        return None if found is None else found.on_ranks(self._places(parts))

    def _passes(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> SharedPass | None:
        schedule = self.schedule(parts, micro_batch_size)
        if schedule is None:
            return None
        places = self._places(parts)
        rank_of = sorted(range(len(places)), key=places.__getitem__)
        again, once = (self._cost(parts, micro_batch_size, repeat) for repeat in (True, False))
        flat = again.arrays(schedule.on_ranks(rank_of))
        forward_s = again.block_s(*flat) - once.block_s(*flat)
        chosen = again if self._workload.activation_checkpointing else once

        share = LayerShare.of_sequence(chosen.model, chosen.workload, *flat)
        memory = layer_memory(chosen.model, chosen.workload, share)
        logits_D = logit_bytes(chosen.model, chosen.workload, flat[1])
        stops = list(accumulate(part.size for part in parts))

        def most(stop: int, size: int) -> Callable[[Bytes], float]:
            """The most of any device of a part."""
            return lambda per_rank: float(np.broadcast_to(per_rank, (len(places),))[rank_of[stop - size : stop]].max())

        of_parts = [most(stop, part.size) for part, stop in zip(parts, stops, strict=True)]
        return SharedPass(
            forward_s=forward_s,
            backward_s=chosen.block_s(*flat) - forward_s,
            loss_s=chosen.outside_blocks_s(flat[1])["loss_s"],
            tokens=tuple(most_of(flat[1] * micro_batch_size) for most_of in of_parts),
            layer=tuple(memory.mapped(most_of) for most_of in of_parts),
            logits=tuple(most_of(logits_D) for most_of in of_parts),
        )

    def _cost(self, parts: tuple[PoolPart, ...], micro_batch_size: int, checkpointing: bool) -> CalibratedCostModel:
        work = self._workload
        own = Workload(
            seq_len=work.seq_len,
            micro_batch=micro_batch_size,
            causal=work.causal,
            zero_stage=1,
            activation_checkpointing=checkpointing,
            tiled_logits=work.tiled_logits,
            tiled_mlp=work.tiled_mlp,
            tile_tokens=work.tile_tokens,
            element_bytes=work.element_bytes,
        )
        one_layer = replace(self._model, num_layers=1)
        return CalibratedCostModel(self._cluster.subset(self._devices(parts)), one_layer, own)

    def _devices(self, parts: Sequence[PoolPart]) -> list[int]:
        """Devices such as these, part by part; of one part, those of the largest pool of the kind."""
        if len(parts) == 1:
            return list(self._largest[parts[0].kind].ranks[: parts[0].size])
        return [rank for part in parts for rank in self._ranks[part.kind, part.node][: part.size]]

    def _places(self, parts: Sequence[PoolPart]) -> list[int]:
        """Place in its parts of every rank of their own cluster, whose ranks ascend."""
        devices = self._devices(parts)
        return sorted(range(len(devices)), key=devices.__getitem__)

    def _key(self, parts: Sequence[PoolPart], micro_batch_size: int) -> tuple[object, ...]:
        """All that a schedule depends on: kinds, which of them are on one node, and the links between nodes."""
        nodes = list(dict.fromkeys(part.node for part in parts))
        if len(parts) == 1:
            return parts[0].kind, parts[0].size, micro_batch_size
        links = tuple(int(self._cluster.link_class[a, b]) for a, b in combinations(nodes, 2))
        return tuple((part.kind, nodes.index(part.node), part.size) for part in parts), links, micro_batch_size
