"""`merge_` as one Triton kernel: it reads and writes out and lse once, where six operators do so each.

It is imported late, because Triton decides at its import whether kernels are interpreted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # of one program; chosen, never measured


@triton.jit
def _merge_kernel(
    OUT, LSE, PART, LSE_PART,
    stride_oh, stride_o, stride_ph, stride_p, stride_lh, stride_qh,
    tokens,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a part into OUT [H, Q, D] in fp32; PART [H, Q, D], LSE and LSE_PART [H, Q]; programs (query blocks, H)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < tokens
    lse = tl.load(LSE + head * stride_lh + rows, mask=inside, other=0.0)
    lse_part = tl.load(LSE_PART + head * stride_qh + rows, mask=inside, other=0.0)
    difference = lse_part - tl.maximum(lse, -3.0e38)
    share = 1.0 / (1.0 + tl.exp(-difference))
    top = tl.maximum(lse, lse_part)
    merged = top + tl.log(tl.exp(lse - top) + tl.exp(lse_part - top))
    merged = tl.where(top == -float("inf"), top, merged)
    tl.store(LSE + head * stride_lh + rows, merged, mask=inside)
    columns = tl.arange(0, HEAD_DIM)
    at = head * stride_oh + rows[:, None] * stride_o + columns[None, :]
    at_part = head * stride_ph + rows[:, None] * stride_p + columns[None, :]
    out = tl.load(OUT + at, mask=inside[:, None], other=0.0)
    part = tl.load(PART + at_part, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(OUT + at, out + (part - out) * share[:, None], mask=inside[:, None])


def fused_merge_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """See `ds_hetero.runtime.attention.kernels.merge_`; for a batch of one, out in float32, D a power of two."""
    _, heads, tokens, head_dim = out.shape
    assert out.shape[0] == 1 and out.dtype == torch.float32
    _merge_kernel[-(-tokens // _ROWS), heads](
        *(out, lse, out_block, lse_block),
        *(*out.stride()[1:3], *out_block.stride()[1:3], lse.stride(1), lse_block.stride(1)),
        tokens,
        HEAD_DIM=head_dim,
        ROWS=_ROWS,
    )
