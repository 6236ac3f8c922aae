"""Sub-ring attention: groups trade KV in a ring, each sub-ring over one contiguous range of heads.

Forward step t attends to the KV of the group t positions back, while the KV of step t + 1 travels. Backward walks the
ring the other way round: the last remote KV of the forward is still held, and partial dK/dV come home under the local
block. There is no barrier: a rank waits for what it receives and, at the end, for what it sent.

Partial results are merged by log-sum-exp in fp32, and partial dK/dV travel in fp32.

Dimension key: B batch, S tokens of this group, h query heads of this rank, g its KV heads, n travelling tokens,
D head size. A block of KV is a list with one [2, B, heads, n, D] tensor per sub-ring, keys and values.
Source: Ring Attention (arXiv:2310.01889); sub-rings, HexiSeq (arXiv:2605.07569) section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.attention.channel import Channel, Message, PendingReceives
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores, merge_
from ds_hetero.runtime.attention.ring_steps import KernelCall, Ring, Round, sent_after
from ds_hetero.runtime.attention.ring_table import Transfer
from ds_hetero.runtime.step_clock import ATTENTION, RING_WAIT, UNTIMED, Clock

__all__ = ["RingContext", "ring_backward", "ring_forward"]

_GRAD_TAG = 1 << 16  # tags below carry KV, tags above carry its gradient
# Operations a pair of query and key and element of a head: QK^T and PV forward; the scores again, dV, dP, dQ and dK
# backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


@dataclass(frozen=True, slots=True)
class RingContext:
    """What the forward and the backward of one attention layer have in common.

    Args:
        ring: this rank's part in the ring.
        group: process group of the replica, on which messages travel.
        kernel: computes the blocks.
        scores: how scores are made.
        clock: times the phases and counts the operations.
    """

    ring: Ring
    group: ProcessGroup
    kernel: AttentionKernel
    scores: Scores
    clock: Clock = UNTIMED


def ring_forward(q: Tensor, k: Tensor, v: Tensor, context: RingContext) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of this group's tokens to the whole sequence, for this rank's heads.

        q [B, h, S, D], k and v [B, g, S, D]
        out [B, h, S, D], laid out token-major; lse [B, h, S] in fp32 (fp64 for fp64), -inf where nothing is visible
        kept: the remote KV of the last step for `ring_backward`; may be empty

    Caller: every rank of the replica, in the forward of `attention`.
    Messages: one KV block per sub-ring and round to the next group that needs it.
    """
    ring, clock = context.ring, context.clock
    clock.count_attention(_FORWARD_FLOPS * ring.pairs * q.shape[-1], backward=False)
    if call := ring.undivided:
        with clock.phase(ATTENTION, "attention"):
            out, lse = context.kernel.forward(q, k, v, context.scores, call.band)
        return out, lse, []
    with clock.phase(ATTENTION, "attention_begin"):
        out, lse = _empty_result(q)
        held = {ring.position: _pack(k, v, ring)}
        local = _local_kv(k, v, held[ring.position], ring)
    channel = Channel(context.group)
    for step in range(ring.size):
        source, transfers = ring.forward_source(step), ring.forward_rounds[step]
        with clock.phase(ATTENTION, "attention"):
            arriving = {t.source: _block_like(q, ring, t.source, q.dtype) for t in transfers.receives}
            pending = channel.post(_receives(ring, arriving, transfers.receives), _sends(ring, held, transfers.sends))
            for i, calls in enumerate(ring.calls[source]):
                for call in calls:
                    keys, values = local[i] if step == 0 else held[source][i]
                    q_part, k_part, v_part = q[call.queries], keys[call.keys], values[call.keys]
                    part = context.kernel.forward(q_part, k_part, v_part, context.scores, call.band)
                    _accumulate(out, lse, call, *part)
        _wait(pending, clock, transfers)
        if step + 1 < ring.size:  # the KV of the last step is kept for the backward
            held = _only(held, keep=sent_after(ring.forward_rounds, step)) | arriving
    _finish(channel, context)
    return out.to(q.dtype), lse, held.get(ring.forward_source(ring.size - 1), []) if ring.size > 1 else []


