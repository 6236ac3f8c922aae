"""This engine's attention function and mask function, registered with transformers under the name ``ds_hetero``.

transformers calls the mask function once per forward, and passes its result to every layer without reading it:

    during a sharded forward      `_make_mask` returns a `ShardedMask`, which has the batch layout and the replica. A
                                  layer passes it to `_run_attention`, which attends over the whole sequence.
    in the backward               checkpointing runs a layer again with the same `ShardedMask`, from which
                                  `_run_attention` knows the forward that it repeats
    evaluation, generate          both functions call the attention implementation that the model had before

No function of transformers is overwritten, and other models in the process are not affected.

Dimension key: B rows, s tokens of this rank, H query heads, G key/value heads, D head size, Dv head size of values.
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
from ds_hetero.frameworks.transformers.former_attention import (
    former_implementation,
    owner_of,
    using_former,
)
from ds_hetero.frameworks.transformers.mask_kind import MaskKind, mask_kind
from ds_hetero.frameworks.transformers.protocols import AttentionLayer, ModelConfig
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.data.shards import Batch

NAME = "ds_hetero"  # under which this engine's attention is registered with transformers


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """Replaces the attention mask during a sharded forward. A layer can do nothing but pass it to its attention."""

    forward: ShardedForward
    kind: MaskKind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _MaskReadError(_MASK_READ.format(f"its {name!r}"))

    def __getitem__(self, index: Any) -> Any:
        raise _MaskReadError(_MASK_READ.format("a part of it"))


class _MaskReadError(ModelError, AttributeError):
    """A `ModelError` that is an AttributeError, too, so that ``hasattr(mask, ...)`` returns False."""


_MASK_READ = (
    "a layer of the model reads its attention mask ({}) to build another one, but during a forward on a shard the mask "
    "holds no numbers, since no rank has the whole sequence. This model cannot be split over the sequence."
)


_select_kernel = functools.lru_cache(select)


def install(patches: Patches) -> None:
    """Register the attention function and the mask function with transformers."""
    AttentionInterface.register(NAME, _run_attention)
    AttentionMaskInterface.register(NAME, _make_mask)
    patches.on_undo(lambda: AttentionInterface._global_mapping.pop(NAME))
    patches.on_undo(lambda: AttentionMaskInterface._global_mapping.pop(NAME))


def keep_attention_function(name: str) -> Callable[[], None]:
    """Return a function that restores the attention function which is now registered under ``name``."""
    former, of_class = ALL_ATTENTION_FUNCTIONS.get(name), AttentionInterface().get(name)

    def restore() -> None:
        if former is not of_class:
            ALL_ATTENTION_FUNCTIONS[name] = former
        elif ALL_ATTENTION_FUNCTIONS.get(name) is not AttentionInterface().get(name):
            del ALL_ATTENTION_FUNCTIONS[name]  # goes back to the function of the class

    return restore


def expect_whole_batch(config: ModelConfig | None = None) -> None:
    """Refuse attention on a shard outside of a sharded forward.

    That happens if a forward bypasses this engine's hooks, or if a script calls layers directly. Layers that are
    recomputed in a backward are allowed: their mask belongs to a sharded forward.

    Args:
        config: of the layer that calls attention; None if unknown.

    Raises:
        ModelError: attention would see this rank's tokens only.
    """
    mode = forward_mode()
    if mode.is_compared:
        return
    if mode.given_shard is not None:
        raise ModelError(
            f"{mode.given_shard} was given a shard, but runs its attention outside of the module whose forwards "
            "ds_hetero splits, so that each rank would attend to its own tokens only. This model cannot be split over "
            'the sequence: train it with "sequence_parallel_size": 1.'
        )
    owner = None if config is None else owner_of(config)
    recomputes = torch._C._current_graph_task_id() != -1  # -1: no backward runs in this thread
    if owner is not None and owner.takes_shards and not mode.is_whole and not recomputes:
        raise ModelError(
            "attention runs outside of the forwards that ds_hetero splits, so that each rank would attend to its own "
            "tokens only. Call the model itself, model(**batch), and not layers inside it; for whole sequences call it "
            "in eval() or in `with handle.unsharded():`."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _make_mask(
    *args: object,
    config: ModelConfig,
    mask_function: FunctionType = masking_utils.causal_mask_function,
    **kwargs: object,
) -> Any:
    """Return the mask of a forward, as transformers' mask functions do; during a sharded forward a `ShardedMask`."""
    forward = forward_mode().forward
    if forward is not None:
        return ShardedMask(forward, mask_kind(mask_function))
    expect_whole_batch()
    former = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[former_implementation(config)]
    with using_former(config):
        return former(*args, mask_function=mask_function, config=config, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_attention(
    module: AttentionLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention, and return (output, weights) as transformers' attention functions do.

    With a `ShardedMask`, attention runs over the whole sequence, and the weights are None. Without one, the attention
    implementation that the model had before computes the result.
    """
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
    with using_former(config):
        former = ALL_ATTENTION_FUNCTIONS.get_interface(former_implementation(config), eager)
        result: tuple[Tensor, Tensor | None] = former(module, query, key, value, attention_mask, *args, **kwargs)
        return result


@dataclass(frozen=True)
class _LayerOptions:
    """Options that a layer passes to its attention function after the mask, in ``sdpa_attention_forward``'s order."""

    dropout: float = 0.0
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    output_attentions: bool | None = None

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: Batch) -> _LayerOptions:
        """Read the options from positional and keyword arguments, and leave out other keywords."""
        names = {field.name for field in fields(cls)}
        return cls(*args, **{name: value for name, value in kwargs.items() if name in names})


def _sharded_attention(
    layer: str, qkv: tuple[Tensor, Tensor, Tensor], mask: ShardedMask, options: _LayerOptions
) -> Tensor:
    """Compute attention over the whole sequence.

        query     [B, H, s, D]
        key       [B, G, s, D]
        value     [B, G, s, Dv], Dv <= D; padded to D
        result    [B, s, H, Dv]

    Args:
        layer: name of the layer's class, for errors.

    Caller: every rank of the replica, for every layer.

    Raises:
        ModelError: the layer has other heads than the schedule, or an option that cannot be computed on shards.
    """
    query, key, value = cast_alike(*qkv)
    forward = mask.forward
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    schedule = forward.replica.schedule
    heads = (query.shape[1], key.shape[1])
    expected = (schedule.num_heads, schedule.num_kv_heads)
    if heads != expected:
        raise ModelError(
            f"{layer} computes attention with {heads[0]} heads over {heads[1]} key/value heads, where the model's "
            f"config says {expected[0]} over {expected[1]}, which the schedule cuts. This model cannot be split over "
            'the sequence: train it with "sequence_parallel_size": 1.'
        )
    if problem := _unsupported_option(options, mask, head_dim, value_dim):
        raise ModelError(
            f"{layer} asks for {problem}, which cannot be split over the sequence. Call the model without it, or train "
            'it with "sequence_parallel_size": 1.'
        )
    if value_dim < head_dim:
        value = nn.functional.pad(value, (0, head_dim - value_dim))
    if forward.is_placeholder:  # the only token is a dummy: compute with none, and append zeros below
        query, key, value = query[:, :, :0], key[:, :, :0], value[:, :, :0]
    spec = AttentionSpec(
        kernel=_select_kernel(query.device, query.dtype, head_dim, options.softcap, forward.kernel),
        causal=mask.kind.causal,
        window=mask.kind.window,
        scale=options.scaling,
        softcap=options.softcap,
        sinks=options.s_aux,
        ring_gradients=forward.ring_gradients,
    )
    with torch.autocast(query.device.type, enabled=False):  # partial results are merged in fp32
        out = attention(query, key, value, forward.replica, forward.batch, spec, forward.clock)
    if forward.is_placeholder:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[..., :value_dim]


def _unsupported_option(options: _LayerOptions, mask: ShardedMask, head_dim: int, value_dim: int) -> str | None:
    """Describe an option of a layer that cannot be computed on shards; return None if all options can."""
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
