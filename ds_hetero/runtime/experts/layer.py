"""A layer of experts whose weights are divided among the ranks of a replica.

A token is sent once for each of its k experts, as k rows. Sorted by expert, the rows for one rank are contiguous. They
travel to the ranks of their experts, are computed there, and travel back. The router's weights are applied where the
tokens are. No row is dropped, however many a rank gets.

Dimension key: T tokens of this rank, k experts of a token, H hidden size, M rows that this rank's experts get.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.experts.exchange import exchange_counts, send_rows
from ds_hetero.values.splits import Split

RunLocal = Callable[[Tensor, Tensor], Tensor]
"""Runs this rank's experts: takes rows [M, H] and the local expert of each [M], returns [M, H]."""

NoteRows = Callable[[list[int]], None]
"""Takes the rows that each of this rank's experts gets in a call of the layer."""


def run_placed_experts(
    tokens_TH: Tensor,
    expert_ids_Tk: Tensor,
    weights_Tk: Tensor,
    run_local: RunLocal,
    experts: Split,
    group: ProcessGroup,
    *,
    trains_experts: bool = True,
    note_rows: NoteRows | None = None,
) -> Tensor:
    """Compute the weighted sum of each token's experts, wherever the experts are.

        tokens_TH       [T, H]; T may be 0
        expert_ids_Tk   [T, k] int64, of the whole layer's experts
        weights_Tk      [T, k], the router's
        result          [T, H]

    Args:
        run_local: computes this rank's experts; not called if no row arrives.
        experts: experts of each rank of ``group``; zero is allowed.
        trains_experts: whether the experts' weights need gradients; the same on every rank.
        note_rows: is told how many rows the experts get; the host knows these numbers anyway.

    Caller: every rank of the group, also one without tokens or without experts.
    Collectives: forward those of `exchange_counts` and two of `send_rows`; backward two of `send_rows`.
    Gradients: those of this rank's experts are sums over the tokens of all ranks, so they are not to be added up over
        the group.
    Source: GShard (arXiv:2006.16668), section 3; here with experts in unequal numbers and without a capacity.
    """
    num_chosen = expert_ids_Tk.shape[1]
    if trains_experts and torch.is_grad_enabled() and not tokens_TH.requires_grad:
        # Ranks that get no row use no weight. Without this, the messages would be in the graph of some ranks only.
        tokens_TH = tokens_TH.detach().requires_grad_()
    sorted_ids_N, order_N = torch.sort(expert_ids_Tk.reshape(-1), stable=True)
    counts = exchange_counts(sorted_ids_N, experts, group)
    if note_rows is not None:
        note_rows(counts.by_expert)
    rows_NH = tokens_TH.index_select(0, order_N // num_chosen)
    rows_MH = send_rows(rows_NH, counts.send, counts.receive, group)
    # Without a row the experts stay out of the graph, but the rows are in it: the backward of both messages runs on
    # every rank.
    outputs_MH = run_local(rows_MH, counts.local_ids_M) if len(rows_MH) else rows_MH
    outputs_NH = send_rows(outputs_MH, counts.receive, counts.send, group)
    outputs_TkH = outputs_NH.index_select(0, order_N.argsort()).view(*expert_ids_Tk.shape, tokens_TH.shape[1])
    weighted_TH = (outputs_TkH * weights_Tk.unsqueeze(-1)).sum(dim=1)
    return weighted_TH.to(tokens_TH.dtype)
