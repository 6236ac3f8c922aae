"""Parts of a plan: the stages of a pipeline with their ranks and layers, and the numbers of the model.

Plain data; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ds_hetero.common.reading import JsonDict
from ds_hetero.values.schedule import Schedule

BATCH_KEYS = ("micro_batch_size", "micro_batches")
"""Fields of a `Pipeline`, and keys of its files, that say the batch of an optimizer step."""

INNER = ("one", "tensor", "sequence")
"""How the ranks of a stage share its work: a single rank; tensor parallelism; a schedule of sequence parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The numbers of a model that a plan depends on."""

    num_layers: int  # decoder layers
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOwners:
    """Owners of the optimizer state."""

    stage: int  # ZeRO stage
    owner_weights: tuple[tuple[int, float], ...] = ()  # (rank, weight), ascending; empty if all own alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Ranks that hold the same layers.

    Args:
        layers: decoder layers ``[from, to)``; None for all layers of a model whose number the plan does not say.
            The embedding belongs to the stage with layer 0, the last norm and the head to the one with the last layer.
    """

    ranks: tuple[int, ...]  # global ranks, in any order
    layers: tuple[int, int] | None = None
    inner: str = "one"  # one of `INNER`
    schedule: Schedule | None = None  # of a ``"sequence"`` stage, in global ranks
    in_flight: int | None = None  # forwards that may run before their backward; None for 1F1B's, stages to the last

    @property
    def num_layers(self) -> int | None:
        """Layers of the stage; None where the plan does not say."""
        return None if self.layers is None else self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages in order, which hold every layer once."""

    stages: tuple[Stage, ...]  # first to last
    micro_batch_size: int | None = None  # samples of one; None where DeepSpeed's configuration says, alike for all
    micro_batches: int | None = None  # micro-batches per optimizer step; None likewise

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all stages, ascending."""
        return tuple(sorted(chain.from_iterable(stage.ranks for stage in self.stages)))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose forward may run before their backward on the stage with this index."""
        in_flight = self.stages[stage].in_flight
        return len(self.stages) - stage if in_flight is None else in_flight


def batches_of(pipeline: Pipeline) -> JsonDict:
    """Return the batch of a pipeline by `BATCH_KEYS`, as files have it; empty where the plan says none."""
    return {key: getattr(pipeline, key) for key in BATCH_KEYS if getattr(pipeline, key) is not None}
