"""Interface of cost models, and the `Prediction` of time and memory that they return.

There are two cost models, `ds_hetero.cost.published` and `ds_hetero.cost.calibrated`. A search calls a `CostModel` with
a `Grouping` and arrays of tokens and heads; the CLI calls it with a `Schedule`.

Dimension key: D ranks, K groups, B assignments of tokens and heads under one grouping, N nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ds_hetero.cluster.remarks import confidence
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.units import GIB
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.host_memory import USABLE_HOST_FRACTION, host_bytes_of_nodes
from ds_hetero.cost.terms.memory_parts import MemoryParts, Phases, peak_bytes, peak_parts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Time of one transformer block, forward and backward, as a sum of three terms."""

    non_attention_s: float  # work outside attention
    all_to_all_s: float  # Ulysses all-to-alls, as far as they add to the first term
    ring_steps_s: float  # attention and the transfers of the ring

    @property
    def block_s(self) -> float:
        """Time of the block."""
        return self.non_attention_s + self.all_to_all_s + self.ring_steps_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Bottleneck of the block time: the largest term, and the rank or the link behind it."""

    term: str  # a field name of `Terms`
    # ``"compute"``, ``"experts"``, ``"memory bandwidth"``, ``"link"``, ``"ZeRO traffic"`` or ``"the host's launches"``
    cause: str
    rank: int  # the slowest rank, or one end of the slowest link
    peer: int | None  # the other end of the link; None if the cause is not a link
    text: str  # a sentence for people

    @classmethod
    def of_rank(cls, cluster: Cluster, term: str, cause: str, rank: int) -> Bottleneck:
        """Name a rank whose own work takes the longest; ``cause`` says which work."""
        text = f"{_TERM_NAMES[term]}: {cause} of {cluster.rank_name(rank)}"
        return cls(term=term, cause=cause, rank=rank, peer=None, text=text)

    @classmethod
    def of_link(cls, cluster: Cluster, term: str, rank: int, peer: int) -> Bottleneck:
        """Name the link between two ranks that carries the longest transfer."""
        text = (
            f"{_TERM_NAMES[term]}: link {cluster.link(rank, peer).name!r}, from {cluster.rank_name(rank)} "
            f"to {cluster.rank_name(peer)}"
        )
        return cls(term=term, cause="link", rank=rank, peer=peer, text=text)


_TERM_NAMES = {"non_attention_s": "non-attention", "all_to_all_s": "all-to-all", "ring_steps_s": "ring steps"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Time and memory of one schedule, as a cost model predicts them.

    Args:
        error: e, such that the true time is in `range_s`, from time / (1 + e) to time x (1 + e), in 8 of 10 cases. The
            device whose rates are known least decides: see `DeviceSpec.error`.
    """

    cost_model: str  # name of the cost model
    block_s: float  # time of one transformer block, forward and backward
    iteration_s: float  # time of an optimizer step
    tokens_per_s: float  # tokens of an optimizer step over its time
    terms: Terms  # the parts of ``block_s``
    memory_bytes: tuple[int, ...]  # peak of every rank
    feasible: bool  # whether every rank fits into its memory
    reason: str | None  # which rank does not fit and by how many GiB; None if every rank fits
    bottleneck: Bottleneck  # rank or link that decides ``block_s``
    bound_s: float  # block time if all work is spread over all devices by speed, with free communication
    busy_s: tuple[float, ...]  # compute time of every rank in one block
    parts_s: dict[str, float]  # finer times by name, for ``--json`` and calibration, such as ``forward_s``
    error: float = 0.0
    confidence: str = ""  # sentence on the origin of the rates: attention kernels, and devices that were not measured
    host_bytes: tuple[int, ...] = ()  # bytes that offloads put into the memory of every node

    @property
    def range_s(self) -> tuple[float, float]:
        """Least and largest time of an optimizer step; the true time is between them in 8 of 10 cases."""
        return self.iteration_s * (1 - self.error / (1 + self.error)), self.iteration_s * (1 + self.error)

    def to_dict(self) -> JsonDict:
        """Return plain data for JSON."""
        return {**asdict(self), "range_s": self.range_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval in which a rank's compute stream or network stream is busy, within one block."""

    rank: int
    stream: str  # ``"compute"`` or ``"network"``
    kind: str  # ``"non_attention"``, ``"all_to_all"``, ``"attention"`` or ``"ring"``
    phase: str  # ``"forward"``, ``"recompute"``, ``"backward"``, or ``"both"`` where the cost model pools them
    step: int  # ring step, 0 elsewhere
    start_s: float  # begin, in seconds since the start of the block
    stop_s: float  # end, in seconds since the start of the block

    @classmethod
    def of(
        cls, rank: int, stream: str, kind: str, start_s: float, stop_s: float, step: int = 0, phase: str = "both"
    ) -> Span:
        """Make an interval from positional arguments."""
        return cls(rank=rank, stream=stream, kind=kind, phase=phase, step=step, start_s=start_s, stop_s=stop_s)


class CostModel(ABC):
    """A cost model bound to a cluster, a model and a workload.

    The constructor computes all that does not depend on the schedule; `Grouping` has all that depends only on the
    partition into groups. Methods take tokens and heads **indexed by rank**: tokens may be fractions, heads are whole
    numbers and sum to ``num_heads`` in every group.
    """

    name: str
    attention_s_D: Floats  # seconds per query token x key token x head, forward and backward, at an even share
    non_attention_s_per_token_D: Floats  # forward and backward of one block outside attention, at an even share
    least_attention_s_D: Floats  # lower bound of ``attention_s_D``, the limit for large shapes
    least_non_attention_s_per_token_D: Floats  # the same for the work outside attention
    capacity_bytes_D: Floats  # memory that a schedule may use
    bound_s: float  # time of one block at perfect balance with free communication
    floor_s: float  # time of one block that no schedule can undercut, set by ZeRO's traffic
    loss_s_per_token_D: Floats  # embedding's and head's share of a micro-batch, outside the blocks

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload) -> None:
        self.cluster = cluster
        self.model = model
        self.workload = workload

    @abstractmethod
    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of one block for many assignments of one grouping, ``[B]``, whether they fit or not."""

    def block_s_below(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_B: Floats) -> Floats:
        """Return `block_s_many`, but infinity if the groups take at least ``below_B`` in every ring order, ``[B]``."""
        return self.block_s_many(grouping, tokens_BD, heads_BD)

    @abstractmethod
    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """Return the time of one block by term."""

    @abstractmethod
    def memory_phases(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
        """Return the memory of every rank by phase of a step and by part, ``[D]`` each; leading dimensions are kept."""

    def memory_parts(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> MemoryParts:
        """Return the memory of every rank by part, ``[D]`` each, in the phase in which the rank needs the most."""
        return peak_parts(self.memory_phases(grouping, tokens_D, heads_D))

    @property
    def attention_speeds(self) -> list[float]:
        """Attention speed of every rank, as a fraction of the fastest rank's."""
        speeds: list[float] = (self.attention_s_D.min() / self.attention_s_D).tolist()
        return speeds

    @property
    def least_block_s(self) -> float:
        """Time of one block that no schedule undercuts: perfect balance, free exchanges, and ZeRO's traffic."""
        return max(self.bound_s, self.floor_s)

    @abstractmethod
    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Return the time that every rank computes in one block, ``[D]``."""

    @abstractmethod
    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """Find the largest of the block's ``terms``, and the rank or link that sets it."""

    @abstractmethod
    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Return when each rank computes and transfers in one block, forward and backward: bars of a Gantt chart."""

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return lower bounds of the block's time for any order of the groups in the ring, ``[B]``.

        The ring's transfers count as free. A cost model without such a bound returns 0.
        """
        return np.zeros(len(tokens_BD))

    def coupled_rings_s(
        self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, orders_PK: Ints | None = None
    ) -> Floats | None:
        """Return the time of the coupled rings of one block, ``[1]``; or in other orders of the groups, ``[P]``.

        None if the model has no such times: rings with barriers, and contiguous causal groups, whose work depends on
        their order. Coupled rings: see `ds_hetero.cost.terms.ring`.

        Args:
            orders_PK: groups in the order of every ring, by their positions in ``grouping``; the transfers of such
                rings are free. None: the order of ``grouping``, with its transfers.
        """
        return None

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Return times outside the blocks by name: ``loss_s`` per micro-batch, all others once per iteration.

        The result is empty in HexiSeq's cost model, which has no such times.
        """
        return {}

    def block_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Return the time of one block, forward and backward, for one assignment."""
        return float(self.block_s_many(grouping, tokens_D[None], heads_D[None])[0])

    def memory_bytes(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Return the peak memory of every rank, ``[D]``; leading dimensions of the arguments are kept."""
        return peak_bytes(self.memory_phases(grouping, tokens_D, heads_D))

    def arrays(self, schedule: Schedule) -> tuple[Grouping, Floats, Ints]:
        """Convert a schedule into a grouping, tokens by rank (whole numbers) and heads by rank.

        Raises:
            PlanError: the schedule has other ranks than the cluster, or other heads than the model.
            ScheduleError: the sequence is too short for the schedule.
        """
        num_ranks = self.cluster.num_ranks
        if schedule.ranks != tuple(range(num_ranks)):
            raise PlanError(
                f"the schedule is for ranks {schedule.ranks[0]} to {schedule.ranks[-1]}, the cluster has ranks 0 to "
                f"{num_ranks - 1}. Give the cluster that the schedule was made for, or plan again."
            )
        heads = (schedule.num_heads, schedule.num_kv_heads)
        expected = (self.model.num_heads, self.model.num_kv_heads)
        if heads != expected:
            raise PlanError(
                f"the schedule has (num_heads, num_kv_heads) = {heads}, the model {self.model.name} has {expected}. "
                "Give the model that the schedule was made for, or plan again."
            )
        tokens = schedule.tokens(self.workload.seq_len)
        heads_D = np.zeros(num_ranks, dtype=np.int64)
        for group in schedule.groups:
            heads_D[list(group.ranks)] = group.heads
        tokens_D = np.array([tokens[rank] for rank in range(num_ranks)], dtype=np.float64)
        return Grouping.of_schedule(self.cluster, schedule), tokens_D, heads_D

    def predict(self, schedule: Schedule) -> Prediction:
        """Predict time and memory of a schedule. Raises as `arrays` does."""
        grouping, tokens_D, heads_D = self.arrays(schedule)
        work = self.workload
        terms = self.terms(grouping, tokens_D, heads_D)
        outside = self.outside_blocks_s(tokens_D)
        micro_batch_s = terms.block_s * self.model.num_layers + outside.get("loss_s", 0.0)
        iteration_s = micro_batch_s * work.micro_batches + once_s(outside)
        parts = self.memory_parts(grouping, tokens_D, heads_D)
        memory_D = parts.total
        host_N = self.host_bytes_N(tokens_D)
        reason = self._memory_shortage_text(memory_D, parts) or self._host_memory_shortage_text(host_N)
        return Prediction(
            cost_model=self.name,
            block_s=terms.block_s,
            iteration_s=iteration_s,
            tokens_per_s=work.step_tokens / iteration_s,
            terms=terms,
            memory_bytes=tuple(int(x) for x in np.ceil(memory_D)),
            feasible=reason is None,
            reason=reason,
            bottleneck=self.bottleneck(grouping, tokens_D, heads_D, terms),
            bound_s=self.bound_s,
            error=max(device.error for device in self.cluster.devices),
            confidence=confidence(self.cluster.devices),
            host_bytes=tuple(int(x) for x in np.ceil(host_N)),
            busy_s=tuple(self.busy_s(grouping, tokens_D, heads_D).tolist()),
            parts_s={"blocks_s": terms.block_s * self.model.num_layers * work.micro_batches, **outside},
        )

    def host_bytes_N(self, tokens_D: Floats) -> Floats:
        """Return the bytes that offloads put into the memory of every node, ``[N]``; see `host_bytes_of_nodes`."""
        return host_bytes_of_nodes(self.cluster, self.model, self.workload, tokens_D)

    def host_has_room(self, tokens_D: Floats) -> bool:
        """Whether offloads fit into the memory of every node; nodes of unknown memory count as large enough."""
        return self._host_memory_shortage_text(self.host_bytes_N(tokens_D)) is None

    def _host_memory_shortage_text(self, host_N: Floats) -> str | None:
        """Say on which node offloads do not fit into the host's memory; None if they fit everywhere."""
        for node, need_bytes in zip(self.cluster.nodes, host_N.tolist(), strict=True):
            node_bytes = node.host_memory_bytes
            if node_bytes is not None and need_bytes > USABLE_HOST_FRACTION * node_bytes:
                return (
                    f"offloads put {need_bytes / GIB:.1f} GiB into the memory of {node.name}, of whose "
                    f"{node_bytes / GIB:.1f} GiB {100 * USABLE_HOST_FRACTION:.0f} % are free for them"
                )
        return None

    def _memory_shortage_text(self, memory_D: Floats, parts: MemoryParts) -> str | None:
        """Say which rank lacks most memory, how much, and for what; None if every rank fits."""
        excess_D = memory_D - self.capacity_bytes_D
        if excess_D.max() <= 0:
            return None
        rank = int(excess_D.argmax())
        parts_of_rank = ((name.replace("_", " "), size) for name, size in parts.of_rank(rank).items() if size)
        shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts_of_rank)
        num_others = int((excess_D > 0).sum()) - 1
        need_gib, capacity_gib = memory_D[rank] / GIB, self.capacity_bytes_D[rank] / GIB
        excess_gib = excess_D[rank] / GIB
        text = (
            f"{self.cluster.rank_name(rank)} needs {need_gib:.1f} GiB of {capacity_gib:.1f}: {excess_gib:.1f} GiB too "
            f"much ({shares})"
        )
        if num_others:
            text += f"; {num_others} more {'ranks do' if num_others > 1 else 'rank does'} not fit"
        device = self.cluster.devices[rank]
        if device.shares_host_memory and self.workload.offloads:
            text += f"; offloads free none of it, the memory of {device.name} is the machine's"
        return text


def once_s(outside: Mapping[str, float]) -> float:
    """Return the sum of the times of `CostModel.outside_blocks_s` that occur once per iteration: all but ``loss_s``."""
    return sum(seconds for part, seconds in outside.items() if part != "loss_s")
