"""Result of a cost model: the time of a schedule by part, its memory, its bottleneck and its timeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict


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
        bound_s: block time if all work were spread over all devices in proportion to speed, with free communication.
        error: half of the range, as a share of the time, in which it lies in 8 of 10 cases; of the card that is known
            least, see `DeviceSpec.error`.
        parts_s: finer times by name for ``--json`` and for calibration, such as ``forward_s`` or ``loss_s``.
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
    bound_s: float
    busy_s: tuple[float, ...]  # compute time of every rank in one block
    parts_s: dict[str, float]
    error: float = 0.0
    confidence: str = ""  # whose rates of attention are meant, and of which cards there is no measurement

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
