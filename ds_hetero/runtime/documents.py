"""The documents of a batch row, from what frameworks say of them: boundaries, a padding mask, or positions.

As in transformers, boundaries count before a mask, and a padding mask that is given, even one without a zero, rules out
a search for positions that restart. Everything reads tensors; no loop goes over tokens.
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
# Position ids of every batch row: from which index on they count up from which value.
PositionRuns = tuple[tuple[tuple[int, int], ...], ...]

BOUNDARIES, MASK, POSITIONS = "cu_seq_lens_q", "attention_mask", "position_ids"  # where documents are read from
_BOUNDARIES_OF_KEYS = "cu_seq_lens_k"


def documents_from_positions(positions: Tensor) -> list[Documents]:
    """Documents of every row of position ids [B, L], which begin wherever these do not go on by one."""
    length = positions.shape[1]
    starts = [[index for index, _ in runs] for runs in position_runs(positions)]
    return [tuple(pairwise([*of_row, length])) for of_row in starts]


def position_runs(positions: Tensor) -> PositionRuns:
    """Return where position ids [B, L] do not go on by one, and the values that they begin anew with."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    rows: list[list[tuple[int, int]]] = [[] for _ in positions]
    places = begins.nonzero()
    for (row, index), value in zip(places.tolist(), positions[places[:, 0], places[:, 1]].tolist(), strict=True):
        rows[row].append((index, value))
    return tuple(map(tuple, rows))


def position_moments(runs: PositionRuns, intervals: Sequence[Range]) -> tuple[int, int]:
    """The sum of the position ids in ``intervals`` of all rows, and their sum weighted by 1, 2, ... in this order.

    Args:
        intervals: of positions, the same in every row, as a rank holds them.
    """
    total = moment = 0
    weight = 1
    for of_row in runs:
        starts = [index for index, _ in of_row]
        for start, stop in intervals:
            number = bisect_right(starts, start) - 1
            while start < stop:
                index, value = of_row[number]
                end = min(stop, starts[number + 1]) if number + 1 < len(starts) else stop
                count, first = end - start, value + start - index
                summed = count * first + count * (count - 1) // 2
                total += summed
                # sum over i < count of (first + i) (weight + i)
                moment += weight * summed + first * (count * (count - 1) // 2)
                moment += (count - 1) * count * (2 * count - 1) // 6
                weight, start, number = weight + count, end, number + 1
    return total, moment


def documents_from_mask(mask: Tensor) -> list[Documents]:
    """The one document of every row of a padding mask [B, L], or none. Raises `BatchError`: zeros between tokens."""
    real = mask.ne(0)
    counts = real.sum(1)
    firsts = real.to(torch.uint8).argmax(1)
    lasts = mask.shape[1] - real.flip(1).to(torch.uint8).argmax(1)
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
    """Documents of every row, from boundaries. Raises `BatchError`: several rows, or no rise from 0 to ``length``."""
    if batch_size != 1 or boundaries[0] != 0 or boundaries[-1] != length or list(boundaries) != sorted(boundaries):
        raise BatchError(
            f"cu_seqlens must rise from 0 to the {length} tokens of a batch of one row, got {list(boundaries)[:8]} "
            f"with batch size {batch_size}."
        )
    return [tuple((a, b) for a, b in pairwise(boundaries) if a < b)]


def expect_one_set_of_boundaries(batch: Mapping[str, Any]) -> None:
    """Refuse unlike documents of queries and keys, or ``seq_idx`` alone. Raises `BatchError`."""
    of_queries, of_keys = batch.get(BOUNDARIES), batch.get(_BOUNDARIES_OF_KEYS)
    for name, boundaries in ((BOUNDARIES, of_queries), (_BOUNDARIES_OF_KEYS, of_keys)):
        if not isinstance(boundaries, Tensor | None):
            raise BatchError(f"{name} must be a tensor of boundaries, got {type(boundaries).__name__}.")
    if of_queries is not None and of_keys is not None and of_queries.tolist() != of_keys.tolist():
        raise BatchError(
            f"{_BOUNDARIES_OF_KEYS} must be {BOUNDARIES}, since tokens see those of their own document, got "
            f"{of_keys.tolist()[:8]} and {of_queries.tolist()[:8]}. Keys beside those of the batch, as in generation "
            "with a cache, are for whole batches."
        )
    if batch.get("seq_idx") is not None and of_queries is None and batch.get(POSITIONS) is None:
        raise BatchError(f"seq_idx tells documents to some layers alone; give {BOUNDARIES} or {POSITIONS} beside it.")


def rows_of(documents: Sequence[Documents]) -> tuple[Rows, ...]:
    """Neighbouring batch rows with the same documents together."""
    rows = []
    for same, run in groupby(range(len(documents)), key=lambda row: documents[row]):
        members = list(run)
        rows.append(Rows(members[0], members[-1] + 1, same))
    return tuple(rows)
