"""Dropout on ranks that hold copies and parts of activations: of every activation one mask, as in one process.

Ranks begin every forward with one state of torch's generators (`same_draws`), so that all drop the same elements of
what each holds whole. Of what is cut each draws the mask of the whole and takes its part: masks do not depend on how
many ranks there are, and the generators stay alike.

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
    """Let all ranks draw the same inside, from a seed that the first one draws; their own states go on behind it.

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
    """Drop elements of a part of an activation with probability ``p``, the others scaled by 1 / (1 - p).

    Args:
        dim: along which the activation is cut.
        start: of the part.
        size: of the whole along ``dim``.
    """
    shape = list(x.shape)
    shape[dim] = size
    mask = torch.dropout(x.new_ones(shape), p, True)
    return x * (mask if x.shape[dim] == size else mask.narrow(dim, start, x.shape[dim]).clone())


class CutHeads(TorchFunctionMode):
    """Lets dropout of a rank's attention probabilities, ``[b, h, L, L]``, use its part of the mask of all heads.

    Args:
        start: first head of this rank.
        heads: of this rank.
        size: H, of all ranks.
        is_cut: whether activations are cut now; others are dropped by torch's own dropout, alike on all ranks.
    """

    def __init__(self, start: int, heads: int, size: int, is_cut: Callable[[], bool]) -> None:
        super().__init__()
        self._start, self._heads, self._size, self._is_cut = start, heads, size, is_cut

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func``. Raises `ModelError`: dropout of something else that is cut."""
        if func is F.dropout and self._is_cut():
            return self._drop(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and p):
            return x
        if x.dim() != 4 or x.shape[1] != self._heads:
            raise ModelError(
                f"dropout of {list(x.shape)} between the cut layers of a tensor-parallel stage: of what is cut there, "
                "the probabilities of attention alone can be dropped. Set it to 0, or use stages of one rank or "
                "sequence."
            )
        return drop_part(x, p, 1, self._start, self._size)
