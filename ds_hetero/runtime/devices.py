"""Device that this rank computes on, and its types."""

from __future__ import annotations

import os
from math import inf

import torch

from ds_hetero.errors import ConfigError

_SPARE_MEMORY = 0.95  # of a device, for what grows with the work on it


def default_device() -> torch.device:
    """Return this rank's accelerator; the CPU where there is none, or where ``DS_ACCELERATOR`` says so.

    Raises:
        ConfigError: the accelerator is neither an NVIDIA nor an AMD GPU. A build of torch for GPUs on a machine without
            any has none.
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
    """The type that models are trained in there: bfloat16, float16 where the accelerator lacks it, float32 on CPUs."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if has_native_bf16(device) else torch.float16


def copied_to(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a table of the host's memory to a device, without waiting for what runs there.

    A copy from pageable memory waits for the device's stream, which inside a layer is a gap in every step.
    """
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def has_native_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 run on the device as such: on NVIDIA GPUs from Ampere on, and on every CPU."""
    if device.type == "cpu" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def collectives_library() -> tuple[str, str]:
    """Name and version of what CUDA devices talk with: NCCL, or RCCL on AMD's."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return "RCCL" if torch.version.hip else "NCCL", ".".join(map(str, version))


def device_memory_bytes() -> int:
    """Memory of this rank's accelerator; 0 on the host, where ranks share it."""
    device = default_device()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def possible_growth(device: torch.device) -> float:
    """Return the factor by which memory in use on this device could grow; infinity on the host."""
    if device.type != "cuda":
        return inf
    total = torch.cuda.get_device_properties(device).total_memory
    return _SPARE_MEMORY * total / max(torch.cuda.max_memory_allocated(device), 1)
