"""Uneven all-to-all of rows between the tokens' ranks and their experts' ranks, with its backward.

    counts = exchange_counts(ids_N, experts, group)          how many rows travel, the one number the host waits for
    rows_MH = send_rows(rows_NH, counts.send, counts.receive, group)      to the experts
    rows_NH = send_rows(rows_MH, counts.receive, counts.send, group)      and back

The two directions are each other's adjoint, so each is the backward of the other.

Dimension key: N rows of this rank's tokens, one for each expert that a token has chosen; M rows that this rank's
experts get; H hidden size; E experts of the layer; e experts of this rank; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_clock import ALL_TO_ALL, running_clock
from ds_hetero.values.splits import Split


@dataclass(frozen=True, eq=False)
class RowCounts:
    """How many rows travel between this rank and every rank of the group, for one call of a layer.

    Attributes:
        send: rows that this rank's tokens send to each rank's experts.
        receive: rows that this rank's experts get from each rank.
        local_ids_M: expert of every received row, counted from this rank's first expert.
        by_expert: rows that each of this rank's experts gets.
    """

    send: list[int]
    receive: list[int]
    local_ids_M: Tensor
    by_expert: list[int]


def exchange_counts(sorted_ids_N: Tensor, experts: Split, group: ProcessGroup) -> RowCounts:
    """Tell every rank how many rows each of its experts will get from this rank.

        sorted_ids_N    [N] int64, ascending, of the whole layer's experts

    Args:
        experts: experts of each rank of ``group``; zero is allowed.

    Caller: every rank of the group, once for each call of the layer.
    Collectives: one all_to_all_single of E integers. The host waits for the device once, since the sizes of the next
        messages are needed on the host.
    """
    num_local = experts.sizes[dist.get_rank(group)]
    device = sorted_ids_N.device
    # bincount would wait for the device a second time: on GPUs it reads the largest id first.
    bounds = torch.searchsorted(sorted_ids_N, torch.arange(experts.total + 1, device=device))
    counts_E = bounds.diff()
    counts_Re = counts_E.new_empty(len(experts.sizes) * num_local)
    with waiting_for_peers("telling experts how many tokens they get"):
        dist.all_to_all_single(counts_Re, counts_E, [num_local] * len(experts.sizes), list(experts.sizes), group=group)
    on_host: list[int] = torch.cat([counts_E, counts_Re]).tolist()
    to_experts, from_ranks = on_host[: experts.total], on_host[experts.total :]
    send = [sum(to_experts[start:stop]) for start, stop in experts.ranges]
    receive = [sum(from_ranks[i * num_local : (i + 1) * num_local]) for i in range(len(experts.sizes))]
    # Rows arrive by rank, and those of a rank by expert: [0, 0, 1 | 0, 1, 1] for experts 0 and 1 of two ranks' rows.
    ids_Re = torch.arange(num_local, device=device).repeat(len(experts.sizes))
    by_expert = [sum(from_ranks[expert::num_local]) for expert in range(num_local)]
    return RowCounts(send, receive, ids_Re.repeat_interleave(counts_Re, output_size=sum(receive)), by_expert)


def send_rows(rows_NH: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send rows to the ranks of a group, and return the rows that this rank gets, by sender.

        rows_NH     [sum(send), H], by receiver
        result      [sum(receive), H], by sender

    Caller: every rank of the group, also one that sends and receives nothing.
    Collectives: one all_to_all_single forward, one backward with ``send`` and ``receive`` exchanged.
    Sends: (sum(send) - send[own rank]) * H * itemsize bytes to other ranks, forward; as much is received backward.
    """
    result: Tensor = _SendRows.apply(rows_NH, send, receive, group)  # type: ignore[no-untyped-call]
    return result


class _SendRows(torch.autograd.Function):
    """See `send_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _send(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _send(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Run the all-to-all of `send_rows`."""
    received = rows.new_empty(sum(receive), rows.shape[1])
    with running_clock().phase(ALL_TO_ALL, "experts"), waiting_for_peers("exchanging tokens with experts"):
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
