"""Rotary embeddings whose frequencies depend on the sequence length (``dynamic``, ``longrope``), on shards.

transformers computes the length from the largest position that a rotary module receives. On a shard, that would be the
largest position of this rank. So during a sharded forward, one hook appends the largest position of the whole batch,
and another hook removes its angles from the result. The module then computes the same frequencies as in one process, to
the bit.

    positions of this rank    [0 1 2 3]        of a batch with 8 positions
    the module receives       [0 1 2 3 7]      and computes the length 8
    the caller gets angles of [0 1 2 3]

Dimension key: B rows, s tokens of this rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shards import Entries
from ds_hetero.runtime.replica import Replica

LENGTH_DEPENDENT = ("dynamic", "longrope")  # parts of the names of such rope types


def depends_on_length(module: nn.Module) -> bool:
    """Return True for a rotary embedding whose rope type, or that of any of its layer types, depends on the length."""
    rope_type = getattr(module, "rope_type", None)
    # In models that mix types of layers, a dict: {"full_attention": "longrope", "sliding_attention": "default"}.
    rope_types = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
    return any(_is_length_dependent(rope_type) for rope_type in rope_types)


def _is_length_dependent(rope_type: object) -> bool:
    return isinstance(rope_type, str) and any(name in rope_type for name in LENGTH_DEPENDENT)


class RopeLength:
    """Hooks that give the rotary modules of a model's ``decoder`` the length of the batch during a sharded forward."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules = [module for module in decoder.modules() if depends_on_length(module)]
        self._last_position: int | None = None  # of the batch, during a sharded forward; None between forwards
        self._hooks: list[Any] = []
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._append_position, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._remove_angles))

    def begin(self, positions: Tensor, replica: Replica) -> None:
        """Start a forward on a shard: agree on the largest position of the batch.

        Args:
            positions: of the shard, [B, s] or [axes, B, s].

        Caller: every rank of the replica.
        Collectives: one all_reduce of one integer if the model has length-dependent rotary modules, else none.
        """
        if self._modules:
            last_position = positions.max().reshape(1).to(message_device(replica.sp_group), torch.int64)
            dist.all_reduce(last_position, dist.ReduceOp.MAX, group=replica.sp_group)
            self._last_position = int(last_position)

    def end(self) -> None:
        """End the forward: the hooks do nothing until the next `begin`."""
        self._last_position = None

    def restore(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _append_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: Entries) -> Any:
        """Append the batch's largest position to this rank's: [..., s] -> [..., s + 1]."""
        if self._last_position is None:
            return args, kwargs
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last_position = positions.new_full((*positions.shape[:-1], 1), self._last_position)
        extended_positions = torch.cat([positions, last_position], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": extended_positions}
        return (args[0], extended_positions, *args[2:]), kwargs

    def _remove_angles(self, module: nn.Module, args: object, output: Any) -> Any:
        """Remove the angles of the appended position: [..., s + 1, D] -> [..., s, D]."""
        if self._last_position is None:
            return output
        if isinstance(output, Tensor):  # complex numbers, as Llama 4 has them
            return output[..., :-1, :]
        return tuple(angles[..., :-1, :] for angles in output)  # cosines and sines
