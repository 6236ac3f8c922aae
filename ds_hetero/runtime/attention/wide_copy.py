"""Copies of rows that lie apart in memory, 16 bytes at a time.

torch copies between tensors with unlike strides one element at a time. An element of two bytes is an eighth of what a
thread of a GPU can load at once: on one H200, the copies around an all-to-all took twice the time of a plain copy
(docs/evidence/one-h200.md). Rows of a head are whole multiples of 16 bytes in most models, and are copied as such.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDE = torch.complex128  # the only type of 16 bytes; its bits are copied as they are
_WIDE_BYTES = 16
_LARGEST_ELEMENT = 4  # bytes; larger ones use half of a load or more as they are


def copy_rows_(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target``, both [..., D] of one shape."""
    if target.dtype == source.dtype and _takes_wide_elements(target) and _takes_wide_elements(source):
        target, source = target.view(_WIDE), source.view(_WIDE)
    target.copy_(source)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., D] contiguous; itself if it is."""
    if x.is_contiguous():
        return x
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy_rows_(result, x)
    return result


def stacked_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``torch.stack(tensors)`` of tensors [..., D] of one shape and type, copied by one kernel."""
    if all(map(_takes_wide_elements, tensors)):
        return torch.stack([x.view(_WIDE) for x in tensors]).view(tensors[0].dtype)
    return torch.stack(list(tensors))


def _takes_wide_elements(x: Tensor) -> bool:
    """Whether every row [D] of ``x`` begins and ends at a multiple of 16 bytes of its storage."""
    size = x.element_size()
    if x.dim() == 0 or x.stride(-1) != 1 or size > _LARGEST_ELEMENT:
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(step * size % _WIDE_BYTES == 0 for step in steps)
