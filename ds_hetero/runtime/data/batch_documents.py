"""The documents of a whole batch, for placements that go by documents; padded rows become one row of real tokens."""

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


def with_documents(batch: WholeBatch) -> WholeBatch:
    """The same batch with its documents, of one row where it can be.

    Several rows, or one with padding, become one row of the real tokens, so that padding is not computed, if every
    entry has one value per token and no label counts at the padding. A label at the last token of a row stays there.

    Raises:
        BatchError: boundaries or a mask that name no documents.
    """
    source, documents = _documents(batch)
    if flat := _flattened(batch, documents):
        batch, documents = flat
        source = POSITIONS
    runs = position_runs(batch.sequences["position_ids"])
    return replace(batch, rows=rows_of(documents), documents_from=source, position_runs=runs)


def _documents(batch: WholeBatch) -> tuple[str, Sequence[Documents]]:
    """Where the documents of the batch are read from, and those of every row."""
    boundaries, mask = batch.constants.get(BOUNDARIES), batch.sequences.get(MASK)
    if boundaries is not None:
        return BOUNDARIES, documents_from_cu_seqlens(boundaries.tolist(), batch.length, batch.batch_size)
    if mask is not None:
        return MASK, documents_from_mask(mask)
    return POSITIONS, documents_from_positions(batch.sequences[POSITIONS])


def _flattened(batch: WholeBatch, documents: Sequence[Documents]) -> tuple[WholeBatch, Sequence[Documents]] | None:
    """The real tokens of all rows in one row, with their documents; None if the batch is one already or has to stay."""
    mask = batch.sequences.get(MASK)
    real = torch.ones(batch.batch_size, batch.length, dtype=torch.bool) if mask is None else mask.ne(0).cpu()
    is_flat = batch.batch_size == 1 and bool(real.all())
    if is_flat or batch.constants or any(entry is not None for entry in batch.objects.values()) or not real.any():
        return None
    labels = [batch.sequences[name] for name in ("labels", "shift_labels") if name in batch.sequences]
    if any(bool((entry.cpu().ne(IGNORE_INDEX) & ~real).any()) for entry in labels):
        return None
    sequences = {name: _real_tokens(entry, real) for name, entry in batch.sequences.items() if name != MASK}
    places = (real.flatten().cumsum(0) - 1).view_as(real)
    flat = tuple(
        (start, start + stop - first)
        for row, of_row in enumerate(documents)
        for first, stop in of_row
        for start in (int(places[row, first]),)
    )
    length = int(real.sum())
    return replace(batch, batch_size=1, length=length, sequences=sequences), [flat]


def _real_tokens(entry: Tensor, real: Tensor) -> Tensor:
    """[B, L, ...] -> [1, T, ...], the tokens where ``real`` [B, L] holds."""
    return entry[real.to(entry.device)].unsqueeze(0)
