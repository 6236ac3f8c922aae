"""DeepSpeed's fused loss over tiles of the logits, which cannot know the scale of a shard's loss: it is refused.

`TiledFusedLogitsLoss` runs the backward of the LM head inside its forward, as if the gradient of the loss were 1. On a
shard it is what the engine's average needs, known when the loss of all ranks is put together. So the gradient of the
head alone would be of another scale than those of all other layers, by how many labels a rank has.
"""

from __future__ import annotations

import functools

from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

from ds_hetero.engine.process.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ModelError


def install(registry: Registry) -> None:
    """Let `TiledFusedLogitsLoss` refuse shards."""
    registry.patches.replace(TiledFusedLogitsLoss, "forward", lambda stock: _refusing_shards(registry, stock))


def _refusing_shards(registry: Registry, stock: staticmethod[..., object]) -> object:
    function: Function = stock.__func__

    @functools.wraps(function)
    def forward(*args: object, **kwargs: object) -> object:
        if any(p.model.takes_shards and p.model.replica.sp_size > 1 for p in registry.in_training):
            raise ModelError(
                "TiledFusedLogitsLoss gives the LM head a gradient of another scale than all other layers where a "
                "sequence is split: it runs the head's backward before the loss of all ranks is known. Use DeepSpeed's "
                "sequence_tiled_compute on a function that makes logits and loss, which tiles them alike and runs the "
                "backward at its time; or have the model return logits, for handle.loss."
            )
        return function(*args, **kwargs)

    return staticmethod(forward)