def ring_backward(
    dout: Tensor, saved: SavedForward, kept: list[Tensor], context: RingContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `ring_forward`, shaped like q, k, v; in fp32 where they are sums of several parts.

    Args:
        dout: [B, h, S, D].
        saved: q, k, v of this group and the merged out and lse, so that every block's backward is exact by itself.
        kept: from the forward.
        context: of the forward.

    Caller: every rank of the replica, in the backward of `attention`.
    Messages: per sub-ring and round one KV block, and one fp32 dK/dV block the other way round the ring.
    """
    ring, clock = context.ring, context.clock
    clock.count_attention(_BACKWARD_FLOPS * ring.pairs * dout.shape[-1], backward=True)
    if call := ring.undivided:
        with clock.phase(ATTENTION, "attention_backward"):
            return context.kernel.backward(dout, saved, context.scores, call.band)
    with clock.phase(ATTENTION, "attention_backward_begin"):
        backward = _RingBackward(dout, saved, kept, context)
    for step in range(ring.size):
        with clock.phase(ATTENTION, "attention_backward"):
            backward.start_round(step)
            backward.compute(ring.backward_source(step))
        backward.finish_round(step)
    _finish(backward.channel, context)
    return backward.dq, backward.dk, backward.dv


class _RingBackward:
    """One backward on its way round the ring: KV blocks that are held, and partial dK/dV that travel home.

    Every step is `start_round`, `compute`, `finish_round`.
    """

    def __init__(self, dout: Tensor, saved: SavedForward, kept: list[Tensor], context: RingContext) -> None:
        ring = context.ring
        self.channel = Channel(context.group)
        self._dout, self._saved, self._context, self._ring = dout, saved, context, ring
        self._wide = torch.promote_types(saved.q.dtype, torch.float32)
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=self._wide) for x in (saved.q, saved.k, saved.v))
        self._held = {ring.position: _pack(saved.k, saved.v, ring)}
        if kept:
            self._held[(ring.position + 1) % ring.size] = kept
        self._local = _local_kv(saved.k, saved.v, self._held[ring.position], ring)
        self._local_grads = [(self.dk[:, sub.kv_heads], self.dv[:, sub.kv_heads]) for sub in ring.sub_rings]
        self._partial: dict[int, list[Tensor]] = {}  # dK/dV of remote blocks, until the next group takes them over
        self._arriving_kv: dict[int, list[Tensor]] = {}
        self._arriving_grads: dict[int, list[Tensor]] = {}
        self._pending = PendingReceives([])

    def start_round(self, step: int) -> None:
        """Post all messages of a round: the KV of the next step, and the dK/dV to which this step adds."""
        ring, like = self._ring, self._saved.q
        kv, grads = ring.backward_kv_rounds[step], ring.backward_grad_rounds[step]
        self._arriving_kv = {t.source: _block_like(like, ring, t.source, like.dtype) for t in kv.receives}
        self._arriving_grads = {t.source: _block_like(like, ring, t.source, self._wide) for t in grads.receives}
        self._pending = self.channel.post(
            _receives(ring, self._arriving_kv, kv.receives)
            + _receives(ring, self._arriving_grads, grads.receives, _GRAD_TAG),
            _sends(ring, self._held, kv.sends) + _sends(ring, self._partial, grads.sends, _GRAD_TAG),
        )
        for transfer in grads.sends:
            del self._partial[transfer.source]

    def compute(self, source: int) -> None:
        """Add what the queries of this rank give to dq, and to dK/dV of the block of ``source``."""
        ring, saved, is_local = self._ring, self._saved, source == self._ring.position
        if ring.position in ring.table.paths[source]:
            self._partial[source] = [x.zero_() for x in _block_like(saved.q, ring, source, self._wide)]
        for i, calls in enumerate(ring.calls[source]):
            for call in calls:
                keys, values = self._local[i] if is_local else self._held[source][i]
                dkeys, dvalues = self._local_grads[i] if is_local else self._partial[source][i]
                at_q, at_k = call.queries, call.keys
                block = SavedForward(saved.q[at_q], keys[at_k], values[at_k], saved.out[at_q], saved.lse[at_q])
                part = self._context.kernel.backward(self._dout[at_q], block, self._context.scores, call.band)
                self.dq[at_q] += part[0]
                dkeys[at_k] += part[1]
                dvalues[at_k] += part[2]

    def finish_round(self, step: int) -> None:
        """Wait for what arrives, add the dK/dV among it, and let go of the KV that is not sent any more."""
        ring = self._ring
        _wait(self._pending, self._context.clock, ring.backward_kv_rounds[step], ring.backward_grad_rounds[step])
        for source, arrived in self._arriving_grads.items():
            for i, (dkeys_arrived, dvalues_arrived) in enumerate(arrived):
                if source == ring.position:
                    dkeys, dvalues = (x[:, :, ring.columns[source]] for x in self._local_grads[i])
                else:
                    dkeys, dvalues = self._partial[source][i]
                dkeys += dkeys_arrived
                dvalues += dvalues_arrived
        self._arriving_grads = {}
        self._held = _only(self._held, keep=sent_after(ring.backward_kv_rounds, step)) | self._arriving_kv


def _wait(pending: PendingReceives, clock: Clock, *rounds: Round) -> None:
    if any(transfers.receives for transfers in rounds):
        with clock.phase(RING_WAIT, "ring_wait"):
            pending.wait()


def _finish(channel: Channel, context: RingContext) -> None:
    if context.ring.size > 1:
        with context.clock.phase(RING_WAIT, "ring_finish"):
            channel.finish()


def _empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    batch_size, heads, tokens, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, batch_size, heads, head_dim, dtype=wide).permute(1, 2, 0, 3)
    return out, q.new_full((batch_size, heads, tokens), -torch.inf, dtype=wide)


def _accumulate(out: Tensor, lse: Tensor, call: KernelCall, out_part: Tensor, lse_part: Tensor) -> None:
    if call.first:
        out[call.queries], lse[call.queries] = out_part, lse_part
    else:
        merge_(out[call.queries], lse[call.queries], out_part, lse_part)


def _pack(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """This rank's KV as it travels; no tensor if no other group needs it."""
    columns = ring.columns[ring.position]
    if columns.start == columns.stop:
        return []
    return [torch.stack((k[:, sub.kv_heads, columns], v[:, sub.kv_heads, columns])) for sub in ring.sub_rings]


def _local_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the local block, per sub-ring: the packed ones, being contiguous, if they hold all tokens."""
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, sub.kv_heads], v[:, sub.kv_heads]) for sub in ring.sub_rings]


def _block_like(q: Tensor, ring: Ring, source: int, dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised memory for the KV of ``source``, or for its gradient."""
    batch_size, _, _, head_dim = q.shape
    tokens = ring.columns[source].stop - ring.columns[source].start
    return [
        q.new_empty(2, batch_size, sub.kv_heads.stop - sub.kv_heads.start, tokens, head_dim, dtype=dtype)
        for sub in ring.sub_rings
    ]


def _only(blocks: Mapping[int, list[Tensor]], keep: set[int]) -> dict[int, list[Tensor]]:
    return {source: block for source, block in blocks.items() if source in keep}


def _receives(
    ring: Ring, blocks: Mapping[int, list[Tensor]], transfers: Sequence[Transfer], tag: int = 0
) -> list[Message]:
    return [
        Message(blocks[transfer.source][i], sub.ranks[transfer.sender], tag + sub.index)
        for transfer in transfers
        for i, sub in enumerate(ring.sub_rings)
    ]


def _sends(
    ring: Ring, blocks: Mapping[int, list[Tensor]], transfers: Sequence[Transfer], tag: int = 0
) -> list[Message]:
    return [
        Message(blocks[transfer.source][i], sub.ranks[transfer.receiver], tag + sub.index)
        for transfer in transfers
        for i, sub in enumerate(ring.sub_rings)
    ]
