"""Position ids of models that do not count 0 .. L - 1 by default: RoBERTa and its relatives, ESM, OPT.

    batch          tokens 5 6 1 1 (1 is padding)    mask 1 1 0 0
    RoBERTa, ESM   2 3 1 1                          tokens that are not padding count from padding_idx + 1
    OPT            0 1 1 1                          cumulative sum of the mask, minus 1

Both need the whole sequence. So the model's own function makes the positions before a batch is sharded, and they are
part of the batch from then on.
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

_BY_PADDING = "create_position_ids_from_input_ids"  # transformers' function: of the embedding, or of its module


def position_counter(decoder: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Return the function that makes ``position_ids`` [B, L] of a whole batch as ``decoder`` does.

    None if the decoder counts 0 .. L - 1.
    """
    embeddings = getattr(decoder, "embeddings", None)
    if isinstance(embeddings, nn.Module) and hasattr(embeddings, "position_embeddings"):
        module = sys.modules[type(embeddings).__module__]
        count = getattr(embeddings, _BY_PADDING, None) or getattr(module, _BY_PADDING, None)
        if count is None:
            return None
        return lambda batch: _by_padding(embeddings, count, batch)
    learned = getattr(decoder, "embed_positions", None)
    if learned is None:
        return None
    first_parameter = next(iter(inspect.signature(learned.forward).parameters), None)
    return _by_mask if first_parameter == "attention_mask" else None  # OPTLearnedPositionalEmbedding


def with_positions(count: Callable[[Batch], Tensor] | None, batch: Any) -> Any:
    """Add ``position_ids`` to a batch if the model makes its own. Raises `BatchError`: padding without a mask."""
    if count is None or not isinstance(batch, Mapping) or batch.get("position_ids") is not None:
        return batch
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return batch
    positions = count(batch)
    if batch.get("attention_mask") is None and bool(positions.diff().ne(1).any()):
        raise BatchError(
            "input_ids hold padding tokens, which the model leaves out when it counts positions, but there is no "
            "attention_mask. Give the model its attention_mask, or position_ids."
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
    # OPT gives padding -1; here it gets 0, which is allowed because this engine computes no attention for padding.
    return (real.cumsum(1) - 1).clamp(min=0)
