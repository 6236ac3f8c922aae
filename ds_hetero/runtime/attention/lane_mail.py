"""Buffers of one member of a lane, and how they are sent and received: keys and values, or their gradients.

A block is a list with one [2, B, heads, n, D] tensor per sub-ring, see `ds_hetero.runtime.attention.ring`. A
proxy holds parts of blocks, some of their tokens, until it passes them on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import Ring
from ds_hetero.batch.routes import Round, Transfer
from ds_hetero.runtime.attention.channel import NOTHING, Channel, Message, PendingReceives
from ds_hetero.runtime.attention.kernel_calls import add_columns_, block_like, only


class KVBlocks:
    """Keys and values that travel, this rank's own and, by source, those of others."""

    tag = 0

    def __init__(self, ring: Ring, like: Tensor, own: list[Tensor]) -> None:
        self._ring, self._like, self._dtype = ring, like, like.dtype
        self.whole = {ring.position: own}
        self._proxied: dict[tuple[int, int], list[Tensor]] = {}

    def space_for(self, transfer: Transfer) -> list[Tensor]:
        """Uninitialised memory for what a transfer brings."""
        return block_like(self._like, self._ring, self._ring.table.num_columns(transfer), self._dtype)

    def leaving(self, transfer: Transfer) -> list[Tensor]:
        """Rows that a transfer takes away, contiguous."""
        part = transfer.part
        if part is None:
            return self.whole[transfer.source]
        if part.is_first_hop:
            return [x[:, :, :, part.start : part.stop].contiguous() for x in self.whole[transfer.source]]
        return self._proxied.pop((transfer.source, part.start))

    def arrived(self, transfer: Transfer, block: list[Tensor]) -> None:
        """Keep what a transfer has brought."""
        part = transfer.part
        if part is None:
            self.whole[transfer.source] = block
        elif not part.is_last_hop:
            self._proxied[transfer.source, part.start] = block
        else:
            if transfer.source not in self.whole:
                self.whole[transfer.source] = self.space_for(transfer._replace(part=None))
            for tensor, received in zip(self.whole[transfer.source], block, strict=True):
                tensor[:, :, :, part.start : part.stop] = received

    def sent(self, transfers: Sequence[Transfer]) -> None:
        """These have left."""

    def keep_only(self, sources: frozenset[int]) -> None:
        """Let go of all other blocks."""
        self.whole = only(self.whole, keep=sources)


class GradientBlocks(KVBlocks):
    """Partial dK/dV of others on their way home; what comes home is added to the gradients of this rank's own.

    Args:
        like: a tensor [B, h, S, D] on the same device.
        home: dK and dV of this rank's own keys and values, by sub-ring.
    """

    tag = 1 << 30  # below it tags carry KV

    def __init__(self, ring: Ring, like: Tensor, dtype: torch.dtype, home: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(ring, like, [])
        self.whole, self._dtype, self._home = {}, dtype, home

    def begin(self, source: int) -> None:
        """Zero dK/dV for the KV of another member."""
        block = block_like(self._like, self._ring, self._ring.num_columns(source), self._dtype)
        self.whole[source] = [x.zero_() for x in block]

    def arrived(self, transfer: Transfer, block: list[Tensor]) -> None:
        """Add what a transfer has brought, or keep it as a proxy."""
        part, source = transfer.part, transfer.source
        first, stop = (0, None) if part is None else (part.start, part.stop)
        if part is not None and not part.is_last_hop:
            self._proxied[source, part.start] = block
        elif source != self._ring.position:
            for tensor, received in zip(self.whole[source], block, strict=True):
                tensor[:, :, :, first:stop] += received
        else:
            columns = self._ring.table.columns(source)
            for home, received in zip(self._home, block, strict=True):
                for grad, addend in zip(home, received, strict=True):
                    add_columns_(grad, addend, columns, first)

    def sent(self, transfers: Sequence[Transfer]) -> None:
        """A partial gradient leaves once, then others add to it."""
        for transfer in transfers:
            if transfer.part is None or transfer.part.is_first_hop:
                self.whole.pop(transfer.source, None)


class LaneMail:
    """The rounds of one member of a lane in one pass. ``channel``: of all lanes of the layer."""

    def __init__(self, ring: Ring, channel: Channel) -> None:
        self._ring, self._channel = ring, channel
        self._pending: dict[int, PendingReceives] = defaultdict(lambda: NOTHING)
        self._arriving: dict[int, list[tuple[KVBlocks, Transfer, list[Tensor]]]] = defaultdict(list)

    def post(self, step: int, *traffic: tuple[Round, KVBlocks]) -> None:
        """Start the messages of the round ``step``: what ``traffic`` says that they bring and take."""
        receives, sends = [], []
        for round_, blocks in traffic:
            for transfer in round_.receives:
                block = blocks.space_for(transfer)
                self._arriving[transfer.due].append((blocks, transfer, block))
                receives += self._messages(step, transfer, transfer.sender, block, blocks.tag)
            for transfer in round_.sends:
                sends += self._messages(step, transfer, transfer.receiver, blocks.leaving(transfer), blocks.tag)
            blocks.sent(round_.sends)
        for due, pending in self._channel.post(receives, sends).items():
            self._pending[due] = self._pending[due] + pending

    def pending(self, step: int) -> PendingReceives:
        """Receives that must end before a step; `NOTHING` if it needs nothing new."""
        return self._pending.pop(step, NOTHING)

    def put_away(self, step: int) -> None:
        """Keep what was received before a step, once it is here."""
        for blocks, transfer, block in self._arriving.pop(step, ()):
            blocks.arrived(transfer, block)

    def _messages(self, step: int, transfer: Transfer, peer: int, block: list[Tensor], tag: int) -> list[Message]:
        is_far = transfer.due > step + 1
        return [
            Message(tensor, sub.ranks[peer], tag + sub.tag, transfer.due, is_far)
            for tensor, sub in zip(block, self._ring.sub_rings, strict=True)
        ]
