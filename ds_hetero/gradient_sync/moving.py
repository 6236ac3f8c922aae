"""Moves from one layout to another: parameters and optimizer state travel from old owners to new ones.

Which elements of a parameter a rank owns is a list of boxes; its values are a flat tensor, box after box. Old owners
and new owners cut a parameter differently, and every element travels from the one to the other, or stays: no element is
computed with, so it has the bits that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box, box_size, overlaps

Owned = Sequence[Sequence[Box]]
"""Boxes of one parameter, by the rank that owns them."""


def move_owned(values: Mapping[str, Tensor], old: Owned, new: Owned, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give this rank what it owns of one parameter from now on.

    Args:
        values: of what this rank owned, flat, by what they are: the parameter itself, moments of its optimizer.
        old: who owned what.
        new: who owns what.
        like: an empty tensor of the dtype and on the device of each of ``values``; the same names in the same order on
            every rank.

    Returns:
        The values of what this rank owns now, flat.

    Caller: every rank of the world, for the same parameters in the same order.
    Collectives: messages between old and new owners.
    """
    rank = dist.get_rank()
    size = sum(map(box_size, new[rank]))
    moved = {name: empty.new_empty(size) for name, empty in like.items()}
    receives: list[tuple[Tensor, list[Box], Tensor]] = []  # target, parts of it, message
    ops = []
    for other in range(len(old)):
        pieces = list(overlaps(old[other], new[rank]))
        if not pieces:
            continue
        for name, target in moved.items():
            message = target.new_empty(sum(map(box_size, pieces)))
            receives.append((target, pieces, message))
            if other != rank:
                ops.append(dist.P2POp(dist.irecv, message, other))
            else:
                message.copy_(_taken(values[name], old[rank], pieces))
    for other in range(len(new)):
        pieces = list(overlaps(old[rank], new[other]))
        if pieces and other != rank:
            ops += [dist.P2POp(dist.isend, _taken(values[name], old[rank], pieces), other) for name in moved]
    with waiting_for_peers("moving layers between stages"):
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
    for target, pieces, message in receives:
        for part, piece in zip(pieces, message.split_with_sizes(list(map(box_size, pieces))), strict=True):
            view = _view(target, new[rank], part)
            view.copy_(piece.view(view.shape))
    return moved


def _taken(values: Tensor, boxes: Sequence[Box], pieces: Sequence[Box]) -> Tensor:
    return torch.cat([_view(values, boxes, part).reshape(-1) for part in pieces])


def _view(values: Tensor, boxes: Sequence[Box], part: Box) -> Tensor:
    """The elements of ``part`` among the flat values of ``boxes``, one of which contains it."""
    offset = 0
    for box in boxes:
        size = box_size(box)
        if all(start <= a and b <= stop for (start, stop), (a, b) in zip(box, part, strict=True)):
            shaped = values[offset : offset + size].view([stop - start for start, stop in box])
            slices = tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))
            return shaped[slices]
        offset += size
    raise AssertionError("a part lies in one of the boxes that it was cut from")
