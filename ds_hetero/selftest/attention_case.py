"""A case of attention, and how far this rank's part of it is from the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.reference import dense_attention
from ds_hetero.runtime.documents import Documents, rows_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement, stream_placement

_ROWS_OF_SCORES = 1024  # of scores in memory: of 4 heads and 8,256 keys 0.27 GB in float64, beside some copies

# Of the largest entry. Sums in another order, and for 16-bit types a few roundings of inputs, outputs and gradients.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class Case:
    """Case of attention."""

    spec: AttentionSpec  # of the layer, without sinks
    dtype: torch.dtype
    head_dim: int  # D
    documents: Documents | None = None  # of the one row; None for one document
    with_sinks: bool = False  # a sink for every head


def largest_error(
    case: Case, replica: Replica, length: int, device: torch.device, placement: Placement | None = None
) -> float:
    """Error of this rank's part of output and gradients, relative to the largest entry of each.

    Args:
        placement: of the batch, whose spans are the case's documents; None to cut it by its length.

    Caller: every rank of the replica.
    Collectives: those of `attention`, forward and backward.
    """
    placement = stream_placement(replica.schedule, length) if placement is None else placement
    documents = case.documents or ((0, length),)
    layout = batch_layout(placement, rows_of([documents]))
    whole, sinks = _tensors(case, replica, length, device)
    expected = _expected(case, documents, whole, sinks)
    mine = torch.tensor(placement.positions(replica.rank), dtype=torch.long, device=device)
    q, k, v = (x.index_select(2, mine).detach().requires_grad_() for x in whole[:3])
    out = attention(q, k, v, replica, layout, replace(case.spec, sinks=sinks))
    torch.autograd.backward(out, whole[3].index_select(2, mine).transpose(1, 2))
    found = [out.detach().transpose(1, 2), q.grad, k.grad, v.grad]
    # Where a query sees one key dq is 0, and what is computed is the rounding of dP: gradients share one scale.
    largest_gradient = max(x.abs().max() for x in expected[1:])
    scales = [expected[0].abs().max(), largest_gradient, largest_gradient, largest_gradient]
    errors = [
        (have.double() - want.index_select(2, mine)).abs().max() / scale
        for have, want, scale in zip(found, expected, scales, strict=True)
        if have is not None and have.numel()
    ]
    return max((float(error) for error in errors), default=0.0)


def _tensors(
    case: Case, replica: Replica, length: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Return whole q, k, v and gradient of the output, alike on all ranks, and the sinks."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = replica.schedule.num_heads, replica.schedule.num_kv_heads
    q, k, v, dout = (
        torch.randn(1, heads, length, case.head_dim, generator=generator).to(device, case.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    sinks = torch.linspace(-1, 1, num_heads, device=device, dtype=case.dtype) if case.with_sinks else None
    return (q, k, v, dout), sinks


def _expected(
    case: Case, documents: Documents, whole: tuple[Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None
) -> list[Tensor]:
    """Output, dq, dk and dv of the whole sequence in float64, some rows of scores at a time."""
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    number = torch.empty(q.shape[2], dtype=torch.long, device=q.device)
    for index, (start, stop) in enumerate(documents):
        number[start:stop] = index
    at = torch.arange(q.shape[2], device=q.device)
    visible = number[:, None] == number[None, :]
    if case.spec.causal:
        visible &= at[None, :] <= at[:, None]
    if case.spec.window is not None:
        visible &= at[None, :] > at[:, None] - case.spec.window
    wide_sinks = None if sinks is None else sinks.double()
    parts = []
    for rows in torch.split(torch.arange(q.shape[2], device=q.device), _ROWS_OF_SCORES):
        out = dense_attention(
            q.index_select(2, rows), k, v, visible[rows], softcap=case.spec.softcap, sinks_H=wide_sinks
        )
        torch.autograd.backward(out, whole[3].double().index_select(2, rows))
        parts.append(out.detach())
    gradients = [x.grad for x in (q, k, v) if x.grad is not None]
    return [torch.cat(parts, dim=2), *gradients]
