"""The documents of a batch row, from what frameworks say of them: positions, a padding mask, or boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from ds_hetero.errors import BatchError
from ds_hetero.placement import Rows

__all__ = ["Documents", "documents_from_cu_seqlens", "documents_from_mask", "documents_from_positions", "rows_of"]

Documents = tuple[tuple[int, int], ...]


def documents_from_positions(positions: Sequence[int]) -> Documents:
    """Documents of one batch row, which begin wherever its position ids do not go on by one."""
    starts = [p for p in range(len(positions)) if p == 0 or positions[p] != positions[p - 1] + 1]
    return tuple(zip(starts, [*starts[1:], len(positions)], strict=True))


def documents_from_mask(row: int, mask: Sequence[int]) -> Documents:
    """The one document of batch row ``row``, or none: what its padding mask leaves.

    Raises:
        BatchError: zeros between real tokens.
    """
    runs = [(real, len(list(run))) for real, run in groupby(mask)]
    if sum(1 for real, _ in runs if real) > 1:
        raise BatchError(
            f"attention_mask of batch row {row} has zeros between real tokens; only padding at the left or the right "
            "can be honoured. Pack documents with restarting position_ids instead."
        )
    at, documents = 0, []
    for real, count in runs:
        if real:
            documents.append((at, at + count))
        at += count
    return tuple(documents)


def documents_from_cu_seqlens(boundaries: Sequence[int], length: int, batch_size: int) -> list[Documents]:
    """Documents of every batch row from their boundaries.

    Raises:
        BatchError: more rows than one, or boundaries that do not rise from 0 to ``length``.
    """
    if batch_size != 1 or boundaries[0] != 0 or boundaries[-1] != length or list(boundaries) != sorted(boundaries):
        raise BatchError(
            f"cu_seqlens must rise from 0 to the {length} tokens of a batch of one row, got {list(boundaries)[:8]} "
            f"with batch size {batch_size}."
        )
    return [tuple((a, b) for a, b in pairwise(boundaries) if a < b)]


def rows_of(documents: Sequence[Documents]) -> tuple[Rows, ...]:
    """Neighbouring batch rows with the same documents together."""
    rows = []
    for same, run in groupby(range(len(documents)), key=lambda row: documents[row]):
        members = list(run)
        rows.append(Rows(members[0], members[-1] + 1, same))
    return tuple(rows)
