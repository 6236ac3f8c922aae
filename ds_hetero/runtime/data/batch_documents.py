"""Find the documents of a whole batch, for placements by documents; join padded rows to one row of real tokens.

Dimension key: B batch, L tokens of a row, T real tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_hetero.runtime.data.shards import IGNORE_INDEX, WholeBatch
from ds_hetero.runtime.documents import (
    BOUNDARIES,
    MASK,
    POSITIONS,
    Documents,
    documents_from_cu_seqlens,
    documents_from_mask,
    documents_from_positions,
    position_runs,
    rows_of,
)


def with_documents(batch: WholeBatch, *, joins_rows: bool = True) -> WholeBatch:
    """Return the batch with its documents, in one row where possible.

    Several rows, or one with padding, become one row of the real tokens, so that padding is not computed, if every
    entry has one value per token and no label counts at the padding. A label at the last token of a row stays there.

    Args:
        joins_rows: False leaves rows and padding as they are.

    Raises:
        BatchError: no entry shows where documents begin, or entries contradict each other.
    """
    source, documents = _documents(batch)
    if joins_rows and (joined := _joined_rows(batch, documents)):
        batch, documents = joined
        source = POSITIONS
    runs = position_runs(batch.sequences["position_ids"])
    return replace(batch, rows=rows_of(documents), documents_from=source, position_runs=runs)


def _documents(batch: WholeBatch) -> tuple[str, Sequence[Documents]]:
    """Return the name of the entry that shows the batch's documents, and the documents of every row."""
    boundaries, mask = batch.constants.get(BOUNDARIES), batch.sequences.get(MASK)
    if boundaries is not None:
        return BOUNDARIES, documents_from_cu_seqlens(boundaries.tolist(), batch.length, batch.batch_size)
    if mask is not None:
        return MASK, documents_from_mask(mask)
    return POSITIONS, documents_from_positions(batch.sequences[POSITIONS])


def _joined_rows(batch: WholeBatch, documents: Sequence[Documents]) -> tuple[WholeBatch, Sequence[Documents]] | None:
    """Return the real tokens of all rows in one row, with their documents; None if the batch has to stay as it is.

    Example: rows of 3 and 2 real tokens, padded to 4, become one row of 5 tokens; the second row's document (0, 2)
    becomes (3, 5).
    """
    mask = batch.sequences.get(MASK)
    is_real = torch.ones(batch.batch_size, batch.length, dtype=torch.bool) if mask is None else mask.ne(0).cpu()
    is_flat = batch.batch_size == 1 and bool(is_real.all())
    if is_flat or batch.constants or any(entry is not None for entry in batch.objects.values()) or not is_real.any():
        return None
    labels = [batch.sequences[name] for name in ("labels", "shift_labels") if name in batch.sequences]
    if any(bool((entry.cpu().ne(IGNORE_INDEX) & ~is_real).any()) for entry in labels):
        return None
    sequences = {name: _real_tokens(entry, is_real) for name, entry in batch.sequences.items() if name != MASK}
    index_in_row = (is_real.flatten().cumsum(0) - 1).view_as(is_real)  # of each real token in the joined row
    joined_documents = []
    for row, documents_of_row in enumerate(documents):
        for start, stop in documents_of_row:
            new_start = int(index_in_row[row, start])
            joined_documents.append((new_start, new_start + stop - start))
    length = int(is_real.sum())
    return replace(batch, batch_size=1, length=length, sequences=sequences), [tuple(joined_documents)]


def _real_tokens(entry: Tensor, is_real: Tensor) -> Tensor:
    """Return the tokens of ``entry`` [B, L, ...] for which ``is_real`` [B, L] is True, as one row [1, T, ...]."""
    return entry[is_real.to(entry.device)].unsqueeze(0)
