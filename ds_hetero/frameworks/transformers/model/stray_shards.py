"""Refuse calls of transformers models that would take a shard for a whole sequence.

    model                                                  arguments    action
    not switched to this engine's attention                a shard      refuse: it would treat it as a whole sequence
    switched                                               a shard      refuse if the forward bypasses the hooks
    any                                                    no shard     call the model

The loader marks shards and remembers the latest ones (`remember_shard`). The arguments of each call of a
`PreTrainedModel` are checked, once or twice per forward. Calls inside compiled code are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_hetero.engine.forward_mode import expecting_sharded_forward
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.runtime.data.recent_shards import clear_recent_shards, is_shard
from ds_hetero.runtime.data.shard_info import is_part


def install(patches: Patches) -> None:
    """Check the arguments of every call of a `PreTrainedModel`."""
    patches.add(PreTrainedModel, "__call__", _checked_call)
    patches.on_undo(clear_recent_shards)


def _checked_call(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
    """Replace ``PreTrainedModel.__call__``. Raises `BatchError`: a model that is not split was given a shard."""
    if torch.compiler.is_compiling():
        return nn.Module.__call__(model, *args, **kwargs)
    arguments = (*args, *kwargs.values())
    if model.config._attn_implementation == NAME:
        if not any(isinstance(argument, Tensor) and is_part(argument) for argument in arguments):
            return nn.Module.__call__(model, *args, **kwargs)
        with expecting_sharded_forward(type(model).__name__):
            return nn.Module.__call__(model, *args, **kwargs)
    if is_shard(*arguments):
        raise BatchError(
            f"this {type(model).__name__} is not trained by ds_hetero, but got a batch of handle.dataloader, of which "
            "this rank has only a shard. Give it whole batches, from the loader that handle.dataloader wraps: a "
            "reference model runs on those, on every rank."
        )
    return nn.Module.__call__(model, *args, **kwargs)
