"""Run the engine's ring with all its ranks in one process: a thread for each, and copies in place of messages.

`ring_forward` and `ring_backward` themselves run; only their channel is replaced. All threads launch on one stream, so
the time is that of all ranks' work, one after the other, without communication except copies.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor

from ds_hetero.runtime.attention import ring as engine_ring
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.channel import Message, PendingReceives
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores
from ds_hetero.runtime.attention.lane_passes import RingContext
from ds_hetero.runtime.attention.ring import ring_backward, ring_forward
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Rows, stream_placement

T = TypeVar("T")
_LATE_S = 60.0  # a message that does not come by then was not sent


class _Place(NamedTuple):
    """Replacement of a process group: this rank, and the messages that wait."""

    rank: int
    mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]]  # by sender, receiver and tag


class _LocalReceive:
    """A message to be copied."""

    def __init__(self, message: Message, place: _Place) -> None:
        self._tensor, self._key, self._mail = message.tensor, (message.peer, place.rank, message.tag), place.mail

    def wait(self) -> None:
        self._tensor.copy_(self._mail[self._key].get(timeout=_LATE_S))


class LocalChannel:
    """A `ds_hetero.runtime.attention.channel.Channel` that copies a message when it is waited for."""

    keeps_order = True

    def __init__(self, groups: Any) -> None:
        self._place: _Place = groups

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Deliver the sends; every receive is copied when it is waited for."""
        for message in sends:
            self._place.mail[self._place.rank, message.peer, message.tag].put(message.tensor)
        pending: dict[int, list[Any]] = defaultdict(list)
        for message in receives:
            pending[message.due].append(_LocalReceive(message, self._place))
        return {due: PendingReceives(of_step) for due, of_step in pending.items()}

    def finish(self) -> None:
        """Return at once: every message was copied when it was waited for."""


class LocalRing:
    """All ranks of a zigzag ring of ``size``, which together hold [B, H, S, D] tensors of a whole sequence.

    Args:
        tensors: q, k, v and dout of all positions.
    """

    def __init__(self, kernel: AttentionKernel, size: int, tensors: Sequence[Tensor]) -> None:
        heads, tokens, head_dim = tensors[0].shape[1:]
        schedule = ring(size, heads, tensors[1].shape[1])
        placement = stream_placement(schedule, tokens, (Rows(0, 1, ((0, tokens),)),))
        layout = batch_layout(placement, placement.rows)
        self._positions = [torch.tensor(placement.positions(rank), device=tensors[0].device) for rank in range(size)]
        # As the exchange of heads hands them over: contiguous.
        self._shards = [[x.index_select(2, at) for x in tensors] for at in self._positions]
        mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self._contexts = [
            RingContext(
                layout.rings(rank, True, None),
                _Place(rank, mail),  # type: ignore[arg-type]
                kernel,
                Scores(head_dim**-0.5),
            )
            for rank in range(size)
        ]

    def forward(self) -> list[tuple[Tensor, Tensor, list[list[Tensor]]]]:
        """Return (out, lse, kept) of every rank."""
        return self._on_all_ranks(lambda rank: ring_forward(*self._shards[rank][:3], self._contexts[rank]))

    def forward_and_backward(self) -> list[tuple[Tensor, ...]]:
        """Return (out, dq, dk, dv) of every rank."""

        def both(rank: int) -> tuple[Tensor, ...]:
            q, k, v, dout = self._shards[rank]
            out, lse, remote_blocks = ring_forward(q, k, v, self._contexts[rank])
            saved = SavedForward(q, k, v, out, lse)
            return out, *ring_backward(dout, saved, remote_blocks, self._contexts[rank])

        return self._on_all_ranks(both)

    def whole(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Put tensors of all ranks, [B, H, s, D] each, back in order of position."""
        parts = torch.cat(list(by_rank), dim=2)
        return torch.empty_like(parts).index_copy_(2, torch.cat(self._positions), parts)

    def _on_all_ranks(self, work: Callable[[int], T]) -> list[T]:
        def without_grad(rank: int) -> T:
            with torch.no_grad():  # which is a thread's own
                return work(rank)

        size = len(self._contexts)
        with mock.patch.object(engine_ring, "Channel", LocalChannel), ThreadPoolExecutor(size) as threads:
            return list(threads.map(without_grad, range(size)))
