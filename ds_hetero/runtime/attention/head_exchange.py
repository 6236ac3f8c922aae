"""Uneven all-to-all inside a group: a rank's tokens of every head <-> the group's tokens of the rank's own heads.

One exchange carries q, k and v together, one carries the output back; the backward mirrors both. Nothing is padded. A
KV head on a cut between two ranks is sent to both; its two gradients are added on the way back.

Messages are token-major in memory: the parts that a rank receives, in the order of the ranks, are the group's sequence.

Dimension key: s this rank's tokens, S the group's tokens, B batch, H all query heads, G all KV heads, h and g this
rank's query and KV heads after the exchange, D head size, W = h + 2 g.
Source: DeepSpeed-Ulysses (arXiv:2309.14509); uneven form, HexiSeq (arXiv:2605.07569) section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.batch.head_table import HeadTable, Member, members_of
from ds_hetero.runtime.attention.wide_copy import contiguous_rows, copy_rows_
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement


@dataclass(frozen=True)
class Exchange(HeadTable):
    """Tables of the all-to-all of one group for one placement, and its process group."""

    process_group: ProcessGroup | None  # None for a group of one rank, where nothing moves

    def run(self, recv: Tensor, send: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> None:
        """Run one all_to_all_single of flat buffers; a copy in a group of one rank."""
        if self.process_group is None:
            recv.copy_(send)
        else:
            with waiting_for_peers("exchanging heads and tokens in its all-to-all group"):
                dist.all_to_all_single(recv, send, recv_sizes, send_sizes, group=self.process_group)


def make_exchange(replica: Replica, placement: Placement) -> Exchange:
    """Return the tables of this rank's group for a placement; other ranks of its process group exchange nothing."""
    schedule = replica.schedule
    ranks = replica.ranks if replica.a2a_group is replica.sp_group else sorted(replica.group.ranks)
    return Exchange(
        members=members_of(placement, replica.group, ranks),
        index=ranks.index(replica.rank),
        num_heads=schedule.num_heads,
        num_kv_heads=schedule.num_kv_heads,
        process_group=replica.a2a_group,
    )


def gather_sequence(
    q_BHsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of every head for the group's tokens of this rank's heads.

        q [B, H, s, D], k and v [B, G, s, D]
        result: q [B, h, S, D], k and v [B, g, S, D], views of the received buffer [S, B, W, D]

    Kernels read any strides, and a ring copies the keys and values that travel into blocks of its own.

    Collectives: one all_to_all_single.
    Sends: s B D (sum over other ranks of their W) elements.
    """
    batch_size, _, tokens, head_dim = q_BHsD.shape
    member_of_rank = exchange.this_member
    send_sizes, recv_sizes = exchange.qkv_sizes(batch_size * head_dim)
    send = q_BHsD.new_empty(sum(send_sizes))
    # For each member of the group, copy the heads that it gets; for a run of equal members at once.
    for first_member, part in _runs(send, send_sizes, exchange, (tokens, batch_size, head_dim)):
        member = exchange.members[first_member]
        packed = part.permute(1, 2, 0, 3, 4).split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=3)
        sources = (q_BHsD, member.q[0]), (k_BGsD, member.kv[0]), (v_BGsD, member.kv[0])
        for part_sBnhD, (x, start) in zip(packed, sources, strict=True):
            copy_rows_(part_sBnhD, _span(x.permute(2, 0, 1, 3), start, part_sBnhD))
    # The received parts, one behind the other, are the group's sequence.
    recv = send.new_empty(exchange.group_tokens, batch_size, member_of_rank.width, head_dim)
    exchange.run(recv.view(-1), send, recv_sizes, send_sizes)
    q, k, v = _heads(recv, member_of_rank)
    return q, k, v


def scatter_sequence(
    dq_BhSD: Tensor, dk_BgSD: Tensor, dv_BgSD: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs of `gather_sequence` from the gradients of its results.

        dq, dk, dv   [B, h, S, D], [B, g, S, D] and [B, g, S, D]
        result       [B, H, s, D], [B, G, s, D] and [B, G, s, D]

    Collectives: one all_to_all_single.
    """
    batch_size, _, _, head_dim = dq_BhSD.shape
    member_of_rank = exchange.this_member
    recv_sizes, send_sizes = exchange.qkv_sizes(batch_size * head_dim)
    recv = dq_BhSD.new_empty(sum(recv_sizes))
    exchange.run(recv, _pack(dq_BhSD, dk_BgSD, dv_BgSD, member_of_rank), recv_sizes, send_sizes)
    dq_sBHD = recv.new_empty(member_of_rank.tokens, batch_size, exchange.num_heads, head_dim)
    dkv_sBGD = [recv.new_empty(member_of_rank.tokens, batch_size, exchange.num_kv_heads, head_dim) for _ in range(2)]
    parts = dict(_runs(recv, recv_sizes, exchange, (member_of_rank.tokens, batch_size, head_dim)))
    for first_member, num_shared in exchange.shared_kv_heads():
        if first_member not in parts:  # not the first of its run
            continue
        member, part = exchange.members[first_member], parts[first_member].permute(1, 2, 0, 3, 4)
        dq, *dkv = part.split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=3)
        copy_rows_(_span(dq_sBHD, member.q[0], dq), dq)
        for total_sBGD, part_sBngD in zip(dkv_sBGD, dkv, strict=True):
            start = member.kv[0]
            if num_shared:  # an earlier member has these heads too, and has written its part
                total_sBGD[:, :, start : start + num_shared] += part_sBngD[:, :, 0, :num_shared]
            unshared = part_sBngD[:, :, :, num_shared:]
            copy_rows_(_span(total_sBGD, start + num_shared, unshared), unshared)
    dq, dk, dv = (x.permute(1, 2, 0, 3) for x in (dq_sBHD, *dkv_sBGD))
    return dq, dk, dv


