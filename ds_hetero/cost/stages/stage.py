"""Stages of pipelines as the search of plans sees them: blocks of devices, and what a cost model says of one.

A *block* is devices that work on one stage: of one kind on one node, or, with sequence parallelism, of several kinds
and nodes with tokens and heads by their speed. What a stage takes is linear in its layers, which are all alike, so one
`StageOption` of a block serves every number of layers: its time per layer, what comes on top where it holds the
embedding or the head, and the terms of its memory.

A cost model of stages has the methods of `StageCosts`. There are two: `ds_hetero.cost.stages.hexiscale` to the letter
of HexiScale (arXiv:2409.01143), and `ds_hetero.cost.stages.calibrated` for what the runtime does.

Dimension key: C candidates, S stages. SI base units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ds_hetero.cluster.device import DeviceSpec
from ds_hetero.cluster.topology import Cluster, Link
from ds_hetero.cost.stages.pipeline_time import PipelineTimes
from ds_hetero.errors import PlanError
from ds_hetero.models import ModelSpec

__all__ = [
    "NO_SYNC",
    "Block",
    "DeviceKind",
    "Part",
    "PlacedPipeline",
    "Pool",
    "Pools",
    "StageCosts",
    "StageOption",
    "SyncTimes",
    "expect_alike_layers",
]

Floats = npt.NDArray[np.float64]


def expect_alike_layers(model: ModelSpec) -> None:
    """Refuse a model whose layers are of several kinds.

    Raises:
        PlanError: it has layers that carry a state.
    """
    if model.recurrent is not None:
        raise PlanError(
            f"{model.name} has layers that carry a state beside those of attention; stages of pipelines have no cost "
            'model of these. Plan sequence parallelism: --parallel sequence, or "parallel": "sequence".'
        )


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that are one problem for a planner: the same device behind the same links.

    Args:
        device: what computes.
        link: between two of them on one node.
        nic_bytes_per_s: what all devices of their node share towards other nodes; None if each has a port.
        switch_bytes_per_s: what all devices of their node share inside it; None if pairs do not disturb each other.
    """

    device: DeviceSpec
    link: Link
    nic_bytes_per_s: float | None
    switch_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind on one node.

    Args:
        kind: index into `Pools.kinds`.
        node: index into `Cluster.nodes`.
        ranks: ascending.
    """

    kind: int
    node: int
    ranks: tuple[int, ...]


class Pools:
    """The devices of a cluster by node and kind.

    Args:
        cluster: whose devices they are.

    Attributes:
        kinds: distinct kinds, in order of first use.
        pools: nodes in order, and on one node kinds in order of their first rank.
    """

    def __init__(self, cluster: Cluster) -> None:
        numbers: dict[DeviceKind, int] = {}
        pools: dict[tuple[int, int], list[int]] = {}
        for rank, device in enumerate(cluster.devices):
            index = int(cluster.node_of_rank[rank])
            node = cluster.nodes[index]
            kind = DeviceKind(device, node.link, node.nic_bytes_per_s, node.switch_bytes_per_s)
            pools.setdefault((index, numbers.setdefault(kind, len(numbers))), []).append(rank)
        self.cluster = cluster
        self.kinds: tuple[DeviceKind, ...] = tuple(numbers)
        self.pools = tuple(Pool(kind, node, tuple(ranks)) for (node, kind), ranks in pools.items())

    @cached_property
    def largest(self) -> tuple[Pool, ...]:
        """The largest pool of every kind; the first one among equals."""
        of_kind = [[pool for pool in self.pools if pool.kind == kind] for kind in range(len(self.kinds))]
        return tuple(max(pools, key=lambda pool: len(pool.ranks)) for pools in of_kind)


class Part(NamedTuple):
    """Devices of one pool.

    Args:
        kind: index into `Pools.kinds`.
        node: index into `Cluster.nodes`.
        size: devices.
    """

    kind: int
    node: int
    size: int


class Block(NamedTuple):
    """Devices that work on one stage.

    Args:
        kind: index into `Pools.kinds`, of the first part.
        node: index into `Cluster.nodes`, of the first part.
        size: devices of all parts.
        inner: how they share the work, one of `ds_hetero.plans.INNER`.
        others: further parts, of other pools; only with ``"sequence"``.
    """

    kind: int
    node: int
    size: int
    inner: str
    others: tuple[Part, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[Part]) -> Block:
        """Devices of several pools, which share sequences."""
        first, *others = sorted(parts)
        return cls(first.kind, first.node, sum(part.size for part in parts), "sequence", tuple(others))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its devices by pool."""
        own = self.size - sum(part.size for part in self.others)
        return (Part(self.kind, self.node, own), *self.others)

    def total(self, per_device: Sequence[float]) -> float:
        """Sum over its devices of what each of a kind counts."""
        if not self.others:
            return self.size * per_device[self.kind]
        return sum(part.size * per_device[part.kind] for part in self.parts)


