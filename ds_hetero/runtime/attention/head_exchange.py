"""Ragged all-to-all inside a group: a rank's tokens of every head <-> the group's tokens of its own heads.

One exchange carries q, k and v together, one carries the output back; the backward is the mirror image. Nothing is
padded. A KV head that lies on a cut travels to both sides; its two gradients are added on the way back.

The wire layout is token-major: what a rank receives from the others, in order of rank, already is the group's sequence.

Dimension key: s this rank's tokens, S the group's tokens, B batch, H all query heads, G all KV heads, h and g this
rank's query and KV heads after the exchange, D head size, W = h + 2 g.
Source: DeepSpeed-Ulysses (arXiv:2309.14509); uneven form, HexiSeq (arXiv:2605.07569) section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.batch.head_table import HeadTable, Member, members_of
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement


@dataclass(frozen=True)
class Exchange(HeadTable):
    """Split tables of one group for one placement, and the process group that it trades in."""

    process_group: ProcessGroup | None  # None where the rank is alone; then nothing moves

    def run(self, recv: Tensor, send: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> None:
        """One all_to_all_single of flat buffers; a copy where the rank is alone."""
        if self.process_group is None:
            recv.copy_(send)
        else:
            with waiting_for_peers("exchanging heads and tokens in its all-to-all group"):
                dist.all_to_all_single(recv, send, recv_sizes, send_sizes, group=self.process_group)


def make_exchange(replica: Replica, placement: Placement) -> Exchange:
    """Tables of this rank's group for a batch; other ranks of the process group trade nothing with it."""
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
    """Trade this rank's tokens of every head for the group's tokens of this rank's heads.

        q [B, H, s, D], k and v [B, G, s, D]
        result: q [B, h, S, D], k and v [B, g, S, D], each contiguous, as kernels like them and the ring sends them

    Collectives: one all_to_all_single.
    Sends: s B D (sum over other ranks of their W) elements.
    """
    batch_size, _, tokens, head_dim = q_BHsD.shape
    own = exchange.own
    send_sizes, recv_sizes = exchange.qkv_sizes(batch_size * head_dim)
    send = q_BHsD.new_empty(sum(send_sizes))
    for first, part in _runs(send, send_sizes, exchange, (tokens, batch_size, head_dim)):
        member = exchange.members[first]
        packed = part.permute(1, 2, 0, 3, 4).split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=3)
        sources = (q_BHsD, member.q[0]), (k_BGsD, member.kv[0]), (v_BGsD, member.kv[0])
        for part_sBnhD, (x, start) in zip(packed, sources, strict=True):
            part_sBnhD.copy_(_span(x.permute(2, 0, 1, 3), start, part_sBnhD))
    recv = send.new_empty(exchange.group_tokens, batch_size, own.width, head_dim)
    exchange.run(recv.view(-1), send, recv_sizes, send_sizes)
    q, k, v = (x.contiguous() for x in _heads(recv, own))
    return q, k, v


