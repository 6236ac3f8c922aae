"""Find the device on which this rank computes, its default dtype and its memory."""

from __future__ import annotations

import os
from math import inf

import torch

from ds_hetero.errors import ConfigError

_USABLE_MEMORY_FRACTION = 0.95  # of a device's memory; chosen, never measured


def default_device() -> torch.device:
    """Return this rank's accelerator; the CPU if there is none, or if ``DS_ACCELERATOR=cpu`` is set.

    Raises:
        ConfigError: the accelerator is neither an NVIDIA nor an AMD GPU.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            raise ConfigError(
                f"this rank's accelerator is {accelerator.type.upper()}; ds_hetero has attention kernels for CUDA "
                "devices and CPUs alone. Set DS_ACCELERATOR=cpu to use the CPU."
            )
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", torch.cuda.current_device() if local_rank is None else int(local_rank))


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which models are trained on a device: bfloat16, or float16 without it; float32 on CPUs."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if has_native_bf16(device) else torch.float16


def copied_to(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a table from the host to a device without waiting for the device.

    A copy from pageable memory would wait for the device's stream: inside a layer, that is a gap in every step.
    """
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def has_native_bf16(device: torch.device) -> bool:
    """Whether a device has matmuls of bfloat16: NVIDIA GPUs from Ampere on, AMD GPUs, and every CPU."""
    if device.type == "cpu" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def collectives_library() -> tuple[str, str]:
    """Return name and version of the collectives library of this torch: NCCL, or RCCL for AMD GPUs."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return "RCCL" if torch.version.hip else "NCCL", ".".join(map(str, version))


def device_memory_bytes() -> int:
    """Return the memory of this rank's accelerator in bytes; 0 on the CPU, where ranks share memory."""
    device = default_device()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def possible_growth(device: torch.device) -> float:
    """Return the usable memory of a device divided by the peak that torch has allocated there; infinity on the CPU.

    Below 1, the peak was higher than `_USABLE_MEMORY_FRACTION` of the device's memory.
    """
    if device.type != "cuda":
        return inf
    total = torch.cuda.get_device_properties(device).total_memory
    return _USABLE_MEMORY_FRACTION * total / max(torch.cuda.max_memory_allocated(device), 1)
