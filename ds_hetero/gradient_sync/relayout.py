"""Move parameters and optimizer state from their old owners to the new ones when the job's plan changes.

A rank owns a list of boxes of a parameter, and has their values in a flat tensor, box after box. Each element is sent
from its old to its new owner, or stays. Nothing is computed, so every element keeps its bits. Example:

    rank   before     afterwards    messages
    0      rows 0-3   rows 0-1      sends rows 2-3 to rank 1
    1      rows 4-5   rows 2-5      receives rows 2-3
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


class _IncomingMessage(NamedTuple):
    """Elements that one old owner sends to this rank, their new owner."""

    target: Tensor  # flat: everything that this rank owns of the parameter afterwards
    parts: list[Box]  # boxes of the parameter that the message consists of
    elements: Tensor  # flat: the elements of ``parts``, one part after the other


def move_owned(values: Mapping[str, Tensor], old: Owned, new: Owned, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move one parameter and its optimizer state to the new owners; return this rank's values afterwards.

    Args:
        values: this rank's values before, flat, by kind: the parameter, and each moment of the optimizer.
        old: boxes of every rank before, by rank.
        new: boxes of every rank afterwards, by rank.
        like: for every kind of value, an empty tensor with its dtype and device; the same kinds in the same order on
            every rank.

    Returns:
        This rank's values afterwards, flat, by kind.

    Caller: every rank of the world, for the same parameters in the same order.
    Collectives: none; point-to-point messages between old and new owners, in one batch.
    """
    rank = dist.get_rank()
    size = sum(map(box_size, new[rank]))
    moved = {name: empty.new_empty(size) for name, empty in like.items()}
    incoming_messages: list[_IncomingMessage] = []
    messages: list[dist.P2POp] = []
    # Both ends walk the ranks in order and the names in order, so that messages of a pair match one by one.
    for other in range(len(old)):
        parts = list(overlaps(old[other], new[rank]))
        if not parts:
            continue
        for name, target in moved.items():
            message = target.new_empty(sum(map(box_size, parts)))
            incoming_messages.append(_IncomingMessage(target, parts, message))
            if other == rank:
                message.copy_(_pack(values[name], old[rank], parts))
            else:
                messages.append(dist.P2POp(dist.irecv, message, other))
    for other in range(len(new)):
        parts = list(overlaps(old[rank], new[other]))
        if not parts or other == rank:
            continue
        packed = [_pack(values[name], old[rank], parts) for name in moved]
        messages += [dist.P2POp(dist.isend, message, other) for message in packed]
    with waiting_for_peers("moving layers between stages"):
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    for incoming in incoming_messages:
        _unpack(incoming, new[rank])
    return moved


def _pack(values: Tensor, boxes: Sequence[Box], parts: Sequence[Box]) -> Tensor:
    """Return the elements of ``parts``, one part after the other, from ``values``, the flat elements of ``boxes``."""
    return torch.cat([_view(values, boxes, part).reshape(-1) for part in parts])


def _unpack(incoming: _IncomingMessage, boxes: Sequence[Box]) -> None:
    """Copy every part of a message into ``incoming.target``, which has the elements of ``boxes``, flat."""
    sizes = [box_size(part) for part in incoming.parts]
    for part, elements in zip(incoming.parts, incoming.elements.split_with_sizes(sizes), strict=True):
        view = _view(incoming.target, boxes, part)
        view.copy_(elements.view(view.shape))


def _view(values: Tensor, boxes: Sequence[Box], part: Box) -> Tensor:
    """Return a view of the elements of ``part`` in ``values``, the flat elements of ``boxes``.

    One of the boxes contains ``part``; the view has the shape of ``part``.
    """
    offset = 0
    for box in boxes:
        size = box_size(box)
        if _contains(box, part):
            shaped = values[offset : offset + size].view([stop - start for start, stop in box])
            # Rows 4 to 6 of the box of rows 3 to 8 are its rows 1 to 3.
            slices = []
            for (start, stop), (box_start, _) in zip(part, box, strict=True):
                slices.append(slice(start - box_start, stop - box_start))
            return shaped[tuple(slices)]
        offset += size
    raise AssertionError("a part lies in one of the boxes that it was cut from")


def _contains(box: Box, part: Box) -> bool:
    """Whether all elements of ``part`` are in ``box``."""
    ranges = zip(box, part, strict=True)
    return all(box_start <= start and stop <= box_stop for (box_start, box_stop), (start, stop) in ranges)
