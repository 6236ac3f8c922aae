"""Interface of cost models of pipeline stages (`StageCosts`), and the blocks of devices that they price.

A *block* is the devices of one stage: devices of one kind on one node or, with sequence parallelism, devices of several
kinds and nodes that get tokens and heads by speed. All layers of a model are alike, so the time of a stage is linear in
its layers. One `StageOption` of a block therefore serves every number of layers: it has the time per layer, the extra
time of a stage with the embedding or the head, and the memory.

There are two cost models: `ds_hetero.cost.stages.hexiscale` is HexiScale's (arXiv:2409.01143), as printed or as in its
public code; `ds_hetero.cost.stages.calibrated` predicts what the runtime does.

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

MAX_IN_FLIGHT = 256  # most micro-batches in flight that a search considers; chosen, never measured: more hide no hop


def expect_alike_layers(model: ModelSpec) -> None:
    """Refuse a model whose layers are of several kinds. Raises `PlanError`, which names the kinds."""
    if model.recurrent is not None:
        raise PlanError(
            f"{model.name} has linear-attention or SSM layers, and the cost models of pipeline stages cover attention "
            'layers only. Plan sequence parallelism: --parallel sequence, or "parallel": "sequence".'
        )
    if model.unlike_layers:
        raise PlanError(
            f"{model.name} has {model.unlike_layers}, and the cost models of pipeline stages cover alike layers only. "
            'Plan sequence parallelism: --parallel sequence, or "parallel": "sequence".'
        )


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that a planner may exchange for one another: the same device behind the same links."""

    device: DeviceSpec
    link: Link  # link between two of these devices on one node
    nic_bytes_per_s: float | None  # rate of the NIC that all devices of a node share; None if each has its own port
    switch_bytes_per_s: float | None  # rate that all pairs inside a node share; None if pairs do not disturb each other


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices of one kind on one node."""

    kind: int  # index into `Pools.kinds`
    node: int  # index into `Cluster.nodes`
    ranks: tuple[int, ...]  # ascending


class Pools:
    """Devices of a cluster, by kind and by pool.

    Attributes:
        kinds: kinds of devices, in the order of the lowest rank of each.
        pools: devices of one kind on one node; by node, and on a node in the order of the lowest rank of each.
    """

    def __init__(self, cluster: Cluster) -> None:
        alike_class = cluster.link_class_alike
        inner_class = [alike_class[link_class] for link_class in np.diagonal(cluster.link_class)]  # by node
        kinds: dict[tuple[object, ...], tuple[int, DeviceKind]] = {}  # by properties: index and kind
        ranks_by_pool: dict[tuple[int, int], list[int]] = {}  # by node and kind
        for rank, device in enumerate(cluster.devices):
            node_index = int(cluster.node_of_rank[rank])
            node = cluster.nodes[node_index]
            shared_rates = node.nic_bytes_per_s, node.switch_bytes_per_s
            new_kind = len(kinds), DeviceKind(device, node.link, *shared_rates)
            kind_index, _ = kinds.setdefault((device, inner_class[node_index], *shared_rates), new_kind)
            ranks_by_pool.setdefault((node_index, kind_index), []).append(rank)
        self.cluster = cluster
        self.kinds = tuple(kind for _, kind in kinds.values())
        self.pools = tuple(Pool(kind, node, tuple(ranks)) for (node, kind), ranks in ranks_by_pool.items())

    @cached_property
    def largest(self) -> tuple[Pool, ...]:
        """The largest pool of every kind, by kind; among equally large ones the first."""
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
    """A number of devices of one pool."""

    kind: int  # index into `Pools.kinds`
    node: int  # index into `Cluster.nodes`
    size: int  # number of devices

    def is_of(self, pool: Pool) -> bool:
        """Whether the devices belong to ``pool``."""
        return (self.kind, self.node) == (pool.kind, pool.node)


class DeviceBlock(NamedTuple):
    """Devices that work on one stage, in one or several parts of pools."""

    kind: int  # kind of the first part, an index into `Pools.kinds`
    node: int  # node of the first part, an index into `Cluster.nodes`
    size: int  # number of devices of all parts together
    inner: str  # how the devices share the work, one of `ds_hetero.values.plans.INNER`
    others: tuple[PoolPart, ...] = ()  # parts of other pools; only with ``"sequence"``
    tensor_size: int = 1  # devices of each tensor group, which share its tokens; more than 1 only with ``"sequence"``

    @classmethod
    def of_parts(cls, parts: Sequence[PoolPart], tensor_size: int = 1) -> DeviceBlock:
        """Make a block of several pools' devices, which share sequences. Every part is cut into whole tensor groups."""
        first, *others = sorted(parts)
        return cls(first.kind, first.node, sum(part.size for part in parts), "sequence", tuple(others), tensor_size)

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """All parts of the block, the first one included."""
        first_size = self.size - sum(part.size for part in self.others)
        return (PoolPart(self.kind, self.node, first_size), *self.others)

    def total(self, per_device: Sequence[float]) -> float:
        """Sum ``per_device``, a value for each kind of device, over all devices of the block."""
        if not self.others:
            return self.size * per_device[self.kind]
        return sum(part.size * per_device[part.kind] for part in self.parts)


