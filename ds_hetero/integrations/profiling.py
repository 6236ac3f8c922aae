"""Profiling with the kernel that will train: the profiler belongs to the planning half and knows no kernels."""

from __future__ import annotations

from typing import Any

import torch

from ds_hetero.cluster.probes import KernelProbe, head_dim_on
from ds_hetero.cluster.profile import default_device, default_dtype, measure, measure_cached
from ds_hetero.runtime.kernels import Band, select

__all__ = ["profile", "profile_cached"]


def profile(**settings: Any) -> dict[str, Any]:
    """`ds_hetero.cluster.profile.measure` with the runtime's kernel; every rank."""
    return measure(attention=_kernel(), **settings)


def profile_cached(**settings: Any) -> tuple[dict[str, Any], bool]:
    """`ds_hetero.cluster.profile.measure_cached` with the runtime's kernel; every rank."""
    return measure_cached(attention=_kernel(), **settings)


def _kernel() -> KernelProbe:
    device = default_device()
    kernel = select(torch.device(device.type), default_dtype(device), head_dim_on(device), None, None)
    return KernelProbe(kernel.name, kernel, Band(None, None), Band(None, 0))
