"""Check that forwards get the shards as the loader made them: the same batch on all ranks, its positions and labels.

Ranks that hold parts of the same sequences have to run forwards of the same batches, one after the other. A rank that
keeps a batch too long, or is one batch ahead, would give attention the keys of other sequences of the same shape.

A script may change batches in the loop by their content. The check cannot know what one process would have changed
along a whole sequence. But position ids that one rank has shifted against those of the other ranks are wrong for any
sequence.

Two sums of an entry are compared: of its numbers, and of its numbers times their index. So nothing waits for the
device, and the loader's tensors need not be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor

from ds_hetero.common.text import ranks_by_value
from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.shard_info import ShardInfo, weighted_sums
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Numbers, Undecided, Verdict

_POSITIONS, _LABELS = "position_ids", "shift_labels"
# A shard with fewer positions, changed one by one, may look as if all were shifted by the same number.
_MIN_SHIFTED = 8


class _Changes(NamedTuple):
    """Numbers of one rank about one step, taken at its first forward with changed entries, if there is one.

    Attributes:
        replica: id of the rank's replica.
        size: number of position ids.
        indices: sum of their indices.
        sum_change: by how much the sum of the position ids has changed.
        weighted_sum_change: by how much the sum of the position ids times their index has changed.
        labels: whether the sums of the labels have changed.
        batches: checksum of the numbers of the loader's batches that the forwards of the step ran; -1 if not known.
        first_batch: number of the first of these batches, counted from the last batch of the step before.
    """

    replica: float
    size: float
    indices: float
    sum_change: float
    weighted_sum_change: float
    labels: float
    batches: float
    first_batch: float


class ModelOfBatches(Protocol):
    """What `AsLoaded` reads of a model whose sequences are split over ranks."""

    replica: Replica


class AsLoaded:
    """Checks that one split model gets its batches as the loader gave them, as a step check."""

    width = len(_Changes._fields)

    def __init__(self, model: ModelOfBatches) -> None:
        self._model = model
        self._changes: Tensor | None = None  # [5] of the present step, on its device
        self._num_loaded = 0  # batches that all loaders of the model gave out
        self._batches: list[int] = []  # numbers of the batches that forwards of the present step ran
        self._last_before: int | None = None  # number of the last batch of the step before

    def with_number(self, info: ShardInfo) -> ShardInfo:
        """Return the information of a shard that a loader gives out, with the number of the batch."""
        self._num_loaded += 1
        return replace(info, number=self._num_loaded)

    @torch.no_grad()
    def note_forward(self, batch: Mapping[str, object], info: ShardInfo) -> None:
        """Compare the arguments ``batch`` of a forward of training with the shard; does not wait for the device."""
        if info.number:
            self._batches.append(info.number)
        positions = batch.get(_POSITIONS)
        if not isinstance(positions, Tensor) or _POSITIONS not in info.sums:
            return
        if info.placement.tokens(self._model.replica.rank) == 0:
            return  # the rank has a placeholder
        position_sum, weighted_sum = weighted_sums(positions).unbind()
        expected, expected_by_index = info.sums[_POSITIONS]
        size = positions.numel()
        changes = [
            torch.full_like(position_sum, size),
            torch.full_like(position_sum, size * (size - 1) // 2),
            position_sum - expected,
            weighted_sum - expected_by_index,
            torch.zeros_like(position_sum),
        ]
        labels = batch.get(_LABELS)
        if isinstance(labels, Tensor) and _LABELS in info.sums:
            label_sum, weighted_label_sum = weighted_sums(labels).unbind()
            expected, expected_by_index = info.sums[_LABELS]
            changes[-1] = ((label_sum != expected) | (weighted_label_sum != expected_by_index)).to(position_sum.dtype)
        changes_of_forward = torch.stack(changes)
        if self._changes is None:
            self._changes = changes_of_forward
        else:
            is_unchanged = self._changes[2:].eq(0).all()  # without the size and the sum of indices
            self._changes = torch.where(is_unchanged, changes_of_forward, self._changes)

    def numbers(self) -> Numbers:
        """Return the numbers of `_Changes` for the step that ends."""
        changes, self._changes = self._changes, None
        replica_id = torch.tensor([float(self._model.replica.replica_id)], dtype=torch.float64)
        if changes is None:
            changes = torch.zeros(self.width - 3)
        return replica_id, changes, torch.tensor(self._take_batches(), dtype=torch.float64)

    def _take_batches(self) -> tuple[float, float]:
        """Return `_Changes.batches` and `_Changes.first_batch` of the step that ends."""
        batches, self._batches = self._batches, []
        last_number, self._last_before = self._last_before, batches[-1] if batches else None
        if not batches or last_number is None:  # after a restart ranks count from other numbers
            return -1.0, 0.0
        since = [number - last_number for number in batches]
        return float(crc32(repr(since).encode())), float(since[0])

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse ranks that ran other batches or shifted positions; warn of entries that only some ranks changed."""
        changes = [_Changes(*row) for row in rows]
        if verdict := _different_batches_error(changes):
            return verdict
        offsets = {rank: _offset(change) for rank, change in enumerate(changes) if change.size}
        ranks_of = ranks_by_value((rank, changes[rank].replica) for rank in offsets)
        for ranks in ranks_of.values():
            by_rank = [offsets[rank] for rank in ranks]
            if None not in by_rank and len(set(by_rank)) > 1:
                return BatchError(
                    f"position_ids that the model was given are moved against those of the loader by {by_rank} on "
                    f"ranks {ranks}, which hold parts of the same sequences. Change position_ids in the dataset or the "
                    "collator, or by the same on every rank."
                )
        have_changed = [bool(change.sum_change or change.weighted_sum_change) for change in changes]
        warning = _partial_change_warning(_POSITIONS, have_changed, ranks_of)
        return warning or _partial_change_warning(_LABELS, [bool(change.labels) for change in changes], ranks_of)


