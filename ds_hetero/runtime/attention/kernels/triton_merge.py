"""The merge of two parts of attention as one Triton kernel; used by `ds_hetero.runtime.attention.kernels.merge`.

``out`` and ``lse`` are read and written once, the part is read once: 10 bytes an element for a part in 16 bits.

Source: the online softmax (arXiv:1805.02867).
"""

# Triton reads the source of these functions itself, and has no type annotations.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ds_hetero.runtime.attention.kernels.triton_blocks import MERGE, padded_head_dim


@triton.jit
def merge_kernel(
    MERGED, LSE, PART, LSE_PART,
    stride_mb, stride_mh, stride_m, stride_lb, stride_lh, stride_l,
    stride_pb, stride_ph, stride_p, stride_sb, stride_sh, stride_s,
    num_heads, num_queries,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge PART into MERGED, both [B, H, Q, D] with D consecutive, and LSE_PART into LSE, both [B, H, Q].

    Programs: (blocks of queries, B * H). Strides are those of batch, heads and queries of the four tensors.
    """
    # Offsets in 64 bits: a million tokens of 32 heads of 128 have more than 2 ** 31 elements.
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    queries = (tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    is_query = queries < num_queries

    lse_at = LSE + batch * stride_lb + head * stride_lh + queries * stride_l
    lse = tl.load(lse_at, mask=is_query, other=0.0)
    lse_part = tl.load(LSE_PART + batch * stride_sb + head * stride_sh + queries * stride_s, mask=is_query, other=0.0)
    larger, smaller = tl.maximum(lse, lse_part), tl.minimum(lse, lse_part)
    # The weight of the smaller one; that of the larger is 1. If both are -inf, it is 0, and the part has no share.
    weight = tl.exp(smaller - tl.where(larger == -float("inf"), 0.0, larger))
    share = tl.where(lse_part > lse, 1.0, weight) / (1.0 + weight)
    tl.store(lse_at, larger + tl.log(1.0 + weight), mask=is_query)

    dims = tl.arange(0, BLOCK_D)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    out_at = MERGED + batch * stride_mb + head * stride_mh + queries[:, None] * stride_m + dims[None, :]
    part_at = PART + batch * stride_pb + head * stride_ph + queries[:, None] * stride_p + dims[None, :]
    out = tl.load(out_at, mask=is_element, other=0.0)
    part = tl.load(part_at, mask=is_element, other=0.0).to(tl.float32)
    # From the nearer end: a share of exactly 1 leaves nothing of an output that does not count, whatever it is.
    share = share[:, None]
    near_out, near_part = out + (part - out) * share, part - (part - out) * (1.0 - share)
    tl.store(out_at, tl.where(share < 0.5, near_out, near_part), mask=is_element)


def launch(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """Run the kernel on tensors as in `ds_hetero.runtime.attention.kernels.merge.merge_`; out in float32."""
    if out_block.stride(-1) != 1:
        out_block = out_block.contiguous()
    batch_size, heads, queries, head_dim = out.shape
    if out.numel() == 0:
        return
    merge_kernel[-(-queries // MERGE.queries), batch_size * heads](
        *(out, lse, out_block, lse_block),
        *(*out.stride()[:3], *lse.stride(), *out_block.stride()[:3], *lse_block.stride()),
        *(heads, queries),
        HEAD_DIM=head_dim,
        BLOCK_Q=MERGE.queries,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=MERGE.num_warps,
    )
