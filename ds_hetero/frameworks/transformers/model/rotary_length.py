"""Rotary embeddings whose frequencies depend on the length of the sequence (``dynamic``, ``longrope``), on shards.

transformers takes the largest position that a rotary module is given for the length. During a sharded forward it is
given one more position, the largest of the whole batch, whose angles are taken off again. So frequencies are those of
one process, to the bit, by the module's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shards import Entries
from ds_hetero.runtime.replica import Replica

LENGTH_DEPENDENT = ("dynamic", "longrope")  # parts of the names of rope types


def depends_on_length(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary embedding of such a type, or of several by type of layer with such among them."""
    kinds = getattr(module, "rope_type", None)
    by_layer = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and any(name in kind for name in LENGTH_DEPENDENT) for kind in by_layer)


class RopeLength:
    """Tells the rotary modules of a model's ``decoder`` how long its sequences are, while a sharded forward runs."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules = [module for module in decoder.modules() if depends_on_length(module)]
        self._last: int | None = None  # largest position of the batch, during a forward
        self._hooks: list[Any] = []
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))

    def begin(self, positions: Tensor, replica: Replica) -> None:
        """A forward on a shard begins.

        Args:
            positions: of the shard, [B, s] or [axes, B, s].

        Caller: every rank of the replica.
        Collectives: one all_reduce of one integer, for a model that has such modules.
        """
        if self._modules:
            last = positions.max().reshape(1).to(message_device(replica.sp_group), torch.int64)
            dist.all_reduce(last, dist.ReduceOp.MAX, group=replica.sp_group)
            self._last = int(last)

    def end(self) -> None:
        """The forward is over."""
        self._last = None

    def restore(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Entries) -> Any:
        if self._last is None:
            return args, kwargs
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), self._last)
        longer = torch.cat([positions, last], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def _after(self, module: nn.Module, args: object, output: Any) -> Any:
        if self._last is None:
            return output
        if isinstance(output, Tensor):  # [..., s + 1, D], complex
            return output[..., :-1, :]
        return tuple(angles[..., :-1, :] for angles in output)  # cosines and sines
