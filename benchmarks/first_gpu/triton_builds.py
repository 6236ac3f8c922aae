"""Compile Triton kernels ahead of their first launch, by the code that launches them, without the launch.

Triton caches compiled kernels by source, types, constants and the divisibility of arguments. So the package's
`TritonKernel` runs on tensors of torch's "meta" device, which have no numbers, and every launch becomes Triton's
``warmup``, under a driver that only names the GPU. No process uses the GPU for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL, Band
from ds_hetero.runtime.attention.kernels import SavedForward, Scores
from ds_hetero.runtime.attention.kernels import triton_native as native
from ds_hetero.runtime.attention.kernels.triton_blocks import BlockSizes, Launch, block_sizes, padded_head_dim
from ds_hetero.runtime.attention.kernels.triton_native import TritonKernel

KERNELS = ("forward", "dq", "dkv")
BANDS = {"causal": CAUSAL, "full": FULL}
_WARP = 32
_TOKENS = 4096  # any multiple of all block sizes: Triton keeps no other number of tokens


@dataclass(frozen=True)
class Config:
    """One kernel and its block sizes.

    Args:
        kernel: of `KERNELS`.
        masked: with the loop over masked blocks for all launches; the package leaves it out where nothing is masked.
    """

    kernel: str
    head_dim: int
    blocks: BlockSizes
    masked: bool = False

    @property
    def text(self) -> str:
        """Description for people."""
        return f"{self.kernel}, D {self.head_dim}, {tuple(self.blocks)}{', masked' if self.masked else ''}"


def launch_of(config: Config, otherwise: Launch) -> Launch:
    """Return the block sizes of all three kernels, with those of ``config`` for its kernel."""
    return otherwise._replace(**{config.kernel: config.blocks})


def default_launch(head_dim: int, capability: int) -> Launch:
    """Return the block sizes that the package launches for 16-bit types."""
    return block_sizes(padded_head_dim(head_dim), capability, sixteen_bit=True)


@contextmanager
def launching(config: Config, launch: Launch, compiles: bool = False) -> Iterator[TritonKernel]:
    """Yield a `TritonKernel` that launches ``config``, and in the backward only its kernel.

    Args:
        launch: block sizes of the other kernels.
        compiles: launches compile, and do not run.
    """
    kernels: Any = native._kernels()
    module = _Only(_Compiling(kernels) if compiles else kernels, config.kernel)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(native, "_kernels", lambda: module))
        stack.enter_context(mock.patch.object(native, "_launch", lambda q: launch_of(config, launch)))
        if config.masked:
            stack.enter_context(mock.patch.object(native, "_has_edges", lambda *arguments: True))
        yield TritonKernel()


class _Only:
    """A module of kernels of which one is launched; launches of others do nothing."""

    def __init__(self, kernels: Any, kernel: str) -> None:
        self._kernels, self._name = kernels, f"{kernel}_kernel"

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            return getattr(self._kernels, name)
        return _ZeroDelta() if name == "delta_kernel" else _Nothing()


class _Nothing:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class _ZeroDelta:
    """Replacement of the kernel of row sums: its readers get the same numbers every time."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda out, dout, delta, *args, **kwargs: delta.zero_()


class _Compiling:
    """A module of kernels whose launches compile and do not run."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        class Launches:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **kwargs: kernel.warmup(*args, grid=grid, **kwargs)

        return Launches()


class _NamedGpu:
    """A driver for Triton that names a GPU; nothing can be launched."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def is_active(self) -> bool:
        return True


def compile_config(config: Config, capability: int, dtype: torch.dtype) -> None:
    """Compile the kernels that a launch of ``config`` needs. Raises the errors of Triton or its assembler.

    Run it in a process of its own: it replaces Triton's driver.
    """
    from triton.runtime import driver

    driver.set_active(_NamedGpu(capability))
    with launching(config, default_launch(config.head_dim, capability), compiles=True) as kernel:
        for band in BANDS.values():
            run_config(kernel, config, tensors_of(config, _TOKENS, torch.device("meta"), dtype), band)


def tensors_of(
    config: Config, tokens: int, device: torch.device, dtype: torch.dtype, heads: int = 16
) -> tuple[Tensor, ...]:
    """Return q, k, v, dout, out, lse of a square in a model's layout: views [B, H, S, D] of [B, S, H, D]."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    shape = (1, tokens, heads, config.head_dim)
    q, k, v, dout, out = (
        torch.randn(shape, device=device, dtype=dtype, generator=generator).transpose(1, 2) for _ in range(5)
    )
    return q, k, v, dout, out, torch.zeros(1, heads, tokens, device=device)


def run_config(kernel: TritonKernel, config: Config, tensors: tuple[Tensor, ...], band: Band) -> tuple[Tensor, ...]:
    """Run the pass that uses the kernel of ``config``; inputs from other kernels' passes are uninitialized memory."""
    q, k, v, dout, out, lse = tensors
    scores = Scores(config.head_dim**-0.5)
    if config.kernel == "forward":
        return kernel.forward(q, k, v, scores, band)
    return kernel.backward(dout, SavedForward(q, k, v, out, lse), scores, band)
