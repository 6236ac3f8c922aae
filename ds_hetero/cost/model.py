"""The interface of a cost model, and what both of them share: from a schedule to a `Prediction`.

A search works on a `Grouping` and arrays of tokens and heads; people and files work on `Schedule`. Both cost models
have the methods of `CostModel`, so the search does not depend on which one it minimizes.

Dimension key: D ranks, K groups, B assignments of one grouping.
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
    """Parts of the time of one transformer block, forward and backward; they add up to it."""

    non_attention_s: float
    all_to_all_s: float
    ring_steps_s: float

    @property
    def block_s(self) -> float:
        """Time of the block."""
        return self.non_attention_s + self.all_to_all_s + self.ring_steps_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Bottleneck of the block time: the largest term, and the rank or the link behind it."""

    term: str  # a field name of `Terms`
    cause: str  # ``"compute"``, ``"memory bandwidth"``, ``"link"``, ``"ZeRO traffic"`` or ``"the host's launches"``
    rank: int  # the slowest rank, or one end of the slowest link
    peer: int | None  # the other end of the link; None where the cause is no link
    text: str  # a sentence for people

    @classmethod
    def of_rank(cls, cluster: Cluster, term: str, cause: str, rank: int) -> Bottleneck:
        """A rank that computes the longest."""
        text = f"{_TERM_NAMES[term]}: {cause} of {cluster.rank_name(rank)}"
        return cls(term=term, cause=cause, rank=rank, peer=None, text=text)

    @classmethod
    def of_link(cls, cluster: Cluster, term: str, rank: int, peer: int) -> Bottleneck:
        """A link that carries the longest transfer."""
        text = (
            f"{_TERM_NAMES[term]}: link {cluster.link(rank, peer).name!r}, from {cluster.rank_name(rank)} "
            f"to {cluster.rank_name(peer)}"
        )
        return cls(term=term, cause="link", rank=rank, peer=peer, text=text)


