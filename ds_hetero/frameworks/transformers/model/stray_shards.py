"""A shard is never taken for a whole sequence: every call of a transformers model looks for one in its arguments.

Shards come from our loader, which marks them and remembers the latest (`note_shard`). A model that was never
switched to our attention would compute on one as if it were a whole sequence, without an error; a switched one does, if
its forward goes another way than through our hooks. Both are refused. Costs a look at the arguments per call of a
`PreTrainedModel`, which is once or twice per forward. A call inside compiled code is not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_hetero.engine.forward_mode import expecting_sharded_forward
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.runtime.data.shard_info import is_part
from ds_hetero.runtime.data.shards import forget_shards, is_shard


def install(patches: Patches) -> None:
    """Let every call of a `PreTrainedModel` look for shards."""
    patches.add(PreTrainedModel, "__call__", _call)
    patches.on_undo(forget_shards)


def _call(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
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
            f"this {type(model).__name__} is not trained by ds_hetero, and was given a batch of handle.dataloader, of "
            "which this rank holds a part only. Give it whole batches, from the loader that handle.dataloader wraps: a "
            "reference model runs on those, on every rank."
        )
    return nn.Module.__call__(model, *args, **kwargs)
