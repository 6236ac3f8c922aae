"""Kernels of block attention with log-sum-exp: choose the one that runs best on a device.

To add a kernel, add its name to `ds_hetero.values.section.KERNEL_NAMES`, a module here, and an entry to `KERNELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_hetero.batch.tiles import Band
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.kernels.cudnn import CudnnKernel, cudnn_refusal
from ds_hetero.runtime.attention.kernels.flash_attn import FlashAttnKernel, flash_attn_rates, flash_attn_refusal
from ds_hetero.runtime.attention.kernels.interface import (
    AttentionKernel,
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
)
from ds_hetero.runtime.attention.kernels.merge import merge_
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel, torch_is_slow, torch_rates, torch_refusal
from ds_hetero.runtime.attention.kernels.triton_native import TritonKernel, triton_is_slow, triton_refusal

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "Band",
    "Blocks",
    "KernelEntry",
    "PackedBlocks",
    "SavedForward",
    "Scores",
    "available",
    "beside_messages",
    "merge_",
    "rates_of",
    "select",
]


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """An entry of `KERNELS`; ``refusal`` and ``is_slow`` take (device, dtype, head size, soft cap or None) of a block.

    Args:
        name: as in `ds_hetero.values.section`.
        make: returns the kernel.
        refusal: returns why the kernel cannot run such a block; None if it can.
        is_slow: whether any other kernel that can run such a block is preferred.
        rates: returns the name under which `ds_hetero.cluster.attention_rates` has the rates of such a block; empty if
            it has none.
    """

    name: str
    make: Callable[[], AttentionKernel]
    refusal: Callable[[torch.device, torch.dtype, int, float | None], str | None]
    is_slow: Callable[[torch.device, torch.dtype, int, float | None], bool]
    rates: Callable[[torch.device, torch.dtype, int, float | None], str]


# Best first. cuDNN comes last: it runs only where it is named, see `ds_hetero.runtime.attention.kernels.cudnn`.
KERNELS = (
    KernelEntry("flash_attn", FlashAttnKernel, flash_attn_refusal, lambda *block: False, flash_attn_rates),
    KernelEntry("torch", TorchKernel, torch_refusal, torch_is_slow, torch_rates),
    KernelEntry("triton", TritonKernel, triton_refusal, triton_is_slow, lambda *block: "triton"),
    KernelEntry("cudnn", CudnnKernel, cudnn_refusal, lambda *block: True, lambda *block: "cudnn"),
)


# SMs that flash-attn 3 leaves to messages that travel beside it. MagiAttention uses 4 to 8 on H100 (its documentation,
# kernel_overlap.md); the smaller number costs 3 % of a Hopper GPU's 132 SMs. Never measured here.
MESSAGE_SMS = 4


def beside_messages(kernel: AttentionKernel) -> AttentionKernel:
    """Return the kernel for blocks during which messages travel over NCCL: it leaves them SMs where it can."""
    return FlashAttnKernel(sm_margin=MESSAGE_SMS) if isinstance(kernel, FlashAttnKernel) else kernel


def select(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None, requested: str | None
) -> AttentionKernel:
    """Return the kernel that ``requested`` names, or the first of `KERNELS` that works here and is not slow.

    Args:
        head_dim: D.
        softcap: of the model, or None.
        requested: the "attention" key of the configuration.

    Raises:
        ConfigError: the requested kernel is unknown or does not work here.
    """
    block = (device, dtype, head_dim, softcap)
    working = (entry for entry in KERNELS if entry.refusal(*block) is None)
    if requested is None:
        slow = []
        for entry in working:
            if not entry.is_slow(*block):
                return entry.make()
            slow.append(entry)
        return slow[0].make()
    for entry in working:
        if entry.name == requested:
            return entry.make()
    reasons = {entry.name: entry.refusal(*block) for entry in KERNELS}
    problem = f"does not work here: {reasons[requested]}" if requested in reasons else "is not the name of a kernel"
    kernels_text = "; ".join(f'"{name}": {reason or "works"}' for name, reason in reasons.items())
    raise ConfigError(
        f'heterogeneity.attention = "{requested}" {problem}. For {dtype} with head size {head_dim} on {device} '
        f"there are {kernels_text}. Name one that works, or leave the key out to get the best of them."
    )


def available(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Return for every kernel, by name, why it cannot run such tensors; None if it can."""
    return {entry.name: entry.refusal(device, dtype, head_dim, None) for entry in KERNELS}


def rates_of(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None
) -> str:
    """Return the name of the catalogue's rates for a selected kernel; empty if it has none, as for CPUs."""
    if device.type == "cpu":
        return ""
    (entry,) = (entry for entry in KERNELS if entry.name == kernel.name)
    return entry.rates(device, dtype, head_dim, softcap)
