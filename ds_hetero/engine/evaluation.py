"""Batches of an evaluation over shards, which are whole and the same on all ranks of a replica.

A sequence that has fewer tokens than there are ranks to hold them cannot be split, and costs nothing: every rank of the
replica runs it whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hetero.engine.adapters import SplitModel


def cannot_be_split(model: SplitModel, batch: Any) -> bool:
    """Whether the sequences of a batch have fewer tokens than the replica has ranks that hold some."""
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return False
    groups = model.replica.schedule.groups
    return tokens.shape[1] < sum(1 for group in groups for weight in group.tokens if weight)


def check_evaluated(model: SplitModel, batch: Any) -> None:
    """Check a model with a whole batch, if that can show what none before it could. Raises `ModelError`.

    A batch without labels is checked with its tokens, each the label of the one before it.

    Caller: every rank of the world, before the forward.
    """
    if model.pools or "input_ids" not in batch or cannot_be_split(model, batch):
        return
    with torch.inference_mode(False):  # the check computes gradients, of copies where the loop computes none
        piece = {name: entry.clone() if _is_inference(entry) else entry for name, entry in batch.items()}
        if piece.get("labels") is None:
            piece["labels"] = piece["input_ids"]
        model.checks.check_same_batch(piece)


def _is_inference(entry: object) -> bool:
    return isinstance(entry, Tensor) and entry.is_inference()
