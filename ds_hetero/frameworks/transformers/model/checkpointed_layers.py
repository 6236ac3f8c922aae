"""Let checkpointed layers of a transformers model keep their attention, for the time of one forward.

transformers gives every layer that it checkpoints a function, which the layer calls with its forward. During a sharded
forward this function is replaced by one around it; a recomputation reaches the record of its layer through the forward
that the function got, so it needs nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ds_hetero.runtime.attention.kept_results import checkpoint_keeping_attention

_FUNCTION = "_gradient_checkpointing_func"  # attribute of a checkpointed layer


def keep_attention(decoder: nn.Module) -> Callable[[], None]:
    """Let the checkpointed layers inside ``decoder`` keep their attention; return a function that ends this."""
    layers: list[Any] = [module for module in decoder.modules() if is_checkpointed(module)]
    former = [getattr(layer, _FUNCTION) for layer in layers]
    for layer, checkpoint in zip(layers, former, strict=True):
        setattr(layer, _FUNCTION, partial(checkpoint_keeping_attention, checkpoint, offloads_checkpoint(layer)))

    def end() -> None:
        for layer, checkpoint in zip(layers, former, strict=True):
            setattr(layer, _FUNCTION, checkpoint)

    return end


def is_checkpointed(module: nn.Module) -> bool:
    """Return True if transformers checkpoints this layer while it trains."""
    return bool(getattr(module, "gradient_checkpointing", False)) and hasattr(module, _FUNCTION)


def offloads_checkpoint(module: nn.Module) -> bool:
    """Return True if transformers saves the checkpoint of this layer in CPU memory.

    The layer's checkpoint function then calls torch's ``save_on_cpu``, which is recognized by this name in its code.
    """
    function = getattr(getattr(module, _FUNCTION, None), "func", None)
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return bool(getattr(module, "gradient_checkpointing", False)) and "save_on_cpu" in names