def packed_gradients(
    dq_BhSD: Tensor, dk_BgSD: Tensor, dv_BgSD: Tensor, exchange: Exchange, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `scatter_sequence` in ``dtype``; those that are rounded become views of one message.

    Sums of a ring are float32, so one pass rounds and packs them. Gradients that have the type already are returned as
    they are, and packed when the tensors that attention has saved are free.
    """
    grads = dq_BhSD, dk_BgSD, dv_BgSD
    if exchange.process_group is None or all(x.dtype == dtype for x in grads):
        dq, dk, dv = (x.to(dtype) for x in grads)
    else:
        dq, dk, dv = _heads(_empty_message(dq_BhSD, exchange.this_member, dtype), exchange.this_member)
        for part, x in zip((dq, dk, dv), grads, strict=True):
            part.copy_(x)
    return dq, dk, dv


def _pack(q_BhSD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, member_of_rank: Member) -> Tensor:
    """Return q, k and v as the flat buffer that is sent, [S, B, W, D] in memory; a copy unless they are views of it."""
    packed = _message_of(q_BhSD, k_BgSD, v_BgSD, member_of_rank)
    if packed is None:
        packed = _empty_message(q_BhSD, member_of_rank, q_BhSD.dtype)
        for part, x in zip(_heads(packed, member_of_rank), (q_BhSD, k_BgSD, v_BgSD), strict=True):
            copy_rows_(part, x)
    return packed.view(-1)


def _empty_message(q_BhSD: Tensor, member_of_rank: Member, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised buffer [S, B, W, D] for the heads of a rank, on the device of q."""
    batch_size, _, tokens, head_dim = q_BhSD.shape
    return q_BhSD.new_empty(tokens, batch_size, member_of_rank.width, head_dim, dtype=dtype)


def _message_of(q_BhSD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, member_of_rank: Member) -> Tensor | None:
    """Return the buffer [S, B, W, D] of which q, k and v are the heads, as `_heads` returns them; None otherwise."""
    batch_size, _, tokens, head_dim = q_BhSD.shape
    width, offset = member_of_rank.width, q_BhSD.storage_offset()
    end = offset + tokens * batch_size * width * head_dim
    if end * q_BhSD.element_size() > q_BhSD.untyped_storage().nbytes():
        return None
    # The only buffer in which q can have the first heads.
    strides = (batch_size * width * head_dim, width * head_dim, head_dim, 1)
    packed = q_BhSD.as_strided((tokens, batch_size, width, head_dim), strides, offset)
    pairs = zip((q_BhSD, k_BgSD, v_BgSD), _heads(packed, member_of_rank), strict=True)
    are_its_heads = all(_place_of(x) == _place_of(part) for x, part in pairs)
    return packed if are_its_heads else None


def _place_of(x: Tensor) -> tuple[object, ...]:
    """Return where the elements of a tensor lie in memory, and their type."""
    return x.dtype, x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride()


def _runs(
    flat: Tensor, sizes: Sequence[int], exchange: Exchange, shape: tuple[int, int, int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first member of each run of equal members, and the run's part of a buffer, [members, s, B, heads, D].

    Members of a run have equally many heads. A run is copied at once, so that equal shares take as many launches as in
    an even all-to-all. Runs without elements are left out.

    Args:
        flat: the buffer that is sent or received.
        sizes: of each member's part.
        shape: s, B and D.
    """
    begins = (0, *accumulate(sizes))
    for first_member, count in exchange.runs:
        if sizes[first_member]:
            part = flat[begins[first_member] : begins[first_member + count]]
            yield first_member, part.view(count, *shape[:2], -1, shape[2])


def _span(x_sBHD: Tensor, start: int, like_sBnhD: Tensor) -> Tensor:
    """Return the heads of x from ``start`` on that the members of a run have, as a view with the shape of ``like``."""
    count, heads = like_sBnhD.shape[2:4]
    return x_sBHD[:, :, start : start + count * heads].view(*x_sBHD.shape[:2], count, heads, x_sBHD.shape[3])


def _heads(packed_SBWD: Tensor, member: Member) -> Sequence[Tensor]:
    """Return views q [B, h, S, D], k and v [B, g, S, D] of a received buffer."""
    return packed_SBWD.permute(1, 2, 0, 3).split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=1)


def scatter_output(out_SBhD: Tensor, exchange: Exchange) -> Tensor:
    """Exchange the outputs of this rank's heads [S, B, h, D] for all heads of this rank's tokens [B, s, H, D].

    Collectives: one all_to_all_single.
    """
    batch_size, head_dim = out_SBhD.shape[1], out_SBhD.shape[3]
    member_of_rank = exchange.this_member
    if exchange.process_group is None:
        return contiguous_rows(out_SBhD.transpose(0, 1))
    send_sizes, recv_sizes = exchange.output_sizes(batch_size * head_dim)
    recv = out_SBhD.new_empty(sum(recv_sizes))
    exchange.run(recv, out_SBhD.reshape(-1), recv_sizes, send_sizes)
    out_BsHD = recv.new_empty(batch_size, member_of_rank.tokens, exchange.num_heads, head_dim)
    for first_member, part in _runs(recv, recv_sizes, exchange, (member_of_rank.tokens, batch_size, head_dim)):
        part_sBnhD = part.permute(1, 2, 0, 3, 4)
        first_head = exchange.members[first_member].q[0]
        copy_rows_(_span(out_BsHD.transpose(0, 1), first_head, part_sBnhD), part_sBnhD)
    return out_BsHD


def gather_output_heads(grad_BsHD: Tensor, exchange: Exchange) -> Tensor:
    """Return the gradient [S, B, h, D] of the input of `scatter_output` from its result's gradient [B, s, H, D].

    Collectives: one all_to_all_single.
    """
    batch_size, tokens, _, head_dim = grad_BsHD.shape
    member_of_rank = exchange.this_member
    if exchange.process_group is None:
        return grad_BsHD.transpose(0, 1)
    recv_sizes, send_sizes = exchange.output_sizes(batch_size * head_dim)
    send = grad_BsHD.new_empty(sum(send_sizes))
    for first_member, part in _runs(send, send_sizes, exchange, (tokens, batch_size, head_dim)):
        part_sBnhD = part.permute(1, 2, 0, 3, 4)
        first_head = exchange.members[first_member].q[0]
        copy_rows_(part_sBnhD, _span(grad_BsHD.transpose(0, 1), first_head, part_sBnhD))
    recv = grad_BsHD.new_empty(exchange.group_tokens, batch_size, member_of_rank.num_q, head_dim)
    exchange.run(recv.view(-1), send, recv_sizes, send_sizes)
    return recv