def scatter_sequence(
    dq_BhSD: Tensor, dk_BgSD: Tensor, dv_BgSD: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Mirror of `gather_sequence`: to dq [B, H, s, D], dk and dv [B, G, s, D]. Collectives: one all_to_all_single."""
    batch_size, _, _, head_dim = dq_BhSD.shape
    own = exchange.own
    recv_sizes, send_sizes = exchange.qkv_sizes(batch_size * head_dim)
    recv = dq_BhSD.new_empty(sum(recv_sizes))
    exchange.run(recv, _pack(dq_BhSD, dk_BgSD, dv_BgSD, own), recv_sizes, send_sizes)
    dq_sBHD = recv.new_empty(own.tokens, batch_size, exchange.num_heads, head_dim)
    dkv_sBGD = [recv.new_empty(own.tokens, batch_size, exchange.num_kv_heads, head_dim) for _ in range(2)]
    parts = dict(_runs(recv, recv_sizes, exchange, (own.tokens, batch_size, head_dim)))
    for first, shared in exchange.shared_kv_heads():
        if first not in parts:  # not the first of its run
            continue
        member, part = exchange.members[first], parts[first].permute(1, 2, 0, 3, 4)
        dq, *dkv = part.split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=3)
        _span(dq_sBHD, member.q[0], dq).copy_(dq)
        for total_sBGD, part_sBngD in zip(dkv_sBGD, dkv, strict=True):
            start = member.kv[0]
            if shared:
                total_sBGD[:, :, start : start + shared] += part_sBngD[:, :, 0, :shared]
            rest = part_sBngD[:, :, :, shared:]
            _span(total_sBGD, start + shared, rest).copy_(rest)
    dq, dk, dv = (x.permute(1, 2, 0, 3) for x in (dq_sBHD, *dkv_sBGD))
    return dq, dk, dv


def _pack(q_BhSD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, own: Member) -> Tensor:
    """Return a flat buffer [S, B, W, D] as it travels."""
    batch_size, _, tokens, head_dim = q_BhSD.shape
    packed = q_BhSD.new_empty(tokens, batch_size, own.width, head_dim)
    for part, x in zip(_heads(packed, own), (q_BhSD, k_BgSD, v_BgSD), strict=True):
        part.copy_(x)
    return packed.view(-1)


def _runs(
    flat: Tensor, sizes: Sequence[int], exchange: Exchange, shape: tuple[int, int, int]
) -> Iterator[tuple[int, Tensor]]:
    """First member of every run that has something, and the run's part of a flat buffer: [members, s, B, heads, D].

    One copy serves a run, so that equal shares take as many launches as in an exchange that knows nothing else.

    Args:
        shape: s, B and D.
    """
    begins = (0, *accumulate(sizes))
    for first, count in exchange.runs:
        if sizes[first]:
            part = flat[begins[first] : begins[first + count]]
            yield first, part.view(count, *shape[:2], -1, shape[2])


def _span(x_sBHD: Tensor, start: int, like_sBnhD: Tensor) -> Tensor:
    """View of the heads from ``start`` on, as many as ``like`` has: [s, B, members, heads, D]."""
    count, heads = like_sBnhD.shape[2:4]
    return x_sBHD[:, :, start : start + count * heads].view(*x_sBHD.shape[:2], count, heads, x_sBHD.shape[3])


def _heads(packed_SBWD: Tensor, member: Member) -> Sequence[Tensor]:
    """Views q [B, h, S, D], k and v [B, g, S, D] of a buffer as it travels."""
    return packed_SBWD.permute(1, 2, 0, 3).split_with_sizes([member.num_q, member.num_kv, member.num_kv], dim=1)


def scatter_output(out_SBhD: Tensor, exchange: Exchange) -> Tensor:
    """Back to this rank's tokens of every head: [S, B, h, D] to [B, s, H, D]. Collectives: one all_to_all_single."""
    batch_size, head_dim = out_SBhD.shape[1], out_SBhD.shape[3]
    own = exchange.own
    if exchange.process_group is None:
        return out_SBhD.transpose(0, 1).contiguous()
    send_sizes, recv_sizes = exchange.output_sizes(batch_size * head_dim)
    recv = out_SBhD.new_empty(sum(recv_sizes))
    exchange.run(recv, out_SBhD.reshape(-1), recv_sizes, send_sizes)
    out_BsHD = recv.new_empty(batch_size, own.tokens, exchange.num_heads, head_dim)
    for first, part in _runs(recv, recv_sizes, exchange, (own.tokens, batch_size, head_dim)):
        part_sBnhD = part.permute(1, 2, 0, 3, 4)
        _span(out_BsHD.transpose(0, 1), exchange.members[first].q[0], part_sBnhD).copy_(part_sBnhD)
    return out_BsHD


def gather_output_heads(grad_BsHD: Tensor, exchange: Exchange) -> Tensor:
    """Mirror of `scatter_output` for gradients: [B, s, H, D] to [S, B, h, D]. Collectives: one all_to_all_single."""
    batch_size, tokens, _, head_dim = grad_BsHD.shape
    own = exchange.own
    if exchange.process_group is None:
        return grad_BsHD.transpose(0, 1)
    recv_sizes, send_sizes = exchange.output_sizes(batch_size * head_dim)
    send = grad_BsHD.new_empty(sum(send_sizes))
    for first, part in _runs(send, send_sizes, exchange, (tokens, batch_size, head_dim)):
        part_sBnhD = part.permute(1, 2, 0, 3, 4)
        part_sBnhD.copy_(_span(grad_BsHD.transpose(0, 1), exchange.members[first].q[0], part_sBnhD))
    recv = grad_BsHD.new_empty(exchange.group_tokens, batch_size, own.num_q, head_dim)
    exchange.run(recv.view(-1), send, recv_sizes, send_sizes)
    return recv
