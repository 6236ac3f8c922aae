"""Placement of the batches of a model that is split over the sequence: by their length, or by their documents."""

from __future__ import annotations

from collections import deque

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.shard_placement import KnownPlacement
from ds_hetero.runtime.data.shard_info import ShardInfo
from ds_hetero.runtime.step_checks import AsLoaded
from ds_hetero.values.placement import Placement, Placer, Rows, stream_placement
from ds_hetero.values.schedule import Schedule

# A loop may draw all micro-batches of an optimizer step before it runs them; chosen, more than steps have.
_MAX_REMEMBERED_PLACEMENTS = 64


class BatchPlacement:
    """How the batches of one model are placed from now on, and how the latest ones were.

    Args:
        name_with_towers: name of the model's class if it puts images or sounds before its text decoder, so that batches
            cannot be placed by documents; else empty.

    Attributes:
        placer: places new batches.
        by_documents: True if batches are placed by their documents, not by their length.
        asked_for_documents: True if the section requests that, so that rows are joined and the loader reads ahead.
        recent: placements of the latest shards, latest first.
        as_loaded: checks that forwards get batches as the loader made them; None without checks.
    """

    def __init__(self, name_with_towers: str = "") -> None:
        self._name_with_towers = name_with_towers
        self.placer: Placer = stream_placement
        self.by_documents = self.asked_for_documents = False
        self.recent: deque[KnownPlacement] = deque(maxlen=_MAX_REMEMBERED_PLACEMENTS)
        self.as_loaded: AsLoaded | None = None

    def use(self, placer: Placer | None, *, asked_for: bool = True) -> None:
        """Set how batches are placed from now on. Raises `ConfigError`: by documents, but the model has towers.

        Args:
            placer: places batches by their documents under the present schedule, equally on every rank of the replica;
                None to shard batches by length.
            asked_for: whether the section requests placement by documents. If so, the rows of a batch are joined to one
                stream, and the loader reads ahead; otherwise batches stay as the loader returns them.
        """
        if placer is not None and self._name_with_towers:
            raise ConfigError(
                f'"placement": "documents" is for batches of tokens alone, and {self._name_with_towers} puts '
                'images or sounds before its text decoder. Set "placement" to "stream".'
            )
        self.placer, self.by_documents = placer or stream_placement, placer is not None
        self.asked_for_documents = placer is not None and asked_for

    def place(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch; see `ds_hetero.values.placement.Placer`."""
        return self.placer(schedule, length, rows)

    def note_shard(self, info: ShardInfo) -> None:
        """Remember the placement of a shard, for a forward that gets copies of its tensors, without `ShardInfo`."""
        if info.documents_from is not None:
            placement = KnownPlacement(
                placement=info.placement, documents_from=info.documents_from, position_runs=info.position_runs
            )
            self.recent.appendleft(placement)
