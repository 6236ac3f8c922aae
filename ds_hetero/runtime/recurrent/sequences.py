"""Sequences of a batch, at whose starts the state of a recurrent layer starts anew, and their pieces on a rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.placement import Range, Rows


def sequences_of(batch: BatchLayout) -> tuple[Rows, ...]:
    """Return the batch's rows with the intervals through each of which one state runs, together in order.

    A packed row has a state for each document, as the kernels of flash-linear-attention and mamba-ssm have it. Padding
    is no document: a padded row is one sequence, padding included, as it is on one process, where the layers set the
    inputs of padding to zero and run through it.
    """
    whole = ((0, batch.placement.length),)
    return tuple(
        rows if len(rows.documents) > 1 else Rows(rows.start, rows.stop, whole) for rows in batch.placement.rows
    )


def pieces_of(intervals: Sequence[Range], documents: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """(start of the document, start, stop) of every part of an interval in one document, in the order of tokens."""
    starts = [start for start, _ in documents]
    for low, high in intervals:
        at = max(bisect_right(starts, low) - 1, 0)
        while at < len(documents) and documents[at][0] < high:
            first, last = documents[at]
            if max(first, low) < min(last, high):
                yield first, max(first, low), min(last, high)
            at += 1
