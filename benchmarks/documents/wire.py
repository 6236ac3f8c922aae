"""What one pass of a layer puts on the wire: counted where ranks send, and from a placement's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.measure.contenders import Shape
from ds_hetero.placement import Placement
from ds_hetero.ring_table import RingTable
from ds_hetero.runtime.attention import channel
from ds_hetero.runtime.attention.channel import Channel, Message, PendingReceives

__all__ = ["counted_bytes", "planned_bytes"]

_ELEMENT_BYTES = 4
_KINDS = ("inside", "between")


def counted_bytes(action: Callable[[], object], node_of_rank: Sequence[int]) -> dict[str, int]:
    """Bytes of all messages of one call of ``action``, over all ranks, inside and between nodes; on every rank."""
    sent: Counter[str] = Counter()
    own, post = node_of_rank[dist.get_rank()], Channel.post

    def counting(self: Channel, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        for message in sends:
            sent[_KINDS[own != node_of_rank[message.peer]]] += message.tensor.nbytes
        return post(self, receives, sends)

    channel.Channel.post = counting  # type: ignore[method-assign]
    try:
        action()
    finally:
        channel.Channel.post = post  # type: ignore[method-assign]
    totals = torch.tensor([sent[kind] for kind in _KINDS])
    dist.all_reduce(totals)
    return dict(zip(_KINDS, totals.tolist(), strict=True))


def planned_bytes(placement: Placement, shape: Shape, node_of_unit: Sequence[int]) -> dict[str, int]:
    """What the rounds of all lanes carry: KV forward, KV and fp32 gradients backward; units of one rank."""
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * _ELEMENT_BYTES
    tokens: Counter[str] = Counter()
    for lane in placement.lanes:
        table = RingTable(placement, lane, causal=True, window=None)
        for position in range(table.size):
            for rounds in (table.forward_rounds, table.backward_kv_rounds, table.backward_grad_rounds):
                for transfer in (transfer for round_ in rounds(position) for transfer in round_.sends):
                    ends = (node_of_unit[lane.members[end]] for end in (transfer.sender, transfer.receiver))
                    columns = table.columns(transfer.source)
                    tokens[_KINDS[len(set(ends)) - 1]] += sum(stop - start for start, stop in columns)
    return {kind: tokens[kind] * token_bytes for kind in _KINDS}
