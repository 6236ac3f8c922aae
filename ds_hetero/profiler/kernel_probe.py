"""Profile the live ranks with the attention kernel of the training.

Other modules of the profiler import no kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hetero.common.reading import JsonDict
from ds_hetero.profiler.cache import measure_cached
from ds_hetero.profiler.device_probes import head_dim_on
from ds_hetero.profiler.measure import WINDOW_S, measure
from ds_hetero.runtime.attention.kernels import AttentionKernel, Band, SavedForward, Scores, rates_of, select
from ds_hetero.runtime.devices import default_device, default_dtype


def profile_ranks(
    dtype: torch.dtype | None = None, *, window_s: float = WINDOW_S, show_progress: bool = True
) -> JsonDict:
    """Measure the live ranks with the runtime's best kernel; see `ds_hetero.profiler.measure.measure`."""
    return measure(attention=kernel_probe(dtype), dtype=dtype, window_s=window_s, show_progress=show_progress)


def profile_cached(
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    head_dim: int | None = None,
    softcap: float | None = None,
) -> tuple[JsonDict, bool]:
    """Measure the live ranks once, as the job will train; see `ds_hetero.profiler.cache.measure_cached`.

    Args:
        dtype: data type of the layers; left out, the device's default.
        kernel: name of the attention kernel; left out, the best on the device.
        head_dim: of the model; left out, the device's default.
        softcap: bound of the model's attention scores; None for no bound.

    Caller: every rank.
    """
    content, is_new = measure_cached(attention=kernel_probe(dtype, kernel, head_dim, softcap), dtype=dtype)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # gives the probes' memory to the model
    return content, is_new


def kernel_probe(
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    head_dim: int | None = None,
    softcap: float | None = None,
) -> KernelProbe:
    """Return the probe of a kernel; see `profile_cached`. Raises `ConfigError`: the kernel does not work here."""
    device = default_device()
    head_dim = head_dim_on(device) if head_dim is None else head_dim
    block = (torch.device(device.type), dtype or default_dtype(device), head_dim, softcap)
    selected = select(*block, requested=kernel)
    return KernelProbe(selected, head_dim, softcap, rates_of(selected, *block))


class KernelProbe:
    """Adapter of a runtime kernel to the profiler's `ds_hetero.profiler.device_probes.AttentionProbe`.

    Args:
        rates: see `ds_hetero.runtime.attention.kernels.rates_of`.

    Attributes:
        name: of the kernel, and of the version that it runs if that is not the usual one: a profile of FlashAttention 2
            does not hold once FlashAttention 3 is installed. It is part of the profile's key.
    """

    def __init__(self, kernel: AttentionKernel, head_dim: int, softcap: float | None, rates: str = "") -> None:
        has_newer_version = rates in ("flash_attn_3", "flash_attn_4")
        self.name = f"{kernel.name} ({rates})" if has_newer_version else kernel.name
        self.head_dim, self.softcap = head_dim, softcap
        self._kernel, self._scores = kernel, Scores(head_dim**-0.5, softcap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """See `AttentionProbe`; the state is (out, lse)."""
        with torch.no_grad():
            return self._kernel.forward(q, k, v, self._scores, _band(causal))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, causal: bool) -> None:
        """See `AttentionProbe`."""
        with torch.no_grad():
            self._kernel.backward(dout, SavedForward(q, k, v, *state), self._scores, _band(causal))


def _band(causal: bool) -> Band:
    """Return the visible keys of a causal square, or of a block without a mask."""
    return Band(None, 0 if causal else None)
