"""Stages of pipelines as the search of plans sees them: blocks of devices, and what a cost model says of one.

A *block* is devices that work on one stage: of one kind on one node, or, with sequence parallelism, of several kinds
and nodes with tokens and heads by their speed. What a stage takes is linear in its layers, which are all alike, so one
`StageOption` of a block serves every number of layers: its time per layer, what comes on top where it holds the
embedding or the head, and the terms of its memory.

A cost model of stages is a `StageCosts`. There are two: `ds_hetero.cost.stages.hexiscale`, HexiScale's
(arXiv:2409.01143) as printed or as in its public code, and `ds_hetero.cost.stages.calibrated` for what the runtime
does.

Dimension key: C candidates, S stages. SI base units.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.pipeline_time import PipelineTimes, closed_form, run_pipeline
from ds_hetero.cost.terms.memory_parts import Bytes
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.plans.timetable import default_in_flight
from ds_hetero.values.schedule import Schedule

MOST_IN_FLIGHT = 256  # micro-batches whose activations may be kept; chosen, never measured: more hide no hop


def expect_alike_layers(model: ModelSpec) -> None:
    """Refuse a model whose layers are of several kinds. Raises `PlanError`: it has layers that carry a state."""
    if model.recurrent is not None:
        raise PlanError(
            f"{model.name} has layers that carry a state beside those of attention; stages of pipelines have no cost "
            'model of these. Plan sequence parallelism: --parallel sequence, or "parallel": "sequence".'
        )


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that are one problem for a planner: the same device behind the same links."""

    device: DeviceSpec  # what computes
    link: Link  # between two of them on one node
    nic_bytes_per_s: float | None  # what all devices of their node share towards other nodes; None if each has a port
    switch_bytes_per_s: float | None  # shared inside their node; None if pairs do not disturb each other


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind on one node."""

    kind: int  # index into `Pools.kinds`
    node: int  # index into `Cluster.nodes`
    ranks: tuple[int, ...]  # ascending


class Pools:
    """The devices of a cluster: kinds in order of first use, pools by node and then by its kinds' first rank."""

    def __init__(self, cluster: Cluster) -> None:
        alike = cluster.link_class_alike
        inside = [alike[i] for i in np.diagonal(cluster.link_class)]
        kinds: dict[tuple[object, ...], tuple[int, DeviceKind]] = {}
        pools: dict[tuple[int, int], list[int]] = {}
        for rank, device in enumerate(cluster.devices):
            index = int(cluster.node_of_rank[rank])
            node = cluster.nodes[index]
            shared = node.nic_bytes_per_s, node.switch_bytes_per_s
            new = len(kinds), DeviceKind(device, node.link, *shared)
            number, _ = kinds.setdefault((device, inside[index], *shared), new)
            pools.setdefault((index, number), []).append(rank)
        self.cluster = cluster
        self.kinds = tuple(kind for _, kind in kinds.values())
        self.pools = tuple(Pool(kind, node, tuple(ranks)) for (node, kind), ranks in pools.items())

    @cached_property
    def largest(self) -> tuple[Pool, ...]:
        """The largest pool of every kind; the first one among equals."""
        largest: dict[int, Pool] = {}
        for pool in self.pools:
            if pool.kind not in largest or len(pool.ranks) > len(largest[pool.kind].ranks):
                largest[pool.kind] = pool
        return tuple(largest[kind] for kind in range(len(self.kinds)))

    @cached_property
    def of_rank(self) -> dict[int, Pool]:
        """The pool of every rank."""
        of_rank: dict[int, Pool] = {}
        for pool in self.pools:
            of_rank.update(dict.fromkeys(pool.ranks, pool))
        return of_rank


class PoolPart(NamedTuple):
    """Devices of one pool."""

    kind: int  # index into `Pools.kinds`
    node: int  # index into `Cluster.nodes`
    size: int  # devices

    def is_of(self, pool: Pool) -> bool:
        """Whether its devices are of this pool."""
        return (self.kind, self.node) == (pool.kind, pool.node)


