"""Shard of a parameter on one rank: which elements of the parameter it has, and where they are in the rank's tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor, placement_types

from ds_hetero.sharding.gradient_chunks import Box
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a parameter on one rank: ``[start, stop)`` along the cut dimension, or of the flat elements."""

    layout: ParameterLayout
    cut: Cut  # that of the rank's replica
    start: int
    stop: int

    @classmethod
    def of(cls, layout: ParameterLayout, rank: int) -> Shard | None:
        """Return the shard of ``rank``; None if it holds no element."""
        if 0 in layout.shape:
            return None
        for cut in layout.cuts:
            extent = cut.part(rank)
            if extent is not None and extent[0] < extent[1]:
                return cls(layout, cut, *extent)
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor: 1-D for a part of the flat elements."""
        shape, dim = self.layout.shape, self.cut.dim
        size = self.stop - self.start
        if dim is not None:
            return (*shape[:dim], size, *shape[dim + 1 :])
        return shape if size == prod(shape) else (size,)

    @property
    def is_flat(self) -> bool:
        """Whether the rank's tensor is 1-D, a part of the flat elements without the parameter's dimensions."""
        return self.cut.dim is None and self.shape != self.layout.shape

    def view(self, tensor: Tensor, box: Box) -> Tensor:
        """Return a view of this rank's ``tensor``: the elements of ``box``, a box of the whole parameter."""
        return self._flat_view(tensor, box) if self.is_flat else self._view(tensor, box)

    def _view(self, tensor: Tensor, box: Box) -> Tensor:
        """Return the view of `view`, if ``tensor`` has the parameter's dimensions."""
        # Rows 4 to 8 of a [10, 3] parameter on this rank: its row 4 is row 0 of the tensor.
        offsets = [self.start if dim == self.cut.dim else 0 for dim in range(len(box))]
        slices = []
        for (start, stop), offset in zip(box, offsets, strict=True):
            slices.append(slice(start - offset, stop - offset))
        return tensor[tuple(slices)]

    def _flat_view(self, tensor: Tensor, box: Box) -> Tensor:
        """Return the view of `view`, if ``tensor`` is 1-D and has a part of the parameter's flat elements."""
        # Elements 12 to 24 of a [10, 3] parameter on this rank, 1-D: the box of rows 4 and 5, columns 0 to 3 has
        # strides (3, 1) there as in the whole parameter, and begins at 4 * 3 + 0 * 1 - 12 = 0.
        shape = self.layout.shape
        strides = [prod(shape[dim + 1 :]) for dim in range(len(box))]
        first_in_parameter = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        offset = tensor.storage_offset() + first_in_parameter - self.start
        return tensor.as_strided([stop - start for start, stop in box], strides, offset)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a parameter or gradient, detached from autograd: the local tensor of a DTensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_parameter(tensor: Tensor) -> Tensor:
    """Return the full parameter on the CPU.

    Caller: for a DTensor, every rank of its mesh.
    Collectives: for a DTensor, its all-gather.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def local_box(tensor: Tensor) -> Box:
    """Return the box of a parameter that this rank holds: all of it, or this rank's shard of a DTensor."""
    box = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor) and isinstance(placement := tensor.placements[0], placement_types.Shard):
        dim, mesh = placement.dim, tensor.device_mesh
        box[dim] = _torch_chunk(tensor.shape[dim], mesh.size(), mesh.get_local_rank())
    return tuple(box)


def _torch_chunk(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return ``(start, stop)`` of one part as torch.chunk cuts a DTensor: 10 rows over 4 ranks as 3, 3, 3 and 1."""
    step = -(-size // num_parts)  # rounded up
    start = min(step * part, size)
    return start, min(start + step, size)
