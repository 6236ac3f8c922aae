"""Send and receive the blocks of one member of a lane: keys and values, or their gradients.

A block is a list with one [2, B, heads, n, D] tensor per sub-ring, see `ds_hetero.runtime.attention.travelling_kv`. A
proxy keeps some tokens of a block until it passes them on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import Ring
from ds_hetero.batch.routes import Round, Transfer
from ds_hetero.runtime.attention.channel import NOTHING, Channel, Message, PendingReceives
from ds_hetero.runtime.attention.travelling_kv import add_key_gradients_, block_like, blocks_of_sources
from ds_hetero.runtime.attention.wide_copy import contiguous_rows


class KVBlocks:
    """The KV blocks that a member of a lane has: its own, blocks of other members, and parts that it passes on.

    Attributes:
        complete: complete blocks, by the position of the member whose KV they are.
    """

    tag = 0  # of the messages

    def __init__(self, ring: Ring, template: Tensor, own_block: list[Tensor]) -> None:
        self._ring, self._template, self._dtype = ring, template, template.dtype
        self.complete = {ring.position: own_block}
        self._proxied: dict[tuple[int, int], list[Tensor]] = {}  # parts to pass on, by (source, first token)

    def space_for(self, transfer: Transfer) -> list[Tensor]:
        """Return an uninitialised block for the tokens of a transfer."""
        return block_like(self._template, self._ring, self._ring.table.num_keys_of(transfer), self._dtype)

    def block_to_send(self, transfer: Transfer) -> list[Tensor]:
        """Return the contiguous block that a transfer sends. A proxy forgets a part when it passes the part on."""
        part = transfer.part
        if part is None:
            return self.complete[transfer.source]
        if part.is_first_hop:
            return [contiguous_rows(x[:, :, :, part.start : part.stop]) for x in self.complete[transfer.source]]
        return self._proxied.pop((transfer.source, part.start))

    def store_received(self, transfer: Transfer, block: list[Tensor]) -> None:
        """Store the block that a transfer has brought."""
        part = transfer.part
        if part is None:
            self.complete[transfer.source] = block
        elif not part.is_last_hop:
            self._proxied[transfer.source, part.start] = block
        else:
            if transfer.source not in self.complete:
                self.complete[transfer.source] = self.space_for(transfer._replace(part=None))
            for tensor, received in zip(self.complete[transfer.source], block, strict=True):
                tensor[:, :, :, part.start : part.stop] = received

    def note_sent(self, transfers: Sequence[Transfer]) -> None:
        """Do nothing: KV blocks that are being sent may still be needed here. `GradientBlocks` drops them instead."""

    def keep_only(self, sources: frozenset[int]) -> None:
        """Drop the blocks of all members that are not in ``sources``."""
        self.complete = blocks_of_sources(self.complete, keep=sources)


class GradientBlocks(KVBlocks):
    """The blocks of partial dK/dV that a member of a lane has; they travel to the members that hold the K and V.

    Blocks that are added to are in ``dtype``; messages, and the parts that a proxy passes on, in ``sent_dtype``. If
    that is narrower, each hop rounds the sum of the parts so far once. With u the unit roundoff of ``sent_dtype`` (2^-8
    of bfloat16), K - 1 hops change an element of dK or dV by at most ((1 + u)^(K - 1) - 1) times the sum of the
    magnitudes of its parts: each part is in at most K - 1 rounded sums. `ds_hetero.decision.chosen_text` prints it.

    Args:
        template: a tensor [B, h, S, D] on the same device.
        dtype: in which gradients add up.
        own_gradients: dK and dV of this rank's own keys and values, for each sub-ring; partial gradients that arrive
            here are added to them.
        sent_dtype: in which gradients travel; None for ``dtype``.
    """

    tag = 1 << 30  # lower tags are those of KV

    def __init__(
        self,
        ring: Ring,
        template: Tensor,
        dtype: torch.dtype,
        own_gradients: Sequence[tuple[Tensor, Tensor]],
        sent_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ring, template, [])
        self.complete, self._own_gradients = {}, own_gradients
        self._dtype = sent_dtype or dtype  # of the memory for messages, see `space_for`
        self._sum_dtype = dtype

    def begin(self, source: int) -> None:
        """Begin a block for the dK/dV of the member ``source``: zeros, if not all of it will be written."""
        block = block_like(self._template, self._ring, self._ring.num_travelling_keys(source), self._sum_dtype)
        if source not in self._ring.sources_with_each_key_once:
            for x in block:
                x.zero_()
        self.complete[source] = block

    def block_to_send(self, transfer: Transfer) -> list[Tensor]:
        """Return the contiguous block that a transfer sends, rounded to the type in which gradients travel."""
        return [x.to(self._dtype) for x in super().block_to_send(transfer)]

    def store_received(self, transfer: Transfer, block: list[Tensor]) -> None:
        """Add received gradients to the block of their member; a proxy stores them until it passes them on."""
        part, source = transfer.part, transfer.source
        first, stop = (0, None) if part is None else (part.start, part.stop)
        if part is not None and not part.is_last_hop:
            self._proxied[source, part.start] = block
        elif source != self._ring.position:
            for tensor, received in zip(self.complete[source], block, strict=True):
                tensor[:, :, :, first:stop].add_(received)
        else:
            key_ranges = self._ring.table.travelling_keys(source)
            for dkv, received in zip(self._own_gradients, block, strict=True):
                for grad, addend in zip(dkv, received, strict=True):
                    add_key_gradients_(grad, addend, key_ranges, first)

    def note_sent(self, transfers: Sequence[Transfer]) -> None:
        """Drop the blocks that are being sent: the next member adds its gradients to them."""
        for transfer in transfers:
            if transfer.part is None or transfer.part.is_first_hop:
                self.complete.pop(transfer.source, None)


class LaneMail:
    """Posts the rounds of messages of one member of a lane, in one forward or backward.

    Args:
        channel: of all lanes of the layer.
    """

    def __init__(self, ring: Ring, channel: Channel) -> None:
        self._ring, self._channel = ring, channel
        self._pending: dict[int, PendingReceives] = defaultdict(lambda: NOTHING)
        self._sends_now = False  # the round that was posted last has sends
        # By the step before which they must arrive: the blocks to which a transfer belongs, the transfer, its memory.
        self._arriving: dict[int, list[tuple[KVBlocks, Transfer, list[Tensor]]]] = defaultdict(list)

    def post(self, step: int, *traffic: tuple[Round, KVBlocks]) -> None:
        """Post the receives and sends of a step.

        Args:
            traffic: pairs of a round and the container that its blocks are sent from and received into.
        """
        receives, sends = [], []
        for round_, blocks in traffic:
            for transfer in round_.receives:
                block = blocks.space_for(transfer)
                self._arriving[transfer.due].append((blocks, transfer, block))
                receives += self._messages(step, transfer, transfer.sender, block, blocks.tag)
            for transfer in round_.sends:
                sends += self._messages(step, transfer, transfer.receiver, blocks.block_to_send(transfer), blocks.tag)
            blocks.note_sent(round_.sends)
        self._sends_now = bool(sends)
        for step_due, pending in self._channel.post(receives, sends).items():
            self._pending[step_due] = self._pending[step_due] + pending

    @property
    def is_under_way(self) -> bool:
        """Whether messages of the lane travel after a round was posted: its sends, or receives that are still due."""
        return self._sends_now or bool(self._arriving)

    def pending(self, step: int) -> PendingReceives:
        """Return the receives that must end before a step; `NOTHING` if there are none."""
        return self._pending.pop(step, NOTHING)

    def put_away(self, step: int) -> None:
        """Store the blocks that are due before a step. The caller has waited for the receives of `pending`."""
        for blocks, transfer, block in self._arriving.pop(step, ()):
            blocks.store_received(transfer, block)

    def _messages(self, step: int, transfer: Transfer, peer: int, block: list[Tensor], tag: int) -> list[Message]:
        """Return the messages of a transfer, one for each sub-ring."""
        is_far = transfer.due > step + 1
        return [
            Message(tensor, sub.ranks[peer], tag + sub.tag, transfer.due, is_far)
            for tensor, sub in zip(block, self._ring.sub_rings, strict=True)
        ]
