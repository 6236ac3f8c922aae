"""Compute the position ids of models whose positions are not 0 .. L - 1: RoBERTa and its relatives, ESM, OPT.

    batch          tokens 5 6 1 1 (1 is padding)    mask 1 1 0 0
    RoBERTa, ESM   2 3 1 1                          tokens that are not padding count from padding_idx + 1
    OPT            0 1 1 1                          cumulative sum of the mask, minus 1

Both rules need the whole sequence. So the model's own function computes the positions before a batch is sharded, and
they are an entry of the batch from then on.
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

# Name of transformers' function, which is a method of the embedding or a function of its modelling file.
_CREATE_POSITIONS = "create_position_ids_from_input_ids"


def position_counter(decoder: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Return the function by which ``decoder`` computes ``position_ids`` [B, L] from a whole batch.

    None if its positions are 0 .. L - 1.
    """
    embeddings = getattr(decoder, "embeddings", None)
    if isinstance(embeddings, nn.Module) and hasattr(embeddings, "position_embeddings"):
        module = sys.modules[type(embeddings).__module__]
        create_positions = getattr(embeddings, _CREATE_POSITIONS, None) or getattr(module, _CREATE_POSITIONS, None)
        if create_positions is None:
            return None
        return lambda batch: _positions_by_padding(embeddings, create_positions, batch)
    learned = getattr(decoder, "embed_positions", None)
    if learned is None:
        return None
    first_parameter = next(iter(inspect.signature(learned.forward).parameters), None)
    return _positions_by_mask if first_parameter == "attention_mask" else None  # OPTLearnedPositionalEmbedding


def with_positions(count: Callable[[Batch], Tensor] | None, batch: Any) -> Any:
    """Return the batch with ``position_ids``, if it has none and the model counts positions by its own rule.

    Args:
        count: of `position_counter`.

    Raises:
        BatchError: the batch has padding tokens, but no mask.
    """
    if count is None or not isinstance(batch, Mapping) or batch.get("position_ids") is not None:
        return batch
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return batch
    positions = count(batch)
    if batch.get("attention_mask") is None and bool(positions.diff().ne(1).any()):
        raise BatchError(
            "input_ids contain padding tokens, which the model leaves out when it counts positions, but the batch has "
            "no attention_mask. Give the model an attention_mask, or position_ids."
        )
    return {**batch, "position_ids": positions}


def _positions_by_padding(embeddings: Any, create_positions: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return RoBERTa's positions: from padding_idx + 1 for tokens, padding_idx for padding."""
    padding = embeddings.padding_idx
    if batch.get("input_ids") is not None:
        return create_positions(batch["input_ids"], padding)
    rows, length = batch["inputs_embeds"].shape[:2]
    return torch.arange(padding + 1, length + padding + 1).expand(rows, -1)


def _positions_by_mask(batch: Batch) -> Tensor:
    """Return OPT's positions: the cumulative sum of the mask, minus 1, but at least 0."""
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    mask = batch.get("attention_mask")
    is_real = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device) if mask is None else mask.long()
    # OPT gives padding -1; here it gets 0, which is allowed because this engine computes no attention for padding.
    return (is_real.cumsum(1) - 1).clamp(min=0)
