"""torch's own fused operators on CUDA: flash for fp16 and bf16 from Ampere on, memory-efficient for the rest.

Both are the operators behind ``scaled_dot_product_attention``, called directly because only so they take a window and
hand out the log-sum-exp. They read [B, tokens, heads, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL, Band, Tile, decompose
from ds_hetero.runtime.attention.kernels.band_tiles import backward_by_tiles, forward_by_tiles
from ds_hetero.runtime.attention.kernels.each_block import boundaries
from ds_hetero.runtime.attention.kernels.interface import (
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    head_first,
    window_of_blocks,
)
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward

_aten = torch.ops.aten


def flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why torch's flash operator cannot run here; None if it can."""
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without its flash operator"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's flash operator needs an Ampere GPU (sm80) or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"torch's flash operator takes float16 and bfloat16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"torch's flash operator takes head sizes that are multiples of 8 up to 256, not {head_dim}"
    return None


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` without a soft cap."""
    is_packed = isinstance(blocks, PackedBlocks)
    left, right = window_of_blocks(blocks, q, k)
    q, k, v = (_token_first(x)[0] if is_packed else _token_first(x) for x in (q, k, v))
    out, lse, *_ = _aten._flash_attention_forward(
        *(q, k, v),
        *_lengths(blocks, q, k),
        0.0,
        False,  # causal; the window says it, as in the operator itself
        False,
        scale=scores.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return head_first(out, is_packed), lse[None] if is_packed else lse


def flash_backward(dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` without a soft cap."""
    is_packed = isinstance(blocks, PackedBlocks)
    left, right = window_of_blocks(blocks, saved.q, saved.k)
    tensors = (dout, saved.q, saved.k, saved.v, saved.out)
    dout, q, k, v, out = (_token_first(x)[0] if is_packed else _token_first(x) for x in tensors)
    no_dropout = q.new_empty(2, dtype=torch.uint64)  # a state of the random generator, which nothing reads
    grads = _aten._flash_attention_backward(
        *(dout, q, k, v, out),
        (saved.lse[0] if is_packed else saved.lse).contiguous(),  # read as [B, H, Q] without a look at strides
        *_lengths(blocks, q, k),
        0.0,
        False,
        no_dropout,
        no_dropout,
        scale=scores.scale,
        window_size_left=left,
        window_size_right=right,
    )
    dq, dk, dv = (head_first(x, is_packed) for x in grads)
    return dq, dk, dv


def _lengths(blocks: Blocks, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where queries and keys of many blocks begin, None of one, and the tokens of the longest; q and k by token."""
    if not isinstance(blocks, PackedBlocks):
        return None, None, q.shape[1], k.shape[1]
    starts = boundaries(blocks.queries, q.device), boundaries(blocks.keys, q.device)
    return *starts, blocks.max_queries, blocks.max_keys


def efficient_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why torch's memory-efficient operator cannot run here; None if it can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"torch's memory-efficient operator takes float32, float16 and bfloat16, not {dtype}"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return "bfloat16 needs an Ampere GPU (sm80) or newer"
    if head_dim % 8:
        return f"torch's memory-efficient operator is used with head sizes that are multiples of 8, not {head_dim}"
    return None


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` without a soft cap."""

    def attend(q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        if band not in _MASK_TYPES:
            return plain_forward(q, k, v, scores, band)
        q, k, v = (_token_first(x) for x in (q, _per_query_head(k, q), _per_query_head(v, q)))
        out, lse, *_ = _aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, _MASK_TYPES[band], True, scale=scores.scale
        )
        return out.transpose(1, 2), lse[:, :, : q.shape[1]]

    return forward_by_tiles(attend, q, k, v, _efficient_tiles(q, k, band))


def efficient_backward(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` without a soft cap."""

    def attend_backward(dout: Tensor, saved: SavedForward, band: Band) -> tuple[Tensor, Tensor, Tensor]:
        if band not in _MASK_TYPES:
            return plain_backward(dout, saved, scores, band)
        num_kv_heads = saved.k.shape[1]
        dout, q, out = (_token_first(x) for x in (dout, saved.q, saved.out))
        k, v = (_token_first(_per_query_head(x, saved.q)) for x in (saved.k, saved.v))
        no_dropout = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = _aten._efficient_attention_backward(
            dout,
            q,
            k,
            v,
            None,
            out.contiguous(),  # the operator takes its token stride for heads * D
            None,
            None,
            q.shape[1],
            k.shape[1],
            # As its forward pads it; where nothing is padded it has the strides of a tile of all rows, by token first.
            F.pad(saved.lse, (0, -q.shape[1] % 32), value=torch.inf).contiguous(),
            0.0,
            no_dropout,
            no_dropout,
            _MASK_TYPES[band],
            False,
            scale=scores.scale,
        )
        dk, dv = (x.unflatten(2, (num_kv_heads, -1)).sum(3, dtype=torch.float32) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    return backward_by_tiles(attend_backward, dout, saved, _efficient_tiles(saved.q, saved.k, band))


# The operator also knows windows, but its backward counts them from another diagonal than its forward unless the block
# is square. ``CustomMaskType`` in torch's sdp_utils_cpp.h.
_MASK_TYPES = {FULL: 0, CAUSAL: 1}


def _efficient_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Full rectangles and causal squares as large as can be; a lower edge in masked squares of 256 for plain torch."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if band == CAUSAL and num_queries == num_keys:
        return (Tile(0, 0, num_queries, num_keys, CAUSAL, True),)
    return decompose(num_queries, num_keys, band, leaf=256, chunk=4096)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """The operator does not know grouped heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _token_first(x: Tensor) -> Tensor:
    """[B, heads, tokens, D] -> [B, tokens, heads, D] as both operators read it: rows of D numbers, 16-byte aligned."""
    x = x.transpose(1, 2)
    aligned = x.stride(-1) == 1 and not any(s * x.element_size() % 16 for s in x.stride()[:-1])
    return x if aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
