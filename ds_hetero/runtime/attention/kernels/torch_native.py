"""The "torch" kernel: what torch itself brings along, on every device.

CPU: the flash operator. CUDA: flash for fp16 and bf16 from Ampere on, else memory-efficient. Soft-capped scores, odd
head sizes on CUDA and other devices: plain operations, correct and slow.

torch's flash operator for CPU, fed with tiles: float64, float32, bfloat16 and float16.

The operator takes grouped heads, rectangles and any strides over batch, heads and tokens, and its backward accepts the
out and lse of whole rows. It aligns a causal mask to the top left, and is killed by SIGFPE where a size is 0. Every
tile of queries reads all keys before it: where their heads are not consecutive in memory that costs 3 % from 2,400
tokens on, much more than a copy of keys and values; below that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, CHUNK, FULL, LEAF, Band, Tile, decompose
from ds_hetero.runtime.attention.kernels.interface import (
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    backward_each,
    forward_each,
)
from ds_hetero.runtime.attention.kernels.plain import (
    backward_by_tiles,
    band_mask,
    forward_by_tiles,
    plain_backward,
    plain_forward,
)
from ds_hetero.runtime.attention.kernels.torch_cuda import (
    efficient_backward,
    efficient_forward,
    efficient_refusal,
    flash_backward,
    flash_forward,
    flash_refusal,
)

_PART_BYTES = 8 << 18  # of gradients that one call returns; on a large square the operator itself allocates 4 << 18
_DENSE_KEYS = 2048  # keys and values from which on they are copied, unless their heads are consecutive
# Causal squares of few tokens and of many are one call: there the operator wastes less than more calls, merging and
# adding up take. Measured with 1 to 8 heads of 64, one thread.
_FEW, _MANY_FORWARD, _MANY_BACKWARD = 256, 640, 1280
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` without a soft cap."""

    def attend(q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD(q, k, v, 0.0, band == CAUSAL, attn_mask=_mask(q, k, band), scale=scores.scale)
        return out, lse

    q, k, v = _dense_rows(q), _dense_heads(k), _dense_heads(v)
    return forward_by_tiles(attend, q, k, v, _forward_tiles(q, k, band))


def cpu_backward(dout: Tensor, saved: SavedForward, scores: Scores, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` without a soft cap."""

    def attend_backward(dout: Tensor, saved: SavedForward, band: Band) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mask = saved.q, saved.k, saved.v, _mask(saved.q, saved.k, band)
        is_causal = band == CAUSAL
        dq, dk, dv = _BACKWARD(dout, q, k, v, saved.out, saved.lse, 0.0, is_causal, attn_mask=mask, scale=scores.scale)
        return dq, dk, dv

    dout, q, out = (_dense_rows(x) for x in (dout, saved.q, saved.out))
    k, v = _dense_heads(saved.k), _dense_heads(saved.v)
    saved = SavedForward(q, k, v, out, saved.lse)
    return backward_by_tiles(attend_backward, dout, saved, _backward_tiles(q, k, band))


def _forward_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    num_queries, num_keys = q.shape[2], k.shape[2]
    if _is_one_call(num_queries, num_keys, band, many=_MANY_FORWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band)


def _is_one_call(num_queries: int, num_keys: int, band: Band, many: int) -> bool:
    return band == CAUSAL and num_queries == num_keys and not _FEW < num_queries <= many


def _backward_tiles(q: Tensor, k: Tensor, band: Band) -> tuple[Tile, ...]:
    """Smaller than in the forward: every call returns gradients of its own, and these should not show in the memory."""
    batch_size, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    row_bytes = batch_size * (heads + 2 * k.shape[1]) * head_dim * q.element_size()
    side = min(max(_PART_BYTES // row_bytes // LEAF * LEAF, 2 * LEAF), CHUNK)
    if band == FULL or _is_one_call(num_queries, num_keys, band, many=_MANY_BACKWARD):
        return (Tile(0, 0, num_queries, num_keys, band, True),)
    return decompose(num_queries, num_keys, band, chunk=side, side=side)


def _dense_rows(x: Tensor) -> Tensor:
    """The operator reads a head's vector as consecutive numbers, whatever its stride says."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense_heads(x: Tensor) -> Tensor:
    """The same for keys and values, and every head consecutive where there are many of them."""
    if x.shape[2] >= _DENSE_KEYS and x.stride(2) != x.shape[3]:
        return x.contiguous()
    return _dense_rows(x)


def _mask(q: Tensor, k: Tensor, band: Band) -> Tensor | None:
    return None if band in (FULL, CAUSAL) else _additive_mask(band, q.shape[2], k.shape[2], q.dtype)


@lru_cache(maxsize=64)
def _additive_mask(band: Band, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor | None:
    visible = band_mask(band, range(num_queries), range(num_keys), torch.device("cpu"))
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def torch_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Why this kernel cannot run such a block, or None."""
    return None if dtype.is_floating_point else f"attention takes floating-point numbers, not {dtype}"


def torch_is_slow(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether none of torch's fused operators takes such a block."""
    return _operators(device, dtype, head_dim, softcap) is _PLAIN


class TorchKernel:
    """torch's fused operators where they apply, plain torch operations where none does."""

    name = "torch"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel`."""
        operators = _operators(q.device, q.dtype, q.shape[-1], scores.softcap)
        if isinstance(blocks, PackedBlocks) and operators is not _FLASH:
            return forward_each(operators.forward, (q, k, v), scores, blocks)
        return operators.forward(q, k, v, scores, blocks)

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`."""
        operators = _operators(dout.device, saved.q.dtype, saved.q.shape[-1], scores.softcap)
        if isinstance(blocks, PackedBlocks) and operators is not _FLASH:
            return backward_each(operators.backward, dout, saved, scores, blocks)
        return operators.backward(dout, saved, scores, blocks)

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """See `AttentionKernel`."""
        return _operators(q.device, q.dtype, q.shape[-1], scores.softcap) is _FLASH


class _Operators(NamedTuple):
    """Forward and backward of one block; `_FLASH` takes many at a time."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


_CPU = _Operators(cpu_forward, cpu_backward)
_FLASH = _Operators(flash_forward, flash_backward)
_EFFICIENT = _Operators(efficient_forward, efficient_backward)
_PLAIN = _Operators(plain_forward, plain_backward)


def _operators(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> _Operators:
    """The fastest operators for such a block; only the plain ones cap scores."""
    if softcap is not None:
        return _PLAIN
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda" and flash_refusal(device, dtype, head_dim) is None:
        return _FLASH
    if device.type == "cuda" and efficient_refusal(device, dtype, head_dim) is None:
        return _EFFICIENT
    return _PLAIN
