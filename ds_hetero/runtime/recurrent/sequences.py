"""Where the state of a recurrent layer starts anew."""

from __future__ import annotations

from ds_hetero.placement import Rows
from ds_hetero.runtime.attention.batch_layout import BatchLayout

__all__ = ["sequences_of"]


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