class PlacedPipeline(NamedTuple):
    """A pipeline with its layers and batches.

    Args:
        blocks: of its stages, first to last.
        layers: of every stage.
        micro_batch_size: samples of a micro-batch.
        micro_batches: per optimizer step.
    """

    blocks: tuple[Block, ...]
    layers: tuple[int, ...]
    micro_batch_size: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOption:
    """What a block takes for one micro-batch, linear in the layers of its stage.

    Args:
        forward_s: per layer.
        backward_s: per layer, recomputation included.
        first_s: forward and backward of what a stage with the embedding computes on top.
        last_s: forward and backward of what a stage with the head computes on top.
        side_s: host's time of the messages to and from one neighbouring stage, activations and gradients.
        capacity_bytes: memory of a device.
        layer_bytes: model states per layer on one device.
        kept_bytes: activations per layer of one micro-batch in flight.
        fixed_bytes: working set, whatever the layers.
        first_bytes: what a device with the embedding holds on top.
        last_bytes: what a device with the head holds on top.
        beside: memory of the devices of its other parts, whose times are not used.
    """

    forward_s: float
    backward_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    side_s: float = 0.0
    capacity_bytes: float
    layer_bytes: float
    kept_bytes: float
    fixed_bytes: float = 0.0
    first_bytes: float = 0.0
    last_bytes: float = 0.0
    beside: tuple[StageOption, ...] = ()

    @property
    def parts(self) -> tuple[StageOption, ...]:
        """The memory of its devices by part."""
        return (self, *self.beside)

    @property
    def layer_s(self) -> float:
        """Forward and backward of one layer."""
        return self.forward_s + self.backward_s

    def extra_s(self, first: bool, last: bool) -> float:
        """Forward and backward of what layers do not count: embedding and head where it holds them, its neighbours."""
        return first * self.first_s + last * self.last_s + (2 - first - last) * self.side_s

    def memory_bytes(self, layers: int, first: bool, last: bool, in_flight: int) -> float:
        """Peak memory of one device of the first part of a stage.

        Args:
            layers: of the stage.
            first: it holds the embedding.
            last: it holds the head.
            in_flight: micro-batches whose activations it keeps.
        """
        fixed = self.fixed_bytes + first * self.first_bytes + last * self.last_bytes
        return fixed + layers * (self.layer_bytes + in_flight * self.kept_bytes)

    def max_layers(self, first: bool, last: bool, in_flight: int) -> int:
        """Layers that fit into memory; 0 if none does. The arguments are those of `memory_bytes`."""
        free = self.capacity_bytes - self.memory_bytes(0, first, last, in_flight)
        own = max(0, int(free / (self.layer_bytes + in_flight * self.kept_bytes)))
        return min([own, *(part.max_layers(first, last, in_flight) for part in self.beside)])

    def most_in_flight(self, layers: int, first: bool, last: bool) -> int | None:
        """Micro-batches whose activations fit beside all else; None for any number."""
        numbers = [
            int((part.capacity_bytes - part.memory_bytes(layers, first, last, 0)) / (layers * part.kept_bytes))
            for part in self.parts
            if part.kept_bytes
        ]
        return min(numbers, default=None)


class SyncTimes(NamedTuple):
    """Gradients on their way to those who own them, the optimizer, and new parameters on their way back.

    Args:
        reduce_s: gradients on the wire, which they may be under the last backward.
        exposed_s: all that no backward hides.
    """

    reduce_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Of all of it, before any is hidden."""
        return self.reduce_s + self.exposed_s


NO_SYNC = SyncTimes(0.0, 0.0)


class StageCosts(Protocol):
    """A cost model of stages and pipelines, bound to a cluster, a model and a length of sequences.

    The search keeps what `stage`, `hop_s` and `pipeline_times` return by their arguments.
    """

    name: str
    cluster: Cluster
    model: ModelSpec
    seq_len: int
    pools: Pools
    hop_in_step: bool  # a stage and its hop follow one another, so both bound the pipeline's period together

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """What a block of a kind takes; None if it cannot run a stage at all.

        Args:
            kind: of its devices.
            size: devices.
            inner: how they share the work.
            micro_batch_size: samples.
            pipelines: of the plan, which share the optimizer state.
        """

    def mixed_stage(self, parts: tuple[Part, ...], micro_batch_size: int, pipelines: int) -> StageOption | None:
        """What devices of several pools take that share sequences; None if they cannot. See `stage`."""

    def hop_s(self, link: int, source: Block, target: Block, micro_batch_size: int) -> float:
        """One hop of activations between neighbouring stages (published: both directions, as its Eq. 8 prints them).

        Args:
            link: index into `Cluster.link_classes`.
            source: the earlier stage.
            target: the later stage.
            micro_batch_size: samples.
        """

    def kept_in_flight(self, stage: int, stages: int) -> int:
        """Micro-batches whose activations count in the memory of a stage."""

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """What pipelines take in closed form, for the search.

        Args:
            forward_s: of every stage, ``[C, S]``.
            backward_s: of every stage, ``[C, S]``.
            hop_s: between neighbours, ``[S - 1]``.
        """

    def pipeline_s(self, forward_s: Floats, backward_s: Floats, hop_s: Floats, micro_batches: int) -> float:
        """The last word on one pipeline: its time for all micro-batches, without a closed form's simplification."""

    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Synchronization of gradients and parameters over the pipelines, and the optimizer's step."""

    def step_s(self, pipelines_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """An optimizer step.

        Args:
            pipelines_s: the slowest pipeline.
            sync: see `sync_times`.
            overlap_s: backward of one micro-batch on the first stage of the pipeline that ends last.
        """
