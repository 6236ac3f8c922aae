"""Compare attention over the ranks of a replica with its definition in float64, on this rank's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.reference import dense_attention
from ds_hetero.runtime.documents import Documents, rows_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement, stream_placement

# Query rows whose scores are in memory at a time: with 4 heads and 8,256 keys 0.27 GB in float64, beside some copies.
_QUERY_ROWS_AT_A_TIME = 1024

# Largest error that passes, as a fraction of the largest entry. Kernels and ranks add up in another order than the
# definition; in 16-bit types inputs, outputs and gradients are rounded a few times, too.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """What a kernel is tried on: the options of an attention layer, dtype, head size, and documents of the sequence."""

    spec: AttentionSpec  # of the layer, without sinks
    dtype: torch.dtype  # of q, k, v and the output
    head_dim: int  # D
    documents: Documents | None = None  # [start, stop) of each document in the sequence; None for a single one
    with_sinks: bool = False  # whether every head has a sink


class _WholeTensors(NamedTuple):
    """Inputs of attention for all tokens of the sequence, the same on every rank; ``[1, heads, tokens, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor  # gradient of the output
    sinks: Tensor | None  # [H]


def largest_error(
    case: AttentionCase, replica: Replica, length: int, device: torch.device, placement: Placement | None = None
) -> float:
    """Return the largest error of this rank's output and gradients, as a fraction of the largest entry.

    The output is compared with the largest entry of the output, dq, dk and dv with the largest entry of all three.
    A NaN in any of them is returned as NaN. A rank without tokens returns 0.

    Args:
        length: tokens of the sequence.
        placement: which rank holds which tokens; its spans are the case's documents. None to derive it from the
            replica's schedule and ``length``.

    Caller: every rank of the replica.
    Collectives: those of `attention`, forward and backward.
    """
    placement = stream_placement(replica.schedule, length) if placement is None else placement
    documents = case.documents or ((0, length),)
    layout = batch_layout(placement, rows_of([documents]))
    full_inputs = _whole_tensors(case, replica, length, device)
    expected = _expected(case, documents, full_inputs)
    positions = torch.tensor(placement.positions(replica.rank), dtype=torch.long, device=device)
    q, k, v = (
        x.index_select(2, positions).detach().requires_grad_() for x in (full_inputs.q, full_inputs.k, full_inputs.v)
    )
    out = attention(q, k, v, replica, layout, replace(case.spec, sinks=full_inputs.sinks))
    torch.autograd.backward(out, full_inputs.dout.index_select(2, positions).transpose(1, 2))
    computed = [out.detach().transpose(1, 2), q.grad, k.grad, v.grad]
    # dq is 0 where a query sees one key, and its computed value is then the rounding of dP. So the three gradients
    # share one scale.
    expected_out, *expected_gradients = expected
    largest_gradient = max(x.abs().max() for x in expected_gradients)
    scales = [expected_out.abs().max(), largest_gradient, largest_gradient, largest_gradient]
    errors = []
    for local, full, scale in zip(computed, expected, scales, strict=True):
        if local is not None and local.numel():
            difference = local.double() - full.index_select(2, positions)
            errors.append(float(difference.abs().max() / scale))
    # `max` alone would skip a NaN that is not the first error.
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=0.0)


def _whole_tensors(case: AttentionCase, replica: Replica, length: int, device: torch.device) -> _WholeTensors:
    """Draw q, k, v and the gradient of the output, equal on all ranks, and make the sinks if the case has some."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = replica.schedule.num_heads, replica.schedule.num_kv_heads
    q, k, v, dout = (
        torch.randn(1, heads, length, case.head_dim, generator=generator).to(device, case.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    sinks = torch.linspace(-1, 1, num_heads, device=device, dtype=case.dtype) if case.with_sinks else None
    return _WholeTensors(q, k, v, dout, sinks)


def _expected(case: AttentionCase, documents: Documents, full_inputs: _WholeTensors) -> list[Tensor]:
    """Compute output, dq, dk and dv for all tokens in float64, some query rows at a time."""
    q, k, v = (x.double().requires_grad_() for x in (full_inputs.q, full_inputs.k, full_inputs.v))
    visible = _visible(case.spec, documents, q.shape[2], q.device)
    sinks_H = None if full_inputs.sinks is None else full_inputs.sinks.double()
    out_by_rows = []
    for rows in torch.split(torch.arange(q.shape[2], device=q.device), _QUERY_ROWS_AT_A_TIME):
        out = dense_attention(q.index_select(2, rows), k, v, visible[rows], softcap=case.spec.softcap, sinks_H=sinks_H)
        torch.autograd.backward(out, full_inputs.dout.double().index_select(2, rows))
        out_by_rows.append(out.detach())
    gradients = [x.grad for x in (q, k, v) if x.grad is not None]
    return [torch.cat(out_by_rows, dim=2), *gradients]


def _visible(spec: AttentionSpec, documents: Documents, length: int, device: torch.device) -> Tensor:
    """Return the mask ``[queries, keys]``: True for keys of the query's document, before it, and inside the window."""
    document_by_token = torch.empty(length, dtype=torch.long, device=device)
    for index, (start, stop) in enumerate(documents):
        document_by_token[start:stop] = index
    position = torch.arange(length, device=device)
    visible = document_by_token[:, None] == document_by_token[None, :]
    if spec.causal:
        visible &= position[None, :] <= position[:, None]
    if spec.window is not None:
        visible &= position[None, :] > position[:, None] - spec.window
    return visible
