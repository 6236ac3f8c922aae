"""Handle the batches of an evaluation over shards, which are whole and the same on all ranks of a replica.

A sequence with fewer tokens than the replica has ranks cannot be split. It is so short that every rank of the replica
runs it whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hetero.engine.trained.split_model import SplitModel


def cannot_be_split(model: SplitModel, batch: Any) -> bool:
    """Return whether a batch has fewer tokens per sequence than the replica has ranks with tokens."""
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return False
    num_ranks_with_tokens = 0
    for group in model.replica.schedule.groups:
        num_ranks_with_tokens += sum(1 for weight in group.tokens if weight)
    return tokens.shape[1] < num_ranks_with_tokens


def check_evaluated(model: SplitModel, batch: Any) -> None:
    """Compare a model with one process on a batch, if the batch has features that no checked batch had.

    If the batch has no labels, each token is the label of the one before it.

    Caller: every rank of the world, before the forward.

    Raises:
        ModelError: results differ.
    """
    if model.pools or "input_ids" not in batch or cannot_be_split(model, batch):
        return
    with torch.inference_mode(False):  # the check computes gradients, so that it needs copies of inference tensors
        piece = {name: entry.clone() if _is_inference(entry) else entry for name, entry in batch.items()}
        if piece.get("labels") is None:
            piece["labels"] = piece["input_ids"]
        model.checks.check_same_batch(piece)


def _is_inference(entry: object) -> bool:
    """Return whether an entry is a tensor that was made in inference mode, and so takes no part in autograd."""
    return isinstance(entry, Tensor) and entry.is_inference()