class DeviceBlock(NamedTuple):
    """Devices that work on one stage."""

    kind: int  # index into `Pools.kinds`, of the first part
    node: int  # index into `Cluster.nodes`, of the first part
    size: int  # devices of all parts
    inner: str  # how they share the work, one of `ds_hetero.values.plans.INNER`
    others: tuple[PoolPart, ...] = ()  # further parts, of other pools; only with ``"sequence"``

    @classmethod
    def of_parts(cls, parts: Sequence[PoolPart]) -> DeviceBlock:
        """Devices of several pools, which share sequences."""
        first, *others = sorted(parts)
        return cls(first.kind, first.node, sum(part.size for part in parts), "sequence", tuple(others))

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """Its devices by pool."""
        own = self.size - sum(part.size for part in self.others)
        return (PoolPart(self.kind, self.node, own), *self.others)

    def total(self, per_device: Sequence[float]) -> float:
        """Sum over its devices of what each of a kind counts."""
        if not self.others:
            return self.size * per_device[self.kind]
        return sum(part.size * per_device[part.kind] for part in self.parts)


class PlacedPipeline(NamedTuple):
    """A pipeline with its layers and batches."""

    blocks: tuple[DeviceBlock, ...]  # of its stages, first to last
    layers: tuple[int, ...]  # of every stage
    micro_batch_size: int  # samples of a micro-batch
    micro_batches: int  # per optimizer step