_TERM_NAMES = {"non_attention_s": "non-attention", "all_to_all_s": "all-to-all", "ring_steps_s": "ring steps"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The time and the memory of one schedule under a cost model.

    Args:
        error: half of the range, as a share of the time, in which it lies in 8 of 10 cases; of the card that is known
            least, see `DeviceSpec.error`.
    """

    cost_model: str  # its name
    block_s: float  # time of one transformer block, forward and backward
    iteration_s: float  # time of an optimizer step
    tokens_per_s: float  # tokens of an optimizer step over its time
    terms: Terms  # the parts of ``block_s``
    memory_bytes: tuple[int, ...]  # peak of every rank
    feasible: bool  # every rank fits into its memory
    reason: str | None  # which rank does not fit and by how many GiB; None when every rank fits
    bottleneck: Bottleneck  # what decides ``block_s``
    bound_s: float  # block time of all work spread over all devices by speed, with free communication
    busy_s: tuple[float, ...]  # compute time of every rank in one block
    parts_s: dict[str, float]  # finer times by name, for ``--json`` and calibration, such as ``forward_s``
    error: float = 0.0
    confidence: str = ""  # whose rates of attention are meant, and of which cards there is no measurement
    host_bytes: tuple[int, ...] = ()  # what offloads put into the memory of every machine

    @property
    def range_s(self) -> tuple[float, float]:
        """Times of an optimizer step between which it lies in 8 of 10 cases."""
        return self.iteration_s * (1 - self.error / (1 + self.error)), self.iteration_s * (1 + self.error)

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        return {**asdict(self), "range_s": self.range_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One bar of the timeline of a block."""

    rank: int  # whose bar it is
    stream: str  # ``"compute"`` or ``"network"``
    kind: str  # ``"non_attention"``, ``"all_to_all"``, ``"attention"`` or ``"ring"``
    phase: str  # ``"forward"``, ``"recompute"``, ``"backward"``, or ``"both"`` where the cost model pools them
    step: int  # ring step, 0 elsewhere
    start_s: float  # seconds since the start of the block
    stop_s: float  # likewise

    @classmethod
    def of(
        cls, rank: int, stream: str, kind: str, start_s: float, stop_s: float, step: int = 0, phase: str = "both"
    ) -> Span:
        """A bar by position of its arguments."""
        return cls(rank=rank, stream=stream, kind=kind, phase=phase, step=step, start_s=start_s, stop_s=stop_s)


class CostModel(ABC):
    """A cost model bound to a cluster, a model and a workload.

    Whatever does not depend on the schedule is computed when it is made; whatever depends only on who is grouped with
    whom is in `Grouping`. Methods take tokens and heads **indexed by rank**: tokens may be fractions, heads are whole
    and sum to ``num_heads`` in every group.
    """

    name: str
    attention_s_D: Floats  # seconds per query token x key token x head, forward and backward, at an even share
    non_attention_s_per_token_D: Floats  # forward and backward of one block outside attention, at an even share
    least_attention_s_D: Floats  # the same as ``attention_s_D`` for shapes without limit; no share is done faster
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
        """Time of one block for many assignments of one grouping, ``[B]``; does not look at memory."""

    def block_s_below(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints, below_B: Floats) -> Floats:
        """`block_s_many`, ``[B]``, or infinity where no order of the groups would take less than ``below_B``."""
        return self.block_s_many(grouping, tokens_BD, heads_BD)

    @abstractmethod
    def terms(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Terms:
        """The time of one block by part."""

    @abstractmethod
    def memory_phases(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
        """Memory by moment and part, each ``[D]``; leading dimensions of the arguments are kept."""

    def memory_parts(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> MemoryParts:
        """The parts of every rank's peak, each ``[D]``."""
        return peak_parts(self.memory_phases(grouping, tokens_D, heads_D))

    @property
    def attention_speeds(self) -> list[float]:
        """Speed of attention of every rank, relative to the fastest."""
        speeds: list[float] = (self.attention_s_D.min() / self.attention_s_D).tolist()
        return speeds

    @property
    def least_block_s(self) -> float:
        """Time of one block that no schedule undercuts: perfect balance, free exchanges, and ZeRO's traffic."""
        return max(self.bound_s, self.floor_s)

    @abstractmethod
    def busy_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Time that every rank computes in one block, ``[D]``."""

    @abstractmethod
    def bottleneck(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints, terms: Terms) -> Bottleneck:
        """The largest of the ``terms`` of the block's time."""

    @abstractmethod
    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block, forward and backward, for a picture."""

    def free_ring_s(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Times of one block that no order of the groups undercuts, ``[B]``; 0 where the cost model knows none."""
        return np.zeros(len(tokens_BD))

    def outside_blocks_s(self, tokens_D: Floats) -> dict[str, float]:
        """Parts of an iteration outside the blocks: ``loss_s`` per micro-batch, others once; HexiSeq has none."""
        return {}

    def block_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Time of one block, forward and backward."""
        return float(self.block_s_many(grouping, tokens_D[None], heads_D[None])[0])

    def memory_bytes(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Peak memory of every rank, ``[D]``; leading dimensions of the arguments are kept."""
        return peak_bytes(self.memory_phases(grouping, tokens_D, heads_D))

    def arrays(self, schedule: Schedule) -> tuple[Grouping, Floats, Ints]:
        """A schedule as a grouping, whole tokens by rank and heads by rank.

        Raises:
            PlanError: its ranks or heads are not those of the cluster and the model.
            ScheduleError: the sequence is too short for it.
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
        """Predict time and memory of a schedule, in whole tokens. Raises `PlanError`: its ranks or heads are others."""
        flat = self.arrays(schedule)
        work = self.workload
        terms = self.terms(*flat)
        outside = self.outside_blocks_s(flat[1])
        per_micro_batch = terms.block_s * self.model.num_layers + outside.get("loss_s", 0.0)
        iteration_s = per_micro_batch * work.micro_batches + once_s(outside)
        parts = self.memory_parts(*flat)
        memory_D = parts.total
        host_N = self.host_bytes_N(flat[1])
        reason = self._too_much(memory_D, parts) or self._too_much_on_host(host_N)
        return Prediction(
            cost_model=self.name,
            block_s=terms.block_s,
            iteration_s=iteration_s,
            tokens_per_s=work.step_tokens / iteration_s,
            terms=terms,
            memory_bytes=tuple(int(x) for x in np.ceil(memory_D)),
            feasible=reason is None,
            reason=reason,
            bottleneck=self.bottleneck(*flat, terms),
            bound_s=self.bound_s,
            error=max(device.error for device in self.cluster.devices),
            confidence=confidence(self.cluster.devices),
            host_bytes=tuple(int(x) for x in np.ceil(host_N)),
            busy_s=tuple(self.busy_s(*flat).tolist()),
            parts_s={"blocks_s": terms.block_s * self.model.num_layers * work.micro_batches, **outside},
        )

    def host_bytes_N(self, tokens_D: Floats) -> Floats:
        """Bytes that offloads put into the memory of every machine, ``[N]``; see `host_bytes_of_nodes`."""
        return host_bytes_of_nodes(self.cluster, self.model, self.workload, tokens_D)

    def host_has_room(self, tokens_D: Floats) -> bool:
        """Whether offloads leave every machine whose memory is known what its system needs."""
        return self._too_much_on_host(self.host_bytes_N(tokens_D)) is None

    def _too_much_on_host(self, host_N: Floats) -> str | None:
        for node, need in zip(self.cluster.nodes, host_N.tolist(), strict=True):
            has = node.host_memory_bytes
            if has is not None and need > USABLE_HOST_FRACTION * has:
                return (
                    f"offloads put {need / GIB:.1f} GiB into the memory of {node.name}, of whose {has / GIB:.1f} GiB "
                    f"{USABLE_HOST_FRACTION:.0%} are free for them"
                )
        return None

    def _too_much(self, memory_D: Floats, parts: MemoryParts) -> str | None:
        excess_D = memory_D - self.capacity_bytes_D
        if excess_D.max() <= 0:
            return None
        rank = int(excess_D.argmax())
        parts_of_rank = ((name.replace("_", " "), size) for name, size in parts.of_rank(rank).items() if size)
        shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts_of_rank)
        others = int((excess_D > 0).sum()) - 1
        need, has, excess = memory_D[rank] / GIB, self.capacity_bytes_D[rank] / GIB, excess_D[rank] / GIB
        text = f"{self.cluster.rank_name(rank)} needs {need:.1f} GiB of {has:.1f}: {excess:.1f} GiB too much ({shares})"
        text += f"; {others} more ranks do not fit" if others else ""
        device = self.cluster.devices[rank]
        stays = device.shares_host_memory and self.workload.offloads
        return text + (f"; offloads free none of it, the memory of {device.name} is the machine's" if stays else "")


def once_s(outside: Mapping[str, float]) -> float:
    """Sum of the parts of `CostModel.outside_blocks_s` that come once in an iteration."""
    return sum(seconds for part, seconds in outside.items() if part != "loss_s")
