"""Profiling with the kernel that will train: the profiler belongs to the planning half and knows no kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hetero.profiler.device_probes import head_dim_on
from ds_hetero.profiler.measure import default_device, default_dtype, measure, measure_cached
from ds_hetero.runtime.attention.kernels import AttentionKernel, Band, SavedForward, Scores, select

__all__ = ["KernelProbe", "kernel_probe", "profile", "profile_cached"]


def profile(dtype: torch.dtype | None = None, **settings: Any) -> dict[str, Any]:
    """`ds_hetero.profiler.measure.measure` with the runtime's best kernel; every rank.

    Args:
        dtype, settings: as for `profile_cached`.
    """
    return measure(attention=kernel_probe(dtype), dtype=dtype, **settings)


def profile_cached(
    dtype: torch.dtype | None = None, kernel: str | None = None, **settings: Any
) -> tuple[dict[str, Any], bool]:
    """`ds_hetero.profiler.measure.measure_cached` with a kernel of the runtime; every rank.

    Args:
        dtype: in which layers will be computed; left out, what is usual on the device.
        kernel: its name; left out, the best on the device.
        settings: see `ds_hetero.profiler.measure.measure`.
    """
    found = measure_cached(attention=kernel_probe(dtype, kernel), dtype=dtype, **settings)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the probes' memory is the model's now
    return found


def kernel_probe(dtype: torch.dtype | None = None, kernel: str | None = None) -> KernelProbe:
    """The kernel as the profiler times it.

    Raises:
        ConfigError: the kernel does not work on this rank's device.
    """
    device = default_device()
    block = (torch.device(device.type), dtype or default_dtype(device), head_dim_on(device))
    return KernelProbe(select(*block, softcap=None, requested=kernel))


class KernelProbe:
    """A kernel of the runtime as an `ds_hetero.profiler.device_probes.AttentionProbe`."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.name = kernel.name
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """See `AttentionProbe`; the state is (out, lse)."""
        with torch.no_grad():
            return self._kernel.forward(q, k, v, Scores(q.shape[-1] ** -0.5), _band(causal))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """See `AttentionProbe`."""
        with torch.no_grad():
            self._kernel.backward(dout, SavedForward(q, k, v, *state), Scores(q.shape[-1] ** -0.5), _band(causal))


def _band(causal: bool) -> Band:
    return Band(None, 0 if causal else None)
