"""Find the sequences of a batch through which a recurrent state runs, and the pieces of them on a rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.placement import Range, Rows


def sequences_of(batch: BatchLayout) -> tuple[Rows, ...]:
    """Return the rows of the batch with their sequences: at the start of each, the state begins anew.

    In a packed row each document is a sequence, as for the kernels of flash-linear-attention and mamba-ssm. Any other
    row is one sequence, padding included, as in one process: the layers set the inputs of padding to zero.
    """
    sequences = []
    for rows in batch.placement.rows:
        is_packed = len(rows.documents) > 1
        documents = rows.documents if is_packed else ((0, batch.placement.length),)
        sequences.append(Rows(rows.start, rows.stop, documents))
    return tuple(sequences)


def pieces_of(intervals: Sequence[Range], documents: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Cut intervals at the starts of documents; yield (start of the document, start, stop) of each piece, in order.

    Example: the interval [4, 10) and the documents [0, 6) and [6, 12) make (0, 4, 6) and (6, 6, 10).
    """
    starts = [start for start, _ in documents]
    for low, high in intervals:
        number = max(bisect_right(starts, low) - 1, 0)
        while number < len(documents) and documents[number][0] < high:
            first, last = documents[number]
            start, stop = max(first, low), min(last, high)
            if start < stop:
                yield first, start, stop
            number += 1
