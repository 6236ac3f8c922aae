"""Parts of a plan: pipelines, stages with their ranks and layers, owners of optimizer state, numbers of the model.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ds_hetero.common.reading import JsonDict
from ds_hetero.values.schedule import Schedule

BATCH_KEYS = ("micro_batch_size", "micro_batches")
"""Fields of a `Pipeline`, and keys in plan files, for the batch of an optimizer step."""

INNER = ("one", "tensor", "sequence")
"""How the ranks of a stage share its work: a single rank; tensor parallelism; a schedule of sequence parallelism."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """Numbers of the model that a plan depends on."""

    num_layers: int  # decoder layers
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOwners:
    """ZeRO stage, and the shares of optimizer state that ranks own."""

    stage: int  # ZeRO stage
    owner_weights: tuple[tuple[int, float], ...] = ()  # (rank, weight), ascending; empty: equal shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Ranks that hold the same layers.

    Args:
        layers: decoder layers ``[from, to)``; None for all layers, if the plan does not know their number. The
            embedding belongs to the stage with layer 0, the last norm and the head to the stage with the last layer.
        schedule: of a ``"sequence"`` stage, in global ranks. With tensor groups it names the first rank of each.
        tensor_size: ranks of every tensor group of a ``"sequence"`` stage: consecutive ranks that hold the same tokens,
            and share heads and weights by tensor parallelism; 1 for none.
    """

    ranks: tuple[int, ...]  # global ranks, in any order
    layers: tuple[int, int] | None = None
    inner: str = "one"  # one of `INNER`
    schedule: Schedule | None = None
    tensor_size: int = 1
    in_flight: int | None = None  # forwards that may run before their backward; None: as under plain 1F1B

    @property
    def num_layers(self) -> int | None:
        """Number of layers of the stage; None if the plan does not say."""
        return None if self.layers is None else self.layers[1] - self.layers[0]

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks share weights by tensor parallelism: all of the stage, or those of each tensor group."""
        return self.inner == "tensor" or self.tensor_size > 1

    @property
    def inner_text(self) -> str:
        """How the ranks share the stage's work, for people, see `inner_text`."""
        return inner_text(self.inner, self.tensor_size)

    @property
    def token_holders(self) -> tuple[Ranks, ...]:
        """Ranks that hold the same tokens as one another; each tuple ascending.

        These are all ranks of a ``"tensor"`` stage, each tensor group of a ``"sequence"`` stage, or else every rank
        alone.
        """
        if self.schedule is None:
            return (tuple(sorted(self.ranks)),)
        return tuple(tuple(range(first, first + self.tensor_size)) for first in self.schedule.ranks)

    def holders_with(self, rank: int) -> Ranks:
        """Return the ranks that hold the same tokens as ``rank``, ascending, with itself."""
        return next(ranks for ranks in self.token_holders if rank in ranks)

    def schedule_of(self, rank: int) -> Schedule | None:
        """Return the schedule over which ``rank`` shares sequences: with tensor groups, that of its column.

        None if the stage does not share sequences.
        """
        if self.schedule is None or self.tensor_size == 1:
            return self.schedule
        return self.schedule.column(self.holders_with(rank).index(rank))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages in order, which together hold every layer once."""

    stages: tuple[Stage, ...]  # first to last
    micro_batch_size: int | None = None  # samples of a micro-batch; None: as ds_config.json says for all pipelines
    micro_batches: int | None = None  # micro-batches per optimizer step; None: as ds_config.json says

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all stages, ascending."""
        return tuple(sorted(chain.from_iterable(stage.ranks for stage in self.stages)))

    @property
    def samples(self) -> int:
        """Samples of an optimizer step; 0 if the plan gives no batch."""
        return (self.micro_batch_size or 0) * (self.micro_batches or 0)

    def in_flight(self, stage: int) -> int:
        """Return how many micro-batches the stage with this index may have in flight, by default as under 1F1B."""
        in_flight = self.stages[stage].in_flight
        return len(self.stages) - stage if in_flight is None else in_flight


def inner_text(inner: str, tensor_size: int) -> str:
    """Say how the ranks of a stage share its work: ``tensor``, ``sequence between tensor groups of 2``."""
    return inner if tensor_size == 1 else f"{inner} between tensor groups of {tensor_size}"


def batches_of(pipeline: Pipeline) -> JsonDict:
    """Return the batch of a pipeline by `BATCH_KEYS`, as in plan files; empty if the plan gives none."""
    return {key: getattr(pipeline, key) for key in BATCH_KEYS if getattr(pipeline, key) is not None}
