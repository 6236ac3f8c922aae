"""Call torch's fused attention operators on CUDA: flash for fp16 and bf16 on Ampere and newer, else memory-efficient.

These are the operators behind ``scaled_dot_product_attention``. They are called directly, because only then they accept
a window and return the log-sum-exp. They read [B, tokens, heads, D].
"""

from __future__ import annotations

import torch
import torch.nn.attention
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
    impl = active_flash_impl()
    generations = _GENERATIONS_OF_IMPL.get(impl) if impl else None
    if impl is not None and generations is None:
        return f'torch\'s flash operator has been replaced by "{impl}", which this engine has not been tried with'
    if generations is not None and torch.cuda.get_device_capability(device)[0] not in generations:
        listed = " and ".join(f"{major}.x" for major in generations)
        return f'torch\'s flash operator has been replaced by "{impl}", which runs on compute capability {listed} only'
    return None


# Compute capabilities, by the implementation that replaces torch's flash operator: torch 2.13, nn/attention/_fa3.py and
# _fa4.py, the functions that end in _support_error.
_GENERATIONS_OF_IMPL = {"FA3": (9,), "FA4": (9, 10)}


def active_flash_impl() -> str | None:
    """Return what replaces torch's flash operator, "FA3" or "FA4"; None: nothing does.

    A script replaces it by ``torch.nn.attention.activate_flash_attention_impl`` (torch 2.11 and newer). The calls below
    then run FlashAttention 3 or 4, windows and packed documents included.
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    impl = current() if current is not None else None
    return None if impl in (None, "FA2") else str(impl)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` without a soft cap."""
    is_packed = isinstance(blocks, PackedBlocks)
    left, right = window_of_blocks(blocks, q, k)
    q, k, v = (_as_flash_reads(x, is_packed) for x in (q, k, v))
    out, lse, *_ = _aten._flash_attention_forward(
        *(q, k, v),
        *_lengths(blocks, q, k),
        0.0,
        False,  # is_causal; the window has it
        False,  # return_debug_mask
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
    dout, q, k, v, out = (_as_flash_reads(x, is_packed) for x in tensors)
    no_dropout = q.new_empty(2, dtype=torch.uint64)  # a state of the random generator, which is not read
    grads = _aten._flash_attention_backward(
        *(dout, q, k, v, out),
        (saved.lse[0] if is_packed else saved.lse).contiguous(),  # the operator reads [B, H, Q] and ignores strides
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
    """Return cu_seqlens of queries and of keys (None for a single block), and their largest numbers in a block.

    Args:
        q: with tokens in dimension 1, as ``k``.
    """
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
            out.contiguous(),  # the operator assumes that its token stride is heads * D
            None,
            None,
            q.shape[1],
            k.shape[1],
            # Padded as the operator's forward does; contiguous, since lse may be a view of the whole rows' lse.
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


# Values of ``CustomMaskType`` in torch's sdp_utils_cpp.h. The operator accepts windows as well, but its backward counts
# them from another diagonal than its forward unless the block is square.
_MASK_TYPES = {FULL: 0, CAUSAL: 1}


def _efficient_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Return the tiles of a block: large full rectangles and causal squares; masked squares of 256 on a lower edge.

    The masked squares are computed in plain torch.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if band == CAUSAL and num_queries == num_keys:
        return (Tile(0, 0, num_queries, num_keys, CAUSAL, True),)
    return decompose(num_queries, num_keys, band, leaf=256, chunk=4096)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat KV heads for their query heads, since the operator does not accept grouped heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _token_first(x: Tensor) -> Tensor:
    """Transpose [B, heads, tokens, D] to [B, tokens, heads, D]; copy it if rows are not dense and 16-byte aligned."""
    x = x.transpose(1, 2)
    aligned = x.stride(-1) == 1 and not any(s * x.element_size() % 16 for s in x.stride()[:-1])
    return x if aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _as_flash_reads(x: Tensor, is_packed: bool) -> Tensor:
    """Transpose [B, heads, tokens, D] to [B, tokens, heads, D]; packed blocks, which have B = 1, come without B."""
    x = _token_first(x)
    return x[0] if is_packed else x
