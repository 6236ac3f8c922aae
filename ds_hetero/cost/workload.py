"""What goes into a cost model and what comes out of it.

A search works on a `Grouping` and arrays of tokens and heads; people and files work on `Schedule`. Both cost
models have the methods of `CostModel`, so the search does not know which one it minimises.

Dimension key: D ranks, K groups, B assignments of one grouping.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ds_hetero.arrays import Floats, Ints
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.grouping import Grouping
from ds_hetero.models import ModelSpec
from ds_hetero.schedule import Schedule

__all__ = ["Bottleneck", "CostModel", "Prediction", "Span", "Terms", "Workload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained: one replica's batch and how DeepSpeed trains it.

    Args:
        seq_len: tokens of a sequence, over all ranks.
        micro_batch: sequences per micro-batch, B; micro_batches: of them per iteration (gradient accumulation).
        causal: causal attention; HexiSeq's published model counts full attention whatever this says.
        zero_stage: 0 to 3. zero_weights: share of the optimizer state per rank, None for uniform.
        activation_checkpointing: keep only the input of every layer and compute the layer again in the backward.
        tiled_logits: compute the loss in tiles, so that logits of all tokens never exist at once.
        element_bytes: of parameters and activations (P); gradient_bytes, optimizer_bytes: per parameter (12: master
            weight and two Adam moments in fp32), less where only some of them are trained.
        offload_optimizer, offload_parameters: kept in the host's memory; time is counted as if they were not.
        data_parallel: replicas that share the ZeRO partition with this one.
        zero_cluster: the devices of all these replicas, over whose links ZeRO communicates; left out, this replica's.
    """

    seq_len: int
    micro_batch: int = 1
    micro_batches: int = 1
    causal: bool = True
    zero_stage: int = 3
    zero_weights: tuple[float, ...] | None = None
    activation_checkpointing: bool = True
    tiled_logits: bool = True
    element_bytes: int = 2
    gradient_bytes: float = 2
    optimizer_bytes: float = 12
    offload_optimizer: bool = False
    offload_parameters: bool = False
    data_parallel: int = 1
    zero_cluster: Cluster | None = None


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
    """What decides the block time: the largest term, and the rank or the link behind it."""

    term: str  # a field name of Terms
    cause: str  # "compute", "memory bandwidth", "link", "zero traffic"
    rank: int
    peer: int | None  # the other end where the cause is a link
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
    """What a cost model says of one schedule.

    Args:
        memory_bytes: peak of every rank. reason: None when every rank fits, else which rank by how many GiB.
        bound_s: block time if all work were spread over all devices in proportion to speed, with free communication.
        busy_s: compute time of every rank in one block.
        parts_s: finer times by name for ``--json`` and for calibration, such as ``forward_s`` or ``loss_s``.
    """

    cost_model: str
    block_s: float
    iteration_s: float
    tokens_per_s: float
    terms: Terms
    memory_bytes: tuple[int, ...]
    feasible: bool
    reason: str | None
    bottleneck: Bottleneck
    bound_s: float
    busy_s: tuple[float, ...]
    parts_s: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One bar of the timeline of a block."""

    rank: int
    stream: str  # "compute" or "network"
    kind: str  # "non_attention", "all_to_all", "attention", "ring"
    phase: str  # "forward", "backward", or "both" where the model pools them
    step: int  # ring step, 0 elsewhere
    start_s: float
    stop_s: float

    @classmethod
    def of(
        cls, rank: int, stream: str, kind: str, start_s: float, stop_s: float, step: int = 0, phase: str = "both"
    ) -> Span:
        """A bar by position of its arguments."""
        return cls(rank=rank, stream=stream, kind=kind, phase=phase, step=step, start_s=start_s, stop_s=stop_s)


class CostModel(Protocol):
    """A cost model bound to a cluster, a model and a workload.

    Whatever does not depend on the schedule is computed when it is made; whatever depends only on who is grouped with
    whom is in `Grouping`. The methods below it take tokens and heads **indexed by rank**: s_d may be fractions of
    tokens, n_d are whole and sum to num_heads in every group.
    """

    name: str
    cluster: Cluster
    model: ModelSpec
    workload: Workload
    attention_s_D: (
        Floats  # seconds per query token x key token x head, forward and backward, curves frozen at an even share
    )
    non_attention_s_per_token_D: Floats  # forward and backward of one block, curves frozen at an even share
    least_attention_s_D: Floats  # the same two for shapes without limit: no share of whatever size is done faster
    least_non_attention_s_per_token_D: Floats
    capacity_bytes_D: Floats
    bound_s: float  # time of one block at perfect balance with free communication
    floor_s: float  # time of one block that no schedule can undercut, set by ZeRO's traffic
    loss_s_per_token_D: Floats  # embedding's and head's share of a micro-batch, outside the blocks

    def block_s(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> float:
        """Time of one block, forward and backward; the fast path, which does not look at memory."""

    def block_s_many(self, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """The same for many assignments of one grouping, ``[B]``."""

    def memory_bytes(self, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats:
        """Peak memory of every rank, ``[D]``; leading dimensions of the arguments are kept."""

    def predict(self, schedule: Schedule) -> Prediction:
        """Everything there is to say of one schedule, with whole tokens.

        Raises:
            PlanError: the schedule's ranks or heads are not those of the cluster and the model.
        """

    def timeline(self, schedule: Schedule) -> tuple[Span, ...]:
        """Bars of one block, forward and backward, for a picture."""
