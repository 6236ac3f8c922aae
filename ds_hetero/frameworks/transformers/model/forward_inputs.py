"""The arguments of a forward that takes a shard, or that must not.

A shard is never taken for a whole sequence: every call of a transformers model looks for a shard in its arguments.

Shards come from our loader, which marks them and remembers the latest (`note_shard`). A model that was never
switched to our attention would compute on one as if it were a whole sequence, without an error; a switched one does, if
its forward goes another way than through our hooks. Both are refused. Costs a look at the arguments per call of a
`PreTrainedModel`, which is once or twice per forward. A call inside compiled code is not looked at.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.arguments import refusals
from ds_hetero.engine.forward_mode import expecting_sharded_forward
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.frameworks.transformers.model.model_checks import router_loss_problem
from ds_hetero.frameworks.transformers.model.recurrent_layers import KEYWORD
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.data.shard_info import is_part, is_placeholder, shard_info
from ds_hetero.runtime.data.shards import Batch, Entries, forget_shards, is_shard
from ds_hetero.runtime.documents import BOUNDARIES, expect_one_set_of_boundaries


class Called(SplitModel, Protocol):
    """A split model of transformers."""

    @property
    def pretrained(self) -> PretrainedModel:
        """The model that is called."""


def local_batch(kwargs: Entries, dtype: torch.dtype) -> LocalBatch:
    """This rank's part of a batch, from the arguments of a forward; a placeholder holds no token."""
    positions, mask = kwargs["position_ids"], kwargs.get("attention_mask")
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    info = shard_info(positions)
    expect_one_set_of_boundaries(kwargs)
    if is_placeholder(positions):
        tokens, positions = tokens[:, :0], positions[:, :0]
        mask = None if mask is None else mask[:, :0]
    return LocalBatch(
        batch_size=tokens.shape[0],
        tokens=tokens.shape[1],
        dtype=dtype,
        position_ids=positions,
        attention_mask=mask,
        cu_seqlens=kwargs.get(BOUNDARIES),
        placement=None if info is None else info.placement,
    )


def expect_arguments(model: Called, arguments: Batch, *, in_call: bool) -> None:
    """Refuse arguments with which a forward on shards would not compute what one process computes.

    Args:
        arguments: of the forward, by name.
        in_call: whether they are those of a sharded call, which takes whole batches.

    Raises:
        BatchError: names the arguments, their values and the reasons.
    """
    given = {name: value for name, value in arguments.items() if name != KEYWORD and value is not None}
    lines = refusals(given, has_towers=model.cuts_inputs, in_call=in_call)
    if given.get("output_router_logits") and (problem := router_loss_problem(model.pretrained)):
        lines.append(f'"output_router_logits": True: {problem}.')
    if "labels" in given and "position_ids" in given and not in_call:
        if "num_items_in_batch" in given:
            lines.append('"num_items_in_batch": beside labels the loss would be of a part of them; leave labels out.')
        if "shift_labels" not in given and model.moves_labels:
            lines.append('"labels": the model would move those of a shard once more; give it shift_labels instead.')
    if lines:
        raise BatchError(
            f"{type(model.pretrained).__name__} was given what it does not take on parts of sequences:\n"
            + "\n".join(lines)
        )


def expect_whole(model: str, *tensors: Any) -> None:
    """Refuse a shard where ``model``, by its class, takes whole batches."""
    if is_shard(*tensors):
        raise BatchError(
            f"{model} takes whole batches here (in eval(), in handle.unsharded(), or with a cache of keys and values), "
            "and was given a shard from handle.dataloader. Run the forward in `with handle.sharded():`, on every rank, "
            "for the outputs of the shard; or in `with handle.unsharded():` or eval() on whole batches, from the "
            "loader that handle.dataloader wraps."
        )


def expect_shard_shapes(kwargs: Batch) -> None:
    """Refuse arguments that are none of a shard: no ``position_ids``, or a mask that is not [B, s]."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None and is_shard(kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        raise BatchError(
            "the model was given the tokens of a shard without its position_ids. Give it the batch from the loader "
            "as it is, model(**batch). A loop that puts the model's inputs together itself needs whole batches: call "
            "the model by handle.sharded_call."
        )
    if positions is None:
        raise BatchError(
            "a forward on shards needs position_ids, the place of every token in the whole sequence. Take batches from "
            "ds_hetero's loader (handle.dataloader), which makes them; for whole batches, see handle.unsharded()."
        )
    if positions.dim() != 2:
        raise BatchError(f"position_ids must be [B, s], got shape {tuple(positions.shape)}.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask must be a padding mask [B, s], got {kind}. "
            "Mark packed documents by position_ids that restart."
        )


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
