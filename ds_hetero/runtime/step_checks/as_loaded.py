"""Check that a forward is given what the loader cut: of the same batch on all ranks, its places of tokens and labels.

Ranks that hold parts of the same sequences run forwards of the same batches, one after the other. A rank that keeps a
batch too long, or is one ahead, gives attention keys of other sequences of the same shape.

A script may change its batches in the loop, by their content. What one process would have changed all along a sequence
cannot be known; but places that one rank moves against those of the others belong to no sequence.

Compared are two sums of an entry, over its numbers and over these times their index, so that no device is waited for
and the loader's own tensor need not be kept.
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
# Of fewer numbers, one by one changed by content may happen to be moved by the same.
_FEWEST_MOVED = 8


class _Changes(NamedTuple):
    """Numbers of one rank about one step: of the first forward that was given something else, or zeros."""

    replica: float
    size: float  # numbers in position_ids
    indices: float  # the sum of their indices
    moved: float  # by how much the sums of position_ids are off
    moved_by_index: float
    labels: float  # whether the sums of labels are off
    batches: float  # a checksum of which batches of the loader the forwards of the step ran; -1 if it is not known
    first_batch: float  # the first of them, counted from the last one of the step before


class Given(Protocol):
    """A model that is split over the sequence."""

    replica: Replica


class AsLoaded:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the batches of one split model."""

    width = len(_Changes._fields)

    def __init__(self, model: Given) -> None:
        self._model = model
        self._changes: Tensor | None = None  # [5] of the step that runs, on its device
        self._num_given = 0  # batches, by all loaders of the model
        self._batches: list[int] = []  # numbers of those that forwards of the step ran
        self._before: int | None = None  # the last one of the step before

    def numbered(self, info: ShardInfo) -> ShardInfo:
        """A loader gives out a shard: its information, with the number of the batch."""
        self._num_given += 1
        return replace(info, number=self._num_given)

    @torch.no_grad()
    def note_forward(self, batch: Mapping[str, object], info: ShardInfo) -> None:
        """A forward of training is given ``batch``; waits for no device."""
        if info.number:
            self._batches.append(info.number)
        positions = batch.get(_POSITIONS)
        if not isinstance(positions, Tensor) or _POSITIONS not in info.sums:
            return
        if info.placement.tokens(self._model.replica.rank) == 0:
            return  # it holds a placeholder
        first, by_index = weighted_sums(positions).unbind()
        expected, expected_by_index = info.sums[_POSITIONS]
        size = positions.numel()
        changes = [
            torch.full_like(first, size),
            torch.full_like(first, size * (size - 1) // 2),
            first - expected,
            by_index - expected_by_index,
            torch.zeros_like(first),
        ]
        labels = batch.get(_LABELS)
        if isinstance(labels, Tensor) and _LABELS in info.sums:
            of_labels, by_index_of_labels = weighted_sums(labels).unbind()
            expected, expected_by_index = info.sums[_LABELS]
            changes[-1] = ((of_labels != expected) | (by_index_of_labels != expected_by_index)).to(first.dtype)
        of_forward = torch.stack(changes)
        if self._changes is None:
            self._changes = of_forward
        else:
            is_unchanged = self._changes[2:].eq(0).all()  # behind the size and the sum of indices
            self._changes = torch.where(is_unchanged, of_forward, self._changes)

    def numbers(self) -> Numbers:
        """See `StepCheck`."""
        changes, self._changes = self._changes, None
        replica_id = torch.tensor([float(self._model.replica.replica_id)], dtype=torch.float64)
        none = torch.zeros(self.width - 3)
        return replica_id, none if changes is None else changes, torch.tensor(self._take_batches(), dtype=torch.float64)

    def _take_batches(self) -> tuple[float, float]:
        """`_Changes.batches` and `_Changes.first_batch` of the step that ends."""
        batches, self._batches = self._batches, []
        before, self._before = self._before, batches[-1] if batches else None
        if not batches or before is None:  # ranks that begin again count from another number
            return -1.0, 0.0
        since = [number - before for number in batches]
        return float(crc32(repr(since).encode())), float(since[0])

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        changes = [_Changes(*row) for row in rows]
        if verdict := _of_other_batches(changes):
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
        return _mixed(_POSITIONS, [bool(change.moved or change.moved_by_index) for change in changes], ranks_of) or (
            _mixed(_LABELS, [bool(change.labels) for change in changes], ranks_of)
        )


def _of_other_batches(changes: Sequence[_Changes]) -> BatchError | None:
    """Return ranks of a replica that ran forwards of different batches."""
    known = ((rank, change.replica) for rank, change in enumerate(changes) if change.batches >= 0)
    for ranks in ranks_by_value(known).values():
        if len({changes[rank].batches for rank in ranks}) > 1:
            first = [int(changes[rank].first_batch) for rank in ranks]
            return BatchError(
                f"ranks {ranks}, which hold parts of the same sequences, ran forwards of different batches in this "
                f"step: counted from the step before, the first is the loader's batch {first} by rank. Take every "
                "batch from the loader on every rank, and run forwards of the same ones in the same order."
            )
    return None


def _offset(change: _Changes) -> int | None:
    """Return by how much all positions are shifted; None where it is not the same for all."""
    offset, rest = divmod(change.moved, change.size)
    if change.moved and change.size < _FEWEST_MOVED:
        return None
    return int(offset) if rest == 0 and change.moved_by_index == offset * change.indices else None


def _mixed(name: str, changed: Sequence[bool], ranks_of: Mapping[float, Sequence[int]]) -> Undecided | None:
    """Return the finding that some ranks of a replica changed an entry and others did not; None if not so."""
    for ranks in ranks_of.values():
        by_script = [rank for rank in ranks if changed[rank]]
        if by_script and len(by_script) < len(ranks):
            return Undecided(
                f"{name} that the model was given are not the loader's on ranks {by_script} of {list(ranks)}, which "
                "hold parts of the same sequences: whether one process would change the same tokens cannot be checked. "
                "Change them in the dataset or the collator, where sequences are whole.",
                subject=name,
            )
    return None
