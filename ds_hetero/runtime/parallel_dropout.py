"""Dropout in tensor parallelism: all ranks use the mask that one process would use.

Ranks begin every forward with the same state of torch's generators (`same_draws`), so all drop the same elements of
activations that each holds whole. For a sharded activation each rank draws the mask of the whole and takes its part. So
masks do not depend on the number of ranks, and the generators of all ranks stay in the same state.

Dimension key: b rows, L tokens, H heads, h heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ds_hetero.errors import ModelError
from ds_hetero.runtime.devices import default_device


@contextmanager
def same_draws(group: ProcessGroup) -> Iterator[None]:
    """Let all ranks draw the same random numbers inside, from a seed of the first rank; restore the states afterwards.

    Caller: every rank of ``group``.
    Collectives: one broadcast of a number.
    """
    device = default_device()
    seed = torch.randint(2**62, (1,)).to(device)
    dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def drop_part(x: Tensor, p: float, dim: int, start: int, size: int) -> Tensor:
    """Drop elements of a part of an activation with probability ``p``, and scale the others by 1 / (1 - p).

    Args:
        dim: dimension along which the activation is sharded.
        start: of the part, along ``dim``.
        size: of the whole activation, along ``dim``.
    """
    shape = list(x.shape)
    shape[dim] = size
    mask = torch.dropout(x.new_ones(shape), p, True)
    return x * (mask if x.shape[dim] == size else mask.narrow(dim, start, x.shape[dim]).clone())


class ParallelHeadDropout(TorchFunctionMode):
    """Lets dropout of attention probabilities [b, h, L, L] use this rank's part of the mask of all heads.

    Args:
        start: first head of this rank.
        heads: number of heads of this rank, h.
        size: number of all heads, H.
        is_cut: returns whether the present activations are sharded. Activations that every rank holds whole are left
            to torch's dropout, which draws the same mask on all ranks.
    """

    def __init__(self, start: int, heads: int, size: int, is_cut: Callable[[], bool]) -> None:
        super().__init__()
        self._start, self._heads, self._size, self._is_cut = start, heads, size, is_cut

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``. Raises `ModelError`: it is dropout of a sharded activation that has no heads."""
        if func is F.dropout and self._is_cut():
            return self._drop(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and p):
            return x
        if x.dim() != 4 or x.shape[1] != self._heads:
            raise ModelError(
                f"dropout of {list(x.shape)} between the cut layers of a tensor-parallel stage: of what is cut there, "
                "the probabilities of attention alone can be dropped. Set it to 0, or use stages of one rank, "
                'or "inner": "sequence".'
            )
        return drop_part(x, p, 1, self._start, self._size)
