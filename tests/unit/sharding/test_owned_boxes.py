"""Parts of a parameter that two owners have in common, and where they lie among flat values."""

from __future__ import annotations

import random

import torch

from ds_hetero.gradient_sync.relayout import _view
from ds_hetero.sharding.gradient_chunks import box_size, overlaps


def random_boxes(rng, shape):
    """A parameter cut into boxes, dealt out to owners."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(4):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        cut = rng.randint(start, stop)
        parts = [(*box[:dim], part, *box[dim + 1 :]) for part in ((start, cut), (cut, stop))]
        boxes += [part for part in parts if box_size(part)]
    owners = [[] for _ in range(3)]
    for box in boxes:
        rng.choice(owners).append(box)
    return owners


def flat(whole, boxes):
    parts = [whole[tuple(slice(start, stop) for start, stop in box)].reshape(-1) for box in boxes]
    return torch.cat(parts) if parts else whole.new_empty(0)


def test_every_element_finds_its_new_owner_once():
    rng = random.Random(5)
    for _ in range(50):
        shape = [(7,), (5, 4), (3, 4, 5)][rng.randrange(3)]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        old, new = random_boxes(rng, shape), random_boxes(rng, shape)
        for wanted in new:
            target = torch.full((sum(map(box_size, wanted)),), -1)
            for boxes in old:
                values = flat(whole, boxes)
                for part in overlaps(boxes, wanted):
                    place = _view(target, wanted, part)
                    assert (place == -1).all()
                    place.copy_(_view(values, boxes, part))
            assert torch.equal(target, flat(whole, wanted))
