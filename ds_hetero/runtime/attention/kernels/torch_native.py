"""The "torch" kernel: what torch itself brings along, on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.interface import Band
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_cpu import cpu_backward, cpu_forward
from ds_hetero.runtime.attention.kernels.torch_cuda import (
    efficient_backward,
    efficient_forward,
    efficient_refusal,
    flash_backward,
    flash_forward,
    flash_refusal,
)

__all__ = ["TorchKernel"]


class TorchKernel:
    """torch's fused operators where they apply, plain torch operations where none does.

    CPU: the flash operator. CUDA: flash for fp16 and bf16 from Ampere on, else memory-efficient. Soft-capped scores,
    odd head sizes on CUDA and other devices: plain operations, correct and slow.
    """

    name = "torch"

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
        """See `AttentionKernel`."""
        return None if dtype.is_floating_point else f"attention takes floating-point numbers, not {dtype}"

    def is_fused(self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
        """Whether one of torch's fused operators does the work."""
        return _operators(device, dtype, head_dim, softcap) is not None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel`."""
        operators = _operators(q.device, q.dtype, q.shape[-1], softcap)
        return operators[0](q, k, v, band, scale) if operators else plain_forward(q, k, v, band, scale, softcap)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`."""
        if operators := _operators(q.device, q.dtype, q.shape[-1], softcap):
            return operators[1](dout, q, k, v, out, lse, band, scale)
        return plain_backward(dout, q, k, v, out, lse, band, scale, softcap)


_Forward = Callable[[Tensor, Tensor, Tensor, Band, float], tuple[Tensor, Tensor]]
_Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Band, float],
    tuple[Tensor, Tensor, Tensor],
]


def _operators(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None
) -> tuple[_Forward, _Backward] | None:
    """The fused operators for such a block, or None; none of them caps scores."""
    if softcap is not None:
        return None
    if device.type == "cpu":
        return cpu_forward, cpu_backward
    if device.type == "cuda" and flash_refusal(device, dtype, head_dim) is None:
        return flash_forward, flash_backward
    if device.type == "cuda" and efficient_refusal(device, dtype, head_dim) is None:
        return efficient_forward, efficient_backward
    return None
