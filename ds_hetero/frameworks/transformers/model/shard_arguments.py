"""Read the arguments of a forward on a shard as this rank's part of a batch, and refuse wrong arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.engine.arguments import refusals
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.model.model_checks import router_loss_problem
from ds_hetero.frameworks.transformers.model.recurrent_layers import KEYWORD
from ds_hetero.frameworks.transformers.model.sharded_call import SplitTransformer
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.data.recent_shards import is_shard
from ds_hetero.runtime.data.shard_info import is_placeholder, shard_info
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.documents import BOUNDARIES, expect_one_set_of_boundaries
from ds_hetero.runtime.model_switches import autocast_dtype, checksum_of_trained


def local_batch(kwargs: Entries, dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> LocalBatch:
    """Return this rank's part of a batch, from the arguments of a forward.

    A rank without tokens, which runs one dummy token, has a part with 0 tokens.

    Args:
        dtype: in which attention is computed.
        parameters: all parameters of the model, trained and frozen.
    """
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
        autocast=autocast_dtype(positions.device.type),
        trained=checksum_of_trained(parameters),
    )


def expect_arguments(model: SplitTransformer, arguments: Batch, *, in_call: bool) -> None:
    """Refuse arguments with which a forward on shards would compute other results than one process.

    Args:
        in_call: True for a sharded call, which takes whole batches.

    Raises:
        BatchError: with a line for each refused argument.
    """
    present = {name: value for name, value in arguments.items() if name != KEYWORD and value is not None}
    if not model.is_split and not is_shard(*present.values()):
        return  # the forward runs on the whole batch, see `ShardedModel`
    lines = refusals(present, has_towers=model.cuts_inputs, in_call=in_call, is_split=model.is_split)
    if present.get("output_router_logits") and (problem := router_loss_problem(model.pretrained)):
        lines.append(f'"output_router_logits": True: {problem}.')
    if "labels" in present and "position_ids" in present and not in_call:
        if "num_items_in_batch" in present:
            lines.append('"num_items_in_batch": with labels, the loss is that of the shard alone; leave labels out.')
        if "shift_labels" not in present and model.model_loss.moves_labels:
            lines.append('"labels": the model would shift the labels of a shard again; give it shift_labels instead.')
    if lines:
        raise BatchError(
            f"{type(model.pretrained).__name__} was given what it does not take on parts of sequences:\n"
            + "\n".join(lines)
        )


def expect_no_shard(model: str, *tensors: Any) -> None:
    """Refuse a shard in a forward that takes whole batches. ``model``: name of the class. Raises `BatchError`."""
    if is_shard(*tensors):
        raise BatchError(
            f"{model} takes whole batches here (in eval(), in handle.unsharded(), or with a cache of keys and values), "
            "and was given a shard from handle.dataloader. Run the forward in `with handle.sharded():`, on every rank, "
            "for the outputs of the shard; or in `with handle.unsharded():` or eval() on whole batches, from the "
            "loader that handle.dataloader wraps."
        )


WHOLE_BATCHES = (
    "Give such a module whole batches, from the loader that handle.dataloader wraps, by handle.sharded_call(engine, "
    '**batch), which cuts what the language model inside is given; or train it with "sequence_parallel_size": 1.'
)


def has_module_around(model: SplitTransformer) -> bool:
    """Return True if the script trains a module of its own around the transformers model; PEFT's do not count."""
    pretrained: object = model.pretrained
    return model.model is not pretrained and not hasattr(model.model, "peft_config")


def expect_arguments_of_shards(model: SplitTransformer) -> None:
    """Refuse a script's module around a model whose forward takes no ``position_ids`` or no ``shift_labels``.

    Raises:
        BatchError: with the missing parameters.
    """
    outer = model.model
    parameters = inspect.signature(outer.forward).parameters.values()
    if not has_module_around(model) or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = {parameter.name for parameter in parameters}
    if missing := [name for name in ("position_ids", "shift_labels") if name not in names]:
        raise BatchError(
            f"{type(outer).__name__}.forward takes no {' and no '.join(missing)}, which batches of handle.dataloader "
            f"have, and which {type(model.pretrained).__name__} inside needs of a shard. Let it take **kwargs and pass "
            "them on. A module that puts tokens of its own, such as features, before those of a batch cannot take "
            f"shards. {WHOLE_BATCHES}"
        )


def expect_shard_shapes(kwargs: Batch) -> None:
    """Refuse arguments of the decoder that are not those of a shard. Raises `BatchError` with what to change.

    A shard has ``position_ids`` [B, s], as many embeddings, and a mask [B, s] or none.
    """
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
        raise BatchError(
            f"position_ids must be [B, s], as they come from handle.dataloader, got shape {tuple(positions.shape)}."
        )
    embeddings = kwargs.get("inputs_embeds")
    if isinstance(embeddings, Tensor) and embeddings.shape[1] != positions.shape[1]:
        raise BatchError(
            f"the decoder was given embeddings of {embeddings.shape[1]} tokens and position_ids of "
            f"{positions.shape[1]}: something puts tokens of its own, such as features or prompts, among those of a "
            f"shard, whose places in the sequence are then not those of the batch. {WHOLE_BATCHES}"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask must be a padding mask [B, s], got {kind}. "
            "Mark packed documents by position_ids that restart."
        )
