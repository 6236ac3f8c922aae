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
    """

    ranks: tuple[int, ...]  # global ranks, in any order
    layers: tuple[int, int] | None = None
    inner: str = "one"  # one of `INNER`
    schedule: Schedule | None = None  # schedule of a ``"sequence"`` stage, in global ranks
    in_flight: int | None = None  # forwards that may run before their backward; None: as under plain 1F1B

    @property
    def num_layers(self) -> int | None:
        """Number of layers of the stage; None if the plan does not say."""
        return None if self.layers is None else self.layers[1] - self.layers[0]


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


def batches_of(pipeline: Pipeline) -> JsonDict:
    """Return the batch of a pipeline by `BATCH_KEYS`, as in plan files; empty if the plan gives none."""
    return {key: getattr(pipeline, key) for key in BATCH_KEYS if getattr(pipeline, key) is not None}
