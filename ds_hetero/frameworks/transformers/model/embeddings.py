"""Models that count positions in a way of their own where a batch has none: RoBERTa and its kin, ESM, OPT.

RoBERTa numbers the tokens that are no padding from ``padding_idx + 1`` on, OPT those that its mask leaves from 0 on.
Each needs the whole sequence, so positions are made by the model's own functions before a batch is cut, and travel as
if the batch had had them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.shards import Batch

_BY_PADDING = "create_position_ids_from_input_ids"  # of an embedding, or of its file


def position_counter(decoder: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Maker of ``position_ids`` [B, L] of a whole batch as ``decoder`` does; None if these are 0 .. L - 1."""
    embeddings, learned = getattr(decoder, "embeddings", None), getattr(decoder, "embed_positions", None)
    if isinstance(embeddings, nn.Module) and hasattr(embeddings, "position_embeddings"):
        file = sys.modules[type(embeddings).__module__]
        count = getattr(embeddings, _BY_PADDING, None) or getattr(file, _BY_PADDING, None)
        return None if count is None else lambda batch: _by_padding(embeddings, count, batch)
    if learned is not None and next(iter(inspect.signature(learned.forward).parameters), None) == "attention_mask":
        return _by_mask
    return None


def with_positions(count: Callable[[Batch], Tensor] | None, batch: Any) -> Any:
    """The batch with ``position_ids`` if the model makes its own. Raises `BatchError`: padding without a mask."""
    tokens = batch.get("input_ids", batch.get("inputs_embeds")) if isinstance(batch, Mapping) else None
    if count is None or batch.get("position_ids") is not None or not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return batch
    positions = count(batch)
    if batch.get("attention_mask") is None and bool(positions.diff().ne(1).any()):
        raise BatchError(
            "input_ids hold padding tokens, from which the model counts its positions, and there is no attention_mask "
            "that tells of them. Give the model its attention_mask, or position_ids."
        )
    return {**batch, "position_ids": positions}


def _by_padding(embeddings: Any, count: Callable[..., Tensor], batch: Batch) -> Tensor:
    padding = embeddings.padding_idx
    if batch.get("input_ids") is not None:
        return count(batch["input_ids"], padding)
    rows, length = batch["inputs_embeds"].shape[:2]
    return torch.arange(padding + 1, length + padding + 1).expand(rows, -1)


def _by_mask(batch: Batch) -> Tensor:
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    mask = batch.get("attention_mask")
    real = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device) if mask is None else mask.long()
    return (real.cumsum(1) - 1).clamp(min=0)  # of padding any, as its attention is another's here in any case