def _different_batches_error(changes: Sequence[_Changes]) -> BatchError | None:
    """Return the error for ranks of a replica that ran forwards of different batches; None if there are none."""
    numbered_ranks = ((rank, change.replica) for rank, change in enumerate(changes) if change.batches >= 0)
    for ranks in ranks_by_value(numbered_ranks).values():
        if len({changes[rank].batches for rank in ranks}) > 1:
            first_batches = [int(changes[rank].first_batch) for rank in ranks]
            return BatchError(
                f"ranks {ranks}, which hold parts of the same sequences, ran forwards of different batches in this "
                f"step: counted from the step before, the first is the loader's batch {first_batches} by rank. Take "
                "every batch from the loader on every rank, and run forwards of the same ones in the same order."
            )
    return None


def _offset(change: _Changes) -> int | None:
    """Return by how much the position ids of a rank are shifted; None if their shifts differ."""
    offset, remainder = divmod(change.sum_change, change.size)
    if change.sum_change and change.size < _MIN_SHIFTED:
        return None
    return int(offset) if remainder == 0 and change.weighted_sum_change == offset * change.indices else None


def _partial_change_warning(
    name: str, changed: Sequence[bool], ranks_of: Mapping[float, Sequence[int]]
) -> Undecided | None:
    """Return a warning if some ranks of a replica have changed an entry and others have not; else None.

    Args:
        name: of the entry.
        changed: whether each rank has changed the entry.
        ranks_of: the ranks of each replica.
    """
    for ranks in ranks_of.values():
        changed_ranks = [rank for rank in ranks if changed[rank]]
        if changed_ranks and len(changed_ranks) < len(ranks):
            return Undecided(
                f"{name} that the model was given are not the loader's on ranks {changed_ranks} of {list(ranks)}, "
                "which hold parts of the same sequences: whether one process would change the same tokens cannot be "
                "checked. Change them in the dataset or the collator, where sequences are whole.",
                subject=name,
            )
    return None