class PlacedPipeline(NamedTuple):
    """A pipeline with the devices and layers of its stages, and its batches."""

    blocks: tuple[DeviceBlock, ...]  # devices of every stage, first to last
    layers: tuple[int, ...]  # number of layers of every stage
    micro_batch_size: int  # samples of a micro-batch
    micro_batches: int  # per optimizer step


@dataclass(frozen=True, kw_only=True)
class StageMemory(ABC):
    """Memory of a device, depending on its stage's layers and position and on the micro-batches in flight.

    More layers, or more micro-batches in flight, never need less memory, so a search may bisect. In all methods
    ``first`` and ``last`` say whether the stage has the embedding and the head.
    """

    num_layers: int  # layers of the model
    _peaks: dict[tuple[bool, bool, int, int | None], Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    @abstractmethod
    def layer_bytes(self) -> float:
        """Bytes of the model states of one layer."""

    def communicator_bytes(self, first: bool, last: bool) -> float:
        """Return the bytes of NCCL's communicators that the peak includes; 0 in cost models that do not count them."""
        return 0.0

    @abstractmethod
    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """Return the peak memory in bytes; if arguments are arrays, element by element.

        Args:
            layers: layers of the stage.
            in_flight: micro-batches whose activations the device keeps.
            micro_batches: micro-batches of a step; None: more than are in flight.
        """

    def by_layers(self, first: bool, last: bool, in_flight: int, micro_batches: int | None = None) -> Floats:
        """Return `peak_bytes` for 0, 1, ... ``num_layers`` layers; the result is cached, since a search asks often."""
        key = first, last, in_flight, micro_batches
        if key not in self._peaks:
            self._peaks[key] = self.peak_bytes(np.arange(self.num_layers + 1.0), *key)
        return self._peaks[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOption:
    """Times and memory of a block for one micro-batch; the time of a stage is linear in its layers."""

    forward_s: float  # forward of one layer
    backward_s: float  # backward of one layer, recomputation included
    first_s: float = 0.0  # forward and backward of the embedding, on a stage that has it
    last_s: float = 0.0  # forward and backward of the head, on a stage that has it
    side_s: float = 0.0  # messages to and from one neighbouring stage: the host's time, and gathering what arrived
    capacity_bytes: float  # memory of a device, for tensors and communicators
    memory: StageMemory  # memory that a device of the block's first part needs
    other_parts: tuple[StageOption, ...] = ()  # memory of devices of the block's other parts; their times are not used

    @property
    def parts(self) -> tuple[StageOption, ...]:
        """Options of all parts of the block, whose memory differs."""
        return (self, *self.other_parts)

    @property
    def layer_s(self) -> float:
        """Seconds of one layer for a micro-batch, forward and backward together."""
        return self.forward_s + self.backward_s

    def extra_s(self, first: bool, last: bool) -> float:
        """Return the time of a stage beside its layers: its embedding or head, and messages to its neighbours."""
        return first * self.first_s + last * self.last_s + (2 - first - last) * self.side_s

    def memory_bytes(
        self, layers: int, first: bool, last: bool, in_flight: int, micro_batches: int | None = None
    ) -> float:
        """Return the peak memory of one device of the block's first part. The arguments are those of `StageMemory`."""
        return float(self.memory.by_layers(first, last, in_flight, micro_batches)[layers])

    def max_layers(self, first: bool, last: bool, in_flight: int) -> int:
        """Return the largest number of layers that fits into memory; 0 if none does. Arguments: see `memory_bytes`."""
        return min(
            int((part.memory.by_layers(first, last, in_flight)[1:] <= part.capacity_bytes).sum()) for part in self.parts
        )

    def max_in_flight(self, layers: int, first: bool, last: bool) -> int:
        """Return the largest number of micro-batches whose activations fit into memory, at most `MAX_IN_FLIGHT`."""
        in_flight = np.arange(1.0, MAX_IN_FLIGHT + 1)
        fits = [part.memory.peak_bytes(layers, first, last, in_flight) <= part.capacity_bytes for part in self.parts]
        return int(np.logical_and.reduce(fits).sum())


class SyncTimes(NamedTuple):
    """Time of an optimizer step after the pipelines: reduce gradients, step, gather parameters."""

    reduce_s: float  # gradients on the wire, which the last backward may hide
    exposed_s: float  # everything that no backward hides

    @property
    def total_s(self) -> float:
        """Time of both parts, if nothing is hidden."""
        return self.reduce_s + self.exposed_s


NO_SYNC = SyncTimes(0.0, 0.0)


class StageCosts(ABC):
    """A cost model of stages and pipelines, bound to a cluster, a model and a sequence length.

    The search caches what `stage`, `hop_s` and `pipeline_times` return. Methods that are not abstract have defaults for
    a published model, which has neither schedules inside a stage nor weights of owners.

    Args:
        model: the model that is trained; all its layers are alike.
        activation_checkpointing: whether activations are computed again in the backward.

    Attributes:
        hop_in_step: whether a hop runs after its stage instead of beside it, so that both together bound the period.
        owners: owners of optimizer state: ``"even"``, ``"fitted"`` to memory, or weights as `owner_weights` returns
            them; None if the cost model does not model owners.
        divides_experts: whether devices that share sequences also divide the experts of their layers, as expert
            parallelism does; False if every device has the experts of its own tokens.
    """

    name: str  # name of the cost model
    hop_in_step = False
    inners: tuple[str, ...] = ("tensor",)  # ways in which several devices may share the work of a stage
    owners: str | tuple[float, ...] | None = None
    divides_experts = False

    def __init__(self, cluster: Cluster, model: ModelSpec, seq_len: int, activation_checkpointing: bool) -> None:
        expect_alike_layers(model)
        self.cluster, self.model, self.seq_len = cluster, model, seq_len
        self.activation_checkpointing = activation_checkpointing
        self.pools = Pools(cluster)  # the devices by node and kind

    def time_objective(self) -> Objective:
        """Return the objective of a search for the shortest step."""
        return Objective.of("time", [kind.device for kind in self.pools.kinds], self.seq_len)

    # --- stages

    def of_block(self, block: DeviceBlock, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Return the times and memory of a block; None if it cannot run a stage at all. See `stage`."""
        if block.others or block.tensor_size > 1:
            return self.mixed_stage(block.parts, micro_batch_size, pipelines, block.tensor_size)
        return self.stage(block.kind, block.size, block.inner, micro_batch_size, pipelines)

    @abstractmethod
    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Return the times and memory of a block of devices of one kind; None if it cannot run a stage at all.

        Args:
            kind: index into `Pools.kinds`.
            size: number of devices.
            inner: how the devices share the work, one of ``inners``, or ``"one"`` for a single device.
            micro_batch_size: samples of a micro-batch.
            pipelines: number of pipelines of the plan, whose ranks share the optimizer state.
        """

    def mixed_stage(
        self, parts: tuple[PoolPart, ...], micro_batch_size: int, pipelines: int, tensor_size: int = 1
    ) -> StageOption | None:
        """Return times and memory of a stage whose devices share each sequence; None if they cannot run it.

        The devices may be of several pools, each with whole tensor groups of ``tensor_size`` devices. The other
        arguments are those of `stage`. This base class has no such stages, and always returns None.
        """
        return None

    def schedule(self, block: DeviceBlock, micro_batch_size: int) -> Schedule | None:
        """Return the schedule of a stage whose devices share each sequence; None if no schedule works.

        The schedule numbers the devices part by part: rank 0 is the first device of the first part. With tensor groups
        it is that of the first devices of all groups, numbered 0, 1 and so on, with their part of the heads.
        """
        return None

    def keep_schedule(self, block: DeviceBlock, micro_batch_size: int, schedule: Schedule) -> None:  # noqa: B027
        """Make `schedule` return this schedule for the block. Raises `PlanError` if it has another one."""

    def kept_in_flight(self, in_flight: int) -> int:
        """Return how many of ``in_flight`` micro-batches count as activation memory; HexiScale's paper counts one."""
        return in_flight

    def kept_by_default(self, stages: int) -> list[int]:
        """Return `kept_in_flight` for every stage of a pipeline of ``stages`` stages under plain 1F1B."""
        return [self.kept_in_flight(in_flight) for in_flight in default_in_flight(stages)]

    # --- pipelines

    @abstractmethod
    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """Return the time of one hop between two blocks; HexiScale's includes both directions, as its Eq. 8 does.

        Args:
            link: class of the link, an index into `Cluster.link_classes`.
        """

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """Return the times of candidate pipelines in closed form. Passes are ``[C, S]``, hops ``[S - 1]``."""
        return closed_form(forward_s, backward_s, hop_s)

    def pipeline_s(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        hop_s: Sequence[float],
        micro_batches: int,
        in_flight: Sequence[int] | None = None,
    ) -> float:
        """Return the time of one pipeline for all micro-batches, without the simplifications of the closed form.

        Args:
            in_flight: micro-batches in flight, by stage; None: as under plain 1F1B, the only case that a published
                model covers.
        """
        return run_pipeline(forward_s, backward_s, hop_s, micro_batches, in_flight).total_s

    # --- gradients

    @abstractmethod
    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Return the time to synchronize gradients and parameters over the pipelines, with the optimizer's step."""

    @abstractmethod
    def step_s(self, slowest_pipeline_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """Return the time of an optimizer step.

        Args:
            slowest_pipeline_s: time of the slowest pipeline.
            overlap_s: one backward on the first stage of that pipeline, during which gradients travel.
        """

    def with_even_shares(self) -> StageCosts:
        """Return the same cost model for stages whose devices share sequences equally; itself if it has none."""
        return self

    def with_owners(self, owners: str | tuple[float, ...]) -> StageCosts:
        """Return the same cost model with other owners of optimizer state."""
        return self

    def owner_weights(self, pipelines: Sequence[PlacedPipeline]) -> list[float] | None:
        """Return the weight of every part of every stage as an owner of optimizer state; None if owners are even."""
        return None

    def owned_bytes(self, pipelines: Sequence[PlacedPipeline]) -> Iterable[float]:
        """Return the bytes of optimizer state on a device that `stage` does not count, by part of every stage."""
        return itertools.repeat(0.0)
