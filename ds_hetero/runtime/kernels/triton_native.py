"""The "triton" kernel: launches our own flash attention, and chooses its block sizes."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.runtime.kernels.interface import Band

__all__ = ["BlockSizes", "TritonKernel", "block_sizes"]

_LOG2_E = 1.4426950408889634


class BlockSizes(NamedTuple):
    """Rows of queries and of keys that one step of a kernel holds on the chip, and how many warps share them."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def block_sizes(shared_bytes: int, pipelined: bool, head_dim: int, itemsize: int, backward: bool) -> BlockSizes:
    """The largest blocks that fit.

    Args:
        shared_bytes: shared memory per block of threads: 64 KiB on T4, 96 on V100, 99 on 8.6 and 8.9, 163 on A100,
            227 on H100.
        pipelined: asynchronous copies exist (Ampere and newer), so that the next block of the loop is held as well.
        head_dim: D padded to a power of two.
        itemsize: bytes per element.
        backward: of the gradient kernels, which hold two tensors of each kind and two score matrices.
    """
    num_stages = 2 if pipelined else 1
    for queries, keys, num_warps in ((128, 128, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4), (32, 32, 4), (16, 16, 2)):
        if head_dim * itemsize > 256 and queries * keys > 64 * 64:
            continue  # the accumulators would no longer fit into registers
        resident, streamed = (2 * max(queries, keys), 2 * max(queries, keys)) if backward else (queries, 2 * keys)
        scores = (2 if backward else 1) * queries * keys * itemsize
        if (resident + num_stages * streamed) * head_dim * itemsize + scores <= shared_bytes:
            return BlockSizes(queries, keys, num_warps, num_stages)
    return BlockSizes(16, 16, 2, 1)


class TritonKernel:
    """Flash attention forward and backward in Triton, for every head size up to 256, with soft caps and bands.

    It is there for GPUs and head sizes that flash-attn and torch's operators leave out, and as the place for fusion.
    """

    name = "triton"

    def refusal(self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
        """See `AttentionKernel`."""
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed: pip install triton"
        if device.type != "cuda" and not (device.type == "cpu" and _interpreted()):
            return f"Triton runs on CUDA devices, not on {device.type} (in its interpreter with TRITON_INTERPRET=1)"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"the Triton kernel takes float32, float16 and bfloat16, not {dtype}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
            return "the Triton kernel needs a Volta GPU (sm70) or newer"
        if dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "bfloat16 needs an Ampere GPU (sm80) or newer"
        if dtype == torch.bfloat16 and device.type == "cpu":
            return "Triton's interpreter does not multiply bfloat16"
        if head_dim > 256:
            return f"the Triton kernel takes head sizes up to 256, not {head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel`."""
        q, k, v = (_dense_rows(x) for x in (q, k, v))
        batch_size, heads, num_queries, head_dim = q.shape
        out = q.new_empty(batch_size, num_queries, heads, head_dim).transpose(1, 2)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        blocks = _blocks(q, backward=False)
        _kernels().forward_kernel[_grid(num_queries, blocks.queries, q)](
            *(q, k, v, out, lse),
            *_strides(q, k, v, out),
            *_sizes(q, k, band),
            *_score_factors(scale, softcap),
            **_constants(q, blocks, softcap),
        )
        return out, lse

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
        """See `AttentionKernel`; gradients in float32."""
        dout, q, k, v, out = (_dense_rows(x) for x in (dout, q, k, v, out))
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        blocks = _blocks(q, backward=True)
        kernels, num_queries, num_keys = _kernels(), q.shape[2], k.shape[2]
        constants = _constants(q, blocks, softcap)
        kernels.delta_kernel[_grid(num_queries, 64, q)](
            *(out, dout, delta),
            *_strides(out, dout),
            *(q.shape[1], num_queries),
            HEAD_DIM=q.shape[3],
            BLOCK_Q=64,
            BLOCK_D=constants["BLOCK_D"],
        )
        operands = (q, k, v, dout, lse, delta)
        factors = (*_score_factors(scale, softcap), scale)
        kernels.dq_kernel[_grid(num_queries, blocks.queries, q)](
            *(*operands, dq), *_strides(q, k, v, dout, dq), *_sizes(q, k, band), *factors, **constants
        )
        heads, *sizes = _sizes(q, k, band)
        kernels.dkv_kernel[_grid(num_keys, blocks.keys, k)](
            *(*operands, dk, dv), *_strides(q, k, v, dout, dk), heads // sizes[0], *sizes, *factors, **constants
        )
        return dq, dk, dv


# --- launching -------------------------------------------------------------------------------------


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> Any:
    """Imported at the first launch: what TRITON_INTERPRET says then holds for the process."""
    return importlib.import_module("ds_hetero.runtime.kernels.triton_kernels")


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _grid(num_tokens: int, block: int, x: Tensor) -> tuple[int, int]:
    return (-(-num_tokens // block), x.shape[0] * x.shape[1])


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, heads and tokens, for each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _sizes(q: Tensor, k: Tensor, band: Band) -> tuple[int, int, int, int, int, int]:
    """(query heads, query heads per KV head, queries, keys, lo, hi)."""
    heads, num_queries, num_keys = q.shape[1], q.shape[2], k.shape[2]
    return heads, heads // k.shape[1], num_queries, num_keys, *band.bounds(num_queries, num_keys)


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(inner, outer) of `triton_kernels`."""
    return (scale * _LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)


def _constants(q: Tensor, blocks: BlockSizes, softcap: float | None) -> dict[str, int | bool]:
    return {
        "HEAD_DIM": q.shape[3],
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "BLOCK_D": _padded(q.shape[3]),
        "SOFTCAP": softcap is not None,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _padded(head_dim: int) -> int:
    """The next power of two, 16 at least, as Triton's products want it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _blocks(q: Tensor, backward: bool) -> BlockSizes:
    if q.device.type != "cuda":
        return BlockSizes(16, 16, 1, 1)  # the interpreter, for tests of small blocks
    shared_bytes, pipelined = _device_limits(q.device)
    return block_sizes(shared_bytes, pipelined, _padded(q.shape[3]), q.element_size(), backward)


@cache
def _device_limits(device: torch.device) -> tuple[int, bool]:
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major >= 8  # type: ignore[attr-defined]
