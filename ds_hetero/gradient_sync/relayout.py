"""Move parameters and optimizer state from old owners to new ones, where a plan of the job changes.

A rank owns a list of boxes of a parameter; its values are a flat tensor, box after box. Old owners and new owners cut a
parameter differently, and every element travels from the one to the other, or stays: no element is computed with, so it
has the bits that it had.

    rank   owned      owns from now on    messages
    0      rows 0-3   rows 0-1            rows 2-3 to rank 1
    1      rows 4-5   rows 2-5            keeps rows 4-5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box, box_size, overlaps

Owned = Sequence[Sequence[Box]]
"""Boxes of one parameter, by the rank that owns them."""


class _Arrival(NamedTuple):
    """Elements that this rank owns from now on, as they come from one old owner."""

    target: Tensor  # flat, all that this rank owns of the parameter
    parts: list[Box]  # where the message belongs in it
    message: Tensor  # flat, the parts one after the other


def move_owned(values: Mapping[str, Tensor], old: Owned, new: Owned, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give this rank what it owns of one parameter from now on; return its values, flat.

    Args:
        values: of what this rank owned, flat, by what they are: the parameter itself, moments of its optimizer.
        like: an empty tensor of the dtype and on the device of each of ``values``; the same names in the same order on
            every rank.

    Caller: every rank of the world, for the same parameters in the same order.
    Collectives: messages between old and new owners.
    """
    rank = dist.get_rank()
    size = sum(map(box_size, new[rank]))
    moved = {name: empty.new_empty(size) for name, empty in like.items()}
    arrivals: list[_Arrival] = []
    messages: list[dist.P2POp] = []
    # Both ends walk the ranks in order and the names in order, so that messages of a pair match one by one.
    for other in range(len(old)):
        parts = list(overlaps(old[other], new[rank]))
        if not parts:
            continue
        for name, target in moved.items():
            message = target.new_empty(sum(map(box_size, parts)))
            arrivals.append(_Arrival(target, parts, message))
            if other == rank:
                message.copy_(_packed(values[name], old[rank], parts))
            else:
                messages.append(dist.P2POp(dist.irecv, message, other))
    for other in range(len(new)):
        parts = list(overlaps(old[rank], new[other]))
        if not parts or other == rank:
            continue
        packed = [_packed(values[name], old[rank], parts) for name in moved]
        messages += [dist.P2POp(dist.isend, message, other) for message in packed]
    with waiting_for_peers("moving layers between stages"):
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    for arrival in arrivals:
        _unpack(arrival, new[rank])
    return moved


def _packed(values: Tensor, boxes: Sequence[Box], parts: Sequence[Box]) -> Tensor:
    """Return elements of ``parts`` out of the flat values of ``boxes``, one part after the other."""
    return torch.cat([_view(values, boxes, part).reshape(-1) for part in parts])


def _unpack(arrival: _Arrival, boxes: Sequence[Box]) -> None:
    """Put every part of a message into its place among the flat values of ``boxes``."""
    sizes = [box_size(part) for part in arrival.parts]
    for part, elements in zip(arrival.parts, arrival.message.split_with_sizes(sizes), strict=True):
        view = _view(arrival.target, boxes, part)
        view.copy_(elements.view(view.shape))


def _view(values: Tensor, boxes: Sequence[Box], part: Box) -> Tensor:
    """Return the elements of ``part`` among the flat values of ``boxes``, one of which contains it."""
    offset = 0
    for box in boxes:
        size = box_size(box)
        if _contains(box, part):
            shaped = values[offset : offset + size].view([stop - start for start, stop in box])
            # Rows 4 to 6 of the box of rows 3 to 8 are its rows 1 to 3.
            return shaped[tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))]
        offset += size
    raise AssertionError("a part lies in one of the boxes that it was cut from")


def _contains(box: Box, part: Box) -> bool:
    return all(start <= a and b <= stop for (start, stop), (a, b) in zip(box, part, strict=True))
