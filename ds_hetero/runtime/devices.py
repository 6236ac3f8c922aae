"""Which device this rank computes on, and in which type."""

from __future__ import annotations

import os

import torch

__all__ = ["default_device", "default_dtype"]


def default_device() -> torch.device:
    """This rank's accelerator; the CPU where there is none, or where ``DS_ACCELERATOR`` has DeepSpeed use it."""
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def default_dtype(device: torch.device) -> torch.dtype:
    """The type that models are trained in there: bfloat16, float16 where the accelerator lacks it, float32 on CPUs."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
