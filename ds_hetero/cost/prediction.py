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
    """Bottleneck of the block time: the largest term, and the rank or the link behind it.

    Args:
        term: a field name of `Terms`.
        cause: ``"compute"``, ``"memory bandwidth"``, ``"link"``, ``"ZeRO traffic"`` or ``"the host's launches"``.
        rank: the slowest rank, or one end of the slowest link.
        peer: the other end of the link; None where the cause is no link.
        text: a sentence for people.
    """

    term: str
    cause: str
    rank: int
    peer: int | None
    text: str

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
        cost_model: its name.
        block_s: time of one transformer block, forward and backward.
        iteration_s: time of an optimizer step.
        tokens_per_s: tokens of an optimizer step over its time.
        terms: the parts of ``block_s``.
        memory_bytes: peak of every rank.
        feasible: every rank fits into its memory.
        reason: which rank does not fit and by how many GiB; None when every rank fits.
        bottleneck: what decides ``block_s``.
        bound_s: block time if all work were spread over all devices in proportion to speed, with free communication.
        busy_s: compute time of every rank in one block.
        error: half of the range, as a share of the time, in which it lies in 8 of 10 cases; of the card that is known
            least, see `DeviceSpec.error`.
        confidence: whose rates of attention are meant, and of which cards there is no measurement.
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
    error: float = 0.0
    confidence: str = ""

    @property
    def range_s(self) -> tuple[float, float]:
        """Times of an optimizer step between which it lies in 8 of 10 cases."""
        return self.iteration_s * (1 - self.error / (1 + self.error)), self.iteration_s * (1 + self.error)

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        return {**asdict(self), "range_s": self.range_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One bar of the timeline of a block.

    Args:
        rank: whose bar it is.
        stream: ``"compute"`` or ``"network"``.
        kind: ``"non_attention"``, ``"all_to_all"``, ``"attention"`` or ``"ring"``.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, or ``"both"`` where the cost model pools them.
        step: ring step, 0 elsewhere.
        start_s: seconds since the start of the block.
        stop_s: likewise.
    """

    rank: int
    stream: str
    kind: str
    phase: str
    step: int
    start_s: float
    stop_s: float

    @classmethod
    def of(
        cls, rank: int, stream: str, kind: str, start_s: float, stop_s: float, step: int = 0, phase: str = "both"
    ) -> Span:
        """A bar by position of its arguments."""
        return cls(rank=rank, stream=stream, kind=kind, phase=phase, step=step, start_s=start_s, stop_s=stop_s)
