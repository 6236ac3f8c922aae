"""Find the documents of a batch row in one of three arguments: boundaries, a padding mask, or position ids.

As in transformers, boundaries take precedence over a mask; and with a padding mask, even one without zeros, position
ids that restart are not looked for. No loop runs over tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.values.placement import Range, Rows

Documents = tuple[Range, ...]
PositionRuns = tuple[tuple[tuple[int, int], ...], ...]
"""For every batch row, the runs of position ids that count up by one, each as (index, value) of its first id.

Example: the position ids 0 1 2 0 1 have the runs (0, 0) and (3, 0).
"""

BOUNDARIES, MASK, POSITIONS = "cu_seq_lens_q", "attention_mask", "position_ids"  # arguments that show documents
_BOUNDARIES_OF_KEYS = "cu_seq_lens_k"


def documents_from_positions(positions: Tensor) -> list[Documents]:
    """Return the documents of every row of position ids [B, L]; a document begins where ids do not increase by one."""
    length = positions.shape[1]
    starts = [[index for index, _ in runs] for runs in position_runs(positions)]
    return [tuple(pairwise([*starts_of_row, length])) for starts_of_row in starts]


def position_runs(positions: Tensor) -> PositionRuns:
    """Return the runs of position ids [B, L] in every row; a run begins where ids do not increase by one."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    rows: list[list[tuple[int, int]]] = [[] for _ in positions]
    indices = begins.nonzero()
    for (row, index), value in zip(indices.tolist(), positions[indices[:, 0], indices[:, 1]].tolist(), strict=True):
        rows[row].append((index, value))
    return tuple(map(tuple, rows))


def position_moments(runs: PositionRuns, intervals: Sequence[Range]) -> tuple[int, int]:
    """Return the sum of the position ids in ``intervals`` of all rows, and their sum with the weights 1, 2, 3, ...

    Args:
        runs: runs of the position ids of all rows, from `position_runs`.
        intervals: intervals of indices that a rank holds, the same in every row.
    """
    total = moment = 0
    weight = 1
    for runs_of_row in runs:
        starts = [index for index, _ in runs_of_row]
        for start, stop in intervals:
            number = bisect_right(starts, start) - 1
            while start < stop:
                index, value = runs_of_row[number]
                end = min(stop, starts[number + 1]) if number + 1 < len(starts) else stop
                count, first = end - start, value + start - index
                interval_sum = count * first + count * (count - 1) // 2
                total += interval_sum
                # sum over i < count of (first + i) (weight + i)
                moment += weight * interval_sum + first * (count * (count - 1) // 2)
                moment += (count - 1) * count * (2 * count - 1) // 6
                weight, start, number = weight + count, end, number + 1
    return total, moment


def documents_from_mask(mask: Tensor) -> list[Documents]:
    """Return the document of every row of a padding mask [B, L]: its real tokens, or none for a row of padding.

    Raises:
        BatchError: a row has zeros between real tokens.
    """
    is_real = mask.ne(0)
    counts = is_real.sum(1)
    firsts = is_real.to(torch.uint8).argmax(1)
    lasts = mask.shape[1] - is_real.flip(1).to(torch.uint8).argmax(1)
    documents: list[Documents] = []
    for row, (first, last, count) in enumerate(torch.stack([firsts, lasts, counts], dim=1).tolist()):
        if count and last - first != count:
            raise BatchError(
                f"attention_mask of batch row {row} has zeros between real tokens; only padding at the left or the "
                "right can be honoured. Pack documents with restarting position_ids instead."
            )
        documents.append(((first, last),) if count else ())
    return documents


def documents_from_cu_seqlens(boundaries: Sequence[int], length: int, batch_size: int) -> list[Documents]:
    """Return the documents of the only row, from boundaries.

    Raises:
        BatchError: there are several rows, or the boundaries do not rise from 0 to ``length``.
    """
    if batch_size != 1 or boundaries[0] != 0 or boundaries[-1] != length or list(boundaries) != sorted(boundaries):
        raise BatchError(
            f"cu_seqlens must rise from 0 to the {length} tokens of a batch of one row, got {list(boundaries)[:8]} "
            f"with batch size {batch_size}. Pack all sequences into one row."
        )
    return [tuple((a, b) for a, b in pairwise(boundaries) if a < b)]


def expect_one_set_of_boundaries(batch: Mapping[str, Any]) -> None:
    """Raise `BatchError` if boundaries of queries and of keys differ, or ``seq_idx`` alone shows documents."""
    of_queries, of_keys = batch.get(BOUNDARIES), batch.get(_BOUNDARIES_OF_KEYS)
    for name, boundaries in ((BOUNDARIES, of_queries), (_BOUNDARIES_OF_KEYS, of_keys)):
        if not isinstance(boundaries, Tensor | None):
            raise BatchError(f"{name} must be a tensor of boundaries, got {type(boundaries).__name__}.")
    if of_queries is not None and of_keys is not None and of_queries.tolist() != of_keys.tolist():
        raise BatchError(
            f"{_BOUNDARIES_OF_KEYS} must equal {BOUNDARIES}, because a sharded batch attends only within itself; got "
            f"{of_keys.tolist()[:8]} and {of_queries.tolist()[:8]}. Drop the KV cache, or run such batches unsharded "
            "(handle.unsharded())."
        )
    if batch.get("seq_idx") is not None and of_queries is None and batch.get(POSITIONS) is None:
        raise BatchError(f"seq_idx shows documents to some layers only; give {BOUNDARIES} or {POSITIONS} as well.")


def rows_of(documents: Sequence[Documents]) -> tuple[Rows, ...]:
    """Return the documents of batch rows, neighbouring rows with the same documents as one entry."""
    rows = []
    for documents_of_run, run in groupby(range(len(documents)), key=lambda row: documents[row]):
        members = list(run)
        rows.append(Rows(members[0], members[-1] + 1, documents_of_run))
    return tuple(rows)
