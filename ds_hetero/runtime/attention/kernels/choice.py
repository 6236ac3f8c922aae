"""Which kernel runs where."""

from __future__ import annotations

import torch

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.kernels.flash_attn import FlashAttnKernel
from ds_hetero.runtime.attention.kernels.interface import AttentionKernel
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.attention.kernels.triton_native import TritonKernel

__all__ = ["available", "select"]

_TORCH = TorchKernel()
_KERNELS: dict[str, AttentionKernel] = {"torch": _TORCH, "flash_attn": FlashAttnKernel(), "triton": TritonKernel()}


def select(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None, requested: str | None
) -> AttentionKernel:
    """The kernel that ``requested`` names, or the fastest that works here.

    In order: flash-attn, torch's fused operators, Triton, torch's plain operations.

    Args:
        device: of the tensors.
        dtype: of the tensors.
        head_dim: D.
        softcap: of the model, or None.
        requested: the "attention" key of the configuration.

    Raises:
        ConfigError: the requested kernel is unknown or does not work here.
    """
    reasons = {name: kernel.refusal(device, dtype, head_dim, softcap) for name, kernel in _KERNELS.items()}
    if requested is not None:
        if requested in reasons and reasons[requested] is None:
            return _KERNELS[requested]
        problem = f"does not work here: {reasons[requested]}" if requested in reasons else "is no kernel"
        others = "; ".join(f'"{name}": {reason or "works"}' for name, reason in reasons.items())
        raise ConfigError(
            f'heterogeneity.attention = "{requested}" {problem}. For {dtype} with head size {head_dim} on {device} '
            f"there are {others}. Name one that works, or leave the key out to get the best of them."
        )
    if reasons["flash_attn"] is None:
        return _KERNELS["flash_attn"]
    fused = _TORCH.is_fused(device, dtype, head_dim, softcap)
    return _KERNELS["triton"] if not fused and reasons["triton"] is None and device.type != "cpu" else _TORCH


def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Every kernel's name with None, or with the reason why it does not work for such tensors."""
    return {name: kernel.refusal(device, dtype, head_dim, None) for name, kernel in _KERNELS.items()}
