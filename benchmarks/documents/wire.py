"""Bytes that one pass of a layer sends: counted where ranks send, and computed from a placement's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.measure.contenders import Shape
from ds_hetero.planner.document_search.traffic import LINK_KINDS, KVBytes, ring_bytes
from ds_hetero.runtime.attention import channel
from ds_hetero.runtime.attention.channel import Channel, Message, PendingReceives
from ds_hetero.values.placement import Placement

_ELEMENT_BYTES = 4


def counted_bytes(action: Callable[[], object], node_of_rank: Sequence[int]) -> dict[str, int]:
    """Return the bytes of all messages of one ``action`` over all ranks, inside and between nodes; on every rank."""
    sent: Counter[str] = Counter()
    node, post = node_of_rank[dist.get_rank()], Channel.post

    def counting(self: Channel, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        for message in sends:
            sent[LINK_KINDS[node != node_of_rank[message.peer]]] += message.tensor.nbytes
        return post(self, receives, sends)

    channel.Channel.post = counting  # type: ignore[method-assign]
    try:
        action()
    finally:
        channel.Channel.post = post  # type: ignore[method-assign]
    totals = torch.tensor([sent[kind] for kind in LINK_KINDS])
    dist.all_reduce(totals)
    return dict(zip(LINK_KINDS, totals.tolist(), strict=True))


def planned_bytes(placement: Placement, shape: Shape, node_of_rank: Sequence[int]) -> dict[str, float]:
    """Return the planned bytes of the rings of one layer: KV forward; KV and fp32 gradients backward."""
    once = 2 * shape.head_dim * _ELEMENT_BYTES
    return ring_bytes(placement, node_of_rank, KVBytes(forward=once, backward=once, gradients=once))
