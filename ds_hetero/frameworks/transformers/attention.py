"""An attention and a mask function of our own, registered with transformers.

transformers calls the mask function once per forward and passes its result to every layer, unread. While a sharded
forward runs, ours returns a `ShardedMask`: the layout of the batch and the replica. So every layer knows what to do,
also when activation checkpointing runs it again in the backward, where nothing else of the forward is left. At any
other time (evaluation, generate) both functions pass the call on to the implementation that the model had before.

Nothing that transformers registers is overwritten, and other models in the process are not touched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hetero.engine.forward_mode import ShardedForward, forward_mode
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.autocast import cast_alike
from ds_hetero.frameworks.transformers.former_attention import former_implementation, naming_former, owner_of
from ds_hetero.frameworks.transformers.mask_kind import MaskKind, mask_kind
from ds_hetero.frameworks.transformers.protocols import AttentionLayer, ModelConfig
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.data.shards import Batch

NAME = "ds_hetero"  # of our attention implementation


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """Stands in place of a layer's mask during a sharded forward; it can pass it on, and nothing else."""

    forward: ShardedForward
    kind: MaskKind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _MaskReadError(_MASK_READ.format(f"its {name!r}"))

    def __getitem__(self, index: Any) -> Any:
        raise _MaskReadError(_MASK_READ.format("a part of it"))


class _MaskReadError(ModelError, AttributeError):
    """An error by name, and "no" for whoever asks whether a mask has an attribute."""


_MASK_READ = (
    "a layer of the model reads its attention mask ({}) to build another, but during a forward on a shard it holds no "
    "numbers: no rank sees the whole sequence. This model cannot be split over the sequence."
)


_select = functools.lru_cache(select)


def install(patches: Patches) -> None:
    """Register the two functions with transformers."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    patches.on_undo(lambda: AttentionInterface._global_mapping.pop(NAME))
    patches.on_undo(lambda: AttentionMaskInterface._global_mapping.pop(NAME))


def keep_attention_function(name: str) -> Callable[[], None]:
    """Remember the attention function that is registered under ``name``; return what puts it back."""
    registered = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = registered.get(name)

    def restore() -> None:
        registered.pop(name, None)
        if before is not None:
            registered[name] = before

    return restore


def expect_whole_batch(config: ModelConfig | None = None) -> None:
    """Outside of a sharded forward: refuse a shard that our hooks did not see, and layers that are called directly.

    What recomputes layers in a backward was a forward before, of which the mask tells which.
    """
    mode = forward_mode()
    if mode.is_compared:
        return
    if mode.given_shard is not None:
        raise ModelError(
            f"{mode.given_shard} was given a shard, but runs its attention past the module whose forwards ds_hetero "
            "splits, so that each rank would attend to its own tokens only. This model cannot be split over the "
            'sequence: train it with "sequence_parallel_size": 1.'
        )
    owner = None if config is None else owner_of(config)
    recomputes = torch._C._current_graph_task_id() != -1
    if owner is not None and owner.takes_shards and not mode.is_whole and not recomputes:
        raise ModelError(
            "attention runs outside of the forwards that ds_hetero splits, so that each rank would attend to its own "
            "tokens only. Call the model itself, model(**batch), and not layers inside it; for whole sequences call it "
            "in eval() or in `with handle.unsharded():`."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask(
    *args: object,
    config: ModelConfig,
    mask_function: FunctionType = masking_utils.causal_mask_function,
    **kwargs: object,
) -> Any:
    forward = forward_mode().forward
    if forward is not None:
        return ShardedMask(forward, mask_kind(mask_function))
    expect_whole_batch()
    former = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[former_implementation(config)]
    with naming_former(config):
        return former(*args, mask_function=mask_function, config=config, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    if isinstance(attention_mask, ShardedMask):
        options = _LayerOptions.read(args, kwargs)
        return _sharded_attention(type(module).__name__, (query, key, value), attention_mask, options), None
    if forward_mode().forward is not None:
        raise ModelError(
            f"{type(module).__name__} gives attention a mask of its own ({type(attention_mask).__name__}) in place of "
            "the one that transformers made, so ds_hetero cannot split it over the sequence. Train the model with "
            '"sequence_parallel_size": 1.'
        )
    config = module.config
    expect_whole_batch(config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    with naming_former(config):
        former = ALL_ATTENTION_FUNCTIONS.get_interface(former_implementation(config), eager)
        result: tuple[Tensor, Tensor | None] = former(module, query, key, value, attention_mask, *args, **kwargs)
        return result


@dataclass(frozen=True)
class _LayerOptions:
    """Options that layers pass to an attention function behind the mask, in the order of ``sdpa_attention_forward``."""

    dropout: float = 0.0
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    output_attentions: bool | None = None

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: Batch) -> _LayerOptions:
        names = {field.name for field in fields(cls)}
        return cls(*args, **{name: value for name, value in kwargs.items() if name in names})


def _sharded_attention(
    layer: str, qkv: tuple[Tensor, Tensor, Tensor], mask: ShardedMask, options: _LayerOptions
) -> Tensor:
    """Of query [B, H, s, D], key [B, G, s, D] and value [B, G, s, Dv], Dv <= D: [B, s, H, Dv]."""
    query, key, value = cast_alike(*qkv)
    forward, head_dim, value_dim = mask.forward, query.shape[-1], value.shape[-1]
    schedule = forward.replica.schedule
    heads, expected = (query.shape[1], key.shape[1]), (schedule.num_heads, schedule.num_kv_heads)
    if heads != expected:
        raise ModelError(
            f"{layer} computes attention with {heads[0]} heads over {heads[1]} key/value heads, where the model's "
            f"config says {expected[0]} over {expected[1]}, which the schedule cuts. This model cannot be split over "
            'the sequence: train it with "sequence_parallel_size": 1.'
        )
    if problem := _problem(options, mask, head_dim, value_dim):
        raise ModelError(
            f"{layer} asks for {problem}, which cannot be split over the sequence. Call the model without it, or train "
            'it with "sequence_parallel_size": 1.'
        )
    if value_dim < head_dim:
        value = nn.functional.pad(value, (0, head_dim - value_dim))
    if forward.is_placeholder:
        query, key, value = query[:, :, :0], key[:, :, :0], value[:, :, :0]
    spec = AttentionSpec(
        kernel=_select(query.device, query.dtype, head_dim, options.softcap, forward.kernel),
        causal=mask.kind.causal,
        window=mask.kind.window,
        scale=options.scaling,
        softcap=options.softcap,
        sinks=options.s_aux,
    )
    with torch.autocast(query.device.type, enabled=False):  # partial results are merged in fp32
        out = attention(query, key, value, forward.replica, forward.batch, spec, forward.clock)
    if forward.is_placeholder:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[..., :value_dim]


def _problem(options: _LayerOptions, mask: ShardedMask, head_dim: int, value_dim: int) -> str | None:
    """The option that a layer asks for and cannot have, or None."""
    if options.dropout:
        return f"dropout={options.dropout} inside attention; set the model's attention dropout to 0"
    if options.position_bias is not None:
        return "a position_bias"
    if options.output_attentions:
        return "output_attentions=True; attention weights are never held"
    if options.sliding_window is not None and options.sliding_window != mask.kind.window:
        return f"sliding_window={options.sliding_window} with a mask whose window is {mask.kind.window}"
    if value_dim > head_dim:
        return f"value heads of {value_dim}, query heads of {head_dim}"
    return None
