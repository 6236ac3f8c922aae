"""The "torch" kernel: runs torch's own attention operators, on every device.

CPU      the flash operator, tile by tile (`cpu_flash`)
CUDA     flash for fp16 and bf16 on Ampere and newer GPUs, else memory-efficient (`torch_cuda`)
others   plain operations, correct and slow: soft-capped scores, odd head sizes on CUDA, other devices
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.cpu_flash import cpu_backward, cpu_forward
from ds_hetero.runtime.attention.kernels.each_block import backward_each, forward_each
from ds_hetero.runtime.attention.kernels.interface import Blocks, PackedBlocks, SavedForward, Scores
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_cuda import (
    active_flash_impl,
    efficient_backward,
    efficient_forward,
    efficient_refusal,
    flash_backward,
    flash_forward,
    flash_refusal,
)


def torch_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Return why this kernel cannot run such a block; None if it can."""
    return None if dtype.is_floating_point else f"attention takes floating-point numbers, not {dtype}"


def torch_is_slow(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether torch has no fused operator for such a block."""
    return _operators(device, dtype, head_dim, softcap) is _PLAIN


def torch_rates(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str:
    """Return the catalogue's name of the operators that run such a block; empty for those that it has no rates of."""
    operators = _operators(device, dtype, head_dim, softcap)
    if operators is _FLASH:
        impl = active_flash_impl()
        return "torch" if impl is None else f"flash_attn_{impl.removeprefix('FA')}"
    return "torch" if operators is _EFFICIENT else ""


class TorchKernel:
    """Runs torch's fused operators where they apply, and plain torch operations otherwise."""

    name = "torch"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the blocks, see `AttentionKernel`."""
        operators = _operators(q.device, q.dtype, q.shape[-1], scores.softcap)
        if isinstance(blocks, PackedBlocks) and operators is not _FLASH:
            return forward_each(operators.forward, (q, k, v), scores, blocks)
        return operators.forward(q, k, v, scores, blocks)

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of the blocks, see `AttentionKernel`."""
        operators = _operators(dout.device, saved.q.dtype, saved.q.shape[-1], scores.softcap)
        if isinstance(blocks, PackedBlocks) and operators is not _FLASH:
            return backward_each(operators.backward, dout, saved, scores, blocks)
        return operators.backward(dout, saved, scores, blocks)

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Whether one call for many blocks launches fewer kernels than one call per block."""
        return _operators(q.device, q.dtype, q.shape[-1], scores.softcap) is _FLASH


class _Operators(NamedTuple):
    """Forward and backward of one block; those of `_FLASH` also compute many blocks in one call."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


_CPU = _Operators(cpu_forward, cpu_backward)
_FLASH = _Operators(flash_forward, flash_backward)
_EFFICIENT = _Operators(efficient_forward, efficient_backward)
_PLAIN = _Operators(plain_forward, plain_backward)


def _operators(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> _Operators:
    """Return the fastest operators for such a block; only the plain ones cap scores."""
    if softcap is not None:
        return _PLAIN
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda" and flash_refusal(device, dtype, head_dim) is None:
        return _FLASH
    if device.type == "cuda" and efficient_refusal(device, dtype, head_dim) is None:
        return _EFFICIENT
    return _PLAIN