@dataclass(frozen=True, kw_only=True)
class StageMemory(ABC):
    """Memory of a device as a function of what its stage is; it never falls with layers or micro-batches in flight."""

    num_layers: int  # of the model
    _peaks: dict[tuple[bool, bool, int, int | None], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    @abstractmethod
    def layer_bytes(self) -> float:
        """Model states of a layer."""

    def communicator_bytes(self, first: bool, last: bool) -> float:
        """Bytes of NCCL's communicators in the peak; 0 in cost models that do not count them."""
        return 0.0

    @abstractmethod
    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """Peak memory; of arrays, element by element.

        Args:
            in_flight: micro-batches whose activations it keeps.
            micro_batches: of a step; left out, more than are in flight.
        """

    def by_layers(self, first: bool, last: bool, in_flight: int, micro_batches: int | None = None) -> Floats:
        """`peak_bytes` of every number of layers of the model from 0 on; kept, since a search asks again and again."""
        key = first, last, in_flight, micro_batches
        if key not in self._peaks:
            self._peaks[key] = self.peak_bytes(np.arange(self.num_layers + 1.0), *key)
        return self._peaks[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOption:
    """Times and memory of a block for one micro-batch: times are linear in the layers of its stage."""

    forward_s: float  # per layer
    backward_s: float  # per layer, recomputation included
    first_s: float = 0.0  # forward and backward of what a stage with the embedding computes on top
    last_s: float = 0.0  # forward and backward of what a stage with the head computes on top
    side_s: float = 0.0  # messages to and from one neighbouring stage: the host's time, and gathering what arrived
    capacity_bytes: float  # memory of a device, for tensors and communicators
    memory: StageMemory  # what a device of its first part needs
    beside: tuple[StageOption, ...] = ()  # memory of the devices of its other parts, whose times are not used

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

    def memory_bytes(
        self, layers: int, first: bool, last: bool, in_flight: int, micro_batches: int | None = None
    ) -> float:
        """Peak memory of one device of the first part of a stage. The arguments are those of `StageMemory`."""
        return float(self.memory.by_layers(first, last, in_flight, micro_batches)[layers])

    def max_layers(self, first: bool, last: bool, in_flight: int) -> int:
        """Layers of the model that fit into memory; 0 if none does. The arguments are those of `memory_bytes`."""
        return min(
            int((part.memory.by_layers(first, last, in_flight)[1:] <= part.capacity_bytes).sum()) for part in self.parts
        )

    def most_in_flight(self, layers: int, first: bool, last: bool) -> int:
        """Micro-batches whose activations fit beside all else, up to `MOST_IN_FLIGHT`."""
        numbers = np.arange(1.0, MOST_IN_FLIGHT + 1)
        needs = [part.memory.peak_bytes(layers, first, last, numbers) <= part.capacity_bytes for part in self.parts]
        return int(np.logical_and.reduce(needs).sum())


class SyncTimes(NamedTuple):
    """Times of gradients on their way to their owners, of the optimizer, and of new parameters on their way back."""

    reduce_s: float  # gradients on the wire, which they may be under the last backward
    exposed_s: float  # all that no backward hides

    @property
    def total_s(self) -> float:
        """Time of all of it, before any part is hidden."""
        return self.reduce_s + self.exposed_s


NO_SYNC = SyncTimes(0.0, 0.0)


class StageCosts(ABC):
    """A cost model of stages and pipelines, bound to a cluster, a model and a length of sequences.

    The search keeps what `stage`, `hop_s` and `pipeline_times` return by their arguments. The other methods answer for
    what a published model does not have: schedules inside a stage, and owners of optimizer state by weight.

    Args:
        model: what is trained; its layers are all alike.
        activation_checkpointing: whether activations are computed again in the backward.

    Attributes:
        hop_in_step: a stage and its hop follow one another, so both bound the pipeline's period together.
        owners: of optimizer state: ``"even"``, ``"fitted"`` to memory, or weights as `owner_weights` returns them; None
            if the cost model does not tell them apart.
    """

    name: str  # of the cost model
    hop_in_step = False
    inners: tuple[str, ...] = ("tensor",)  # ways in which several devices may share the work of a stage
    owners: str | tuple[float, ...] | None = None

    def __init__(self, cluster: Cluster, model: ModelSpec, seq_len: int, activation_checkpointing: bool) -> None:
        expect_alike_layers(model)
        self.cluster, self.model, self.seq_len = cluster, model, seq_len
        self.activation_checkpointing = activation_checkpointing
        self.pools = Pools(cluster)  # the devices by node and kind

    def time_objective(self) -> Objective:
        """The step's time, for a search to make small."""
        return Objective.of("time", [kind.device for kind in self.pools.kinds], self.seq_len)

    # --- stages

    def of_block(self, block: DeviceBlock, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Times and memory of a block; None if it cannot run a stage at all. See `stage`."""
        if block.others:
            return self.mixed_stage(block.parts, micro_batch_size, pipelines)
        return self.stage(block.kind, block.size, block.inner, micro_batch_size, pipelines)

    @abstractmethod
    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Times and memory of a block of a kind; None if it cannot run a stage at all."""

    def mixed_stage(self, parts: tuple[PoolPart, ...], micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Times and memory of devices of several pools that share sequences; None if they cannot. See `stage`."""
        return None

    def schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int) -> Schedule | None:
        """Return the schedule of devices that share sequences, by their places in the parts; None if none works."""
        return None

    def keep_schedule(self, parts: tuple[PoolPart, ...], micro_batch_size: int, schedule: Schedule) -> None:  # noqa: B027
        """Use a given schedule, by places, for such devices. Raises `PlanError` if they were given another one."""

    def kept_in_flight(self, in_flight: int) -> int:
        """How many of the micro-batches in flight the cost model counts in the activation memory of a stage."""
        return in_flight

    def kept_by_default(self, stages: int) -> list[int]:
        """`kept_in_flight` under plain 1F1B, by stage of a pipeline."""
        return [self.kept_in_flight(in_flight) for in_flight in default_in_flight(stages)]

    # --- pipelines

    @abstractmethod
    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """One hop of activations over a class of links (published: both directions, as its Eq. 8 prints them)."""

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """Times of pipelines in closed form, of stages' passes ``[C, S]`` and hops ``[S - 1]``, for the search."""
        return closed_form(forward_s, backward_s, hop_s)

    def pipeline_s(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        hop_s: Sequence[float],
        micro_batches: int,
        in_flight: Sequence[int] | None = None,
    ) -> float:
        """The last word on one pipeline: its time for all micro-batches, without a closed form's simplification.

        Args:
            in_flight: by stage; left out, 1F1B's. A published model knows those only.
        """
        return run_pipeline(forward_s, backward_s, hop_s, micro_batches, in_flight).total_s

    # --- gradients

    @abstractmethod
    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Synchronization of gradients and parameters over the pipelines, and the optimizer's step."""

    @abstractmethod
    def step_s(self, pipelines_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """An optimizer step; ``overlap_s``: a backward on the first stage of the pipeline that ends last."""

    def with_owners(self, owners: str | tuple[float, ...]) -> StageCosts:
        """Return the same cost model with other owners of optimizer state."""
        return self

    def owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> list[float] | None:
        """Weight as an owner of optimizer state, by part of every stage of every pipeline; None if all own alike."""
        return None

    def owned_bytes(self, pipelines: Sequence[PlacedPipeline]) -> Iterable[float]:
        """Optimizer state of a device that `stage` does not count, by part likewise."""
        return itertools.repeat(0.0)
