"""The "triton" kernel: launches the flash attention of `triton_kernels`, with the block sizes of `triton_blocks`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.interface import Blocks, PackedBlocks, SavedForward, Scores
from ds_hetero.runtime.attention.kernels.triton_blocks import (
    DELTA,
    BlockSizes,
    Launch,
    block_sizes,
    padded_head_dim,
)
from ds_hetero.runtime.devices import copied_to

_LOG2_E = 1.4426950408889634


# Elements between two tokens from which a tensor is copied first: the kernels' offsets within a block of at most 128
# tokens have 32 bits.
_LARGEST_STRIDE = 2**24


def triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Return why the Triton kernel cannot run such a block; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"Triton runs on CUDA devices, not on {device.type} (in its interpreter with TRITON_INTERPRET=1)"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernel takes float32, float16 and bfloat16, not {dtype}"
    if dtype == torch.bfloat16 and device.type == "cpu":
        return "Triton's interpreter does not multiply bfloat16"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability < (7, 0):
        return "the Triton kernel needs a Volta GPU (sm70) or newer"
    if capability is not None and capability < (8, 0) and dtype == torch.bfloat16:
        return "bfloat16 needs an Ampere GPU (sm80) or newer"
    limit = 128 if capability is not None and capability < (8, 0) else 256  # 64 KiB of shared memory on Turing
    if head_dim > limit:
        return f"the Triton kernel takes head sizes up to {limit} here, not {head_dim}"
    return None


def triton_is_slow(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether Triton interprets the kernel, about a million times slower than compiled: True on CPU.

    All kernels are asked with the same arguments; this one needs the device alone.
    """
    return device.type == "cpu"


class TritonKernel:
    """Flash attention forward and backward in Triton, with every band, soft caps and grouped heads.

    It is used where flash-attn and torch's operators do not support a block. Triton does not use the tensor cores of
    GPUs older than Ampere, so torch's memory-efficient operator is preferred wherever it applies.
    """

    name = "triton"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the blocks, see `AttentionKernel`."""
        q, k, v = (_dense_rows(x) for x in (q, k, v))
        batch_size, heads, num_queries, head_dim = q.shape
        out = q.new_empty(batch_size, num_queries, heads, head_dim).transpose(1, 2)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        sizes = _launch(q).forward
        programs, table = _programs(blocks, q, k, sizes.queries, by_keys=False)
        _kernels().forward_kernel[programs, batch_size * heads](
            *(q, k, v, out, lse, table),
            *_strides(q, k, v, out),
            *(heads, heads // k.shape[1], *_extents(blocks, q, k)),
            *_score_factors(scores),
            **_constants(q, k, scores, blocks, sizes),
        )
        return out, lse

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of the blocks, in float32; see `AttentionKernel`."""
        dout, q, k, v, out = (_dense_rows(x) for x in (dout, saved.q, saved.k, saved.v, saved.out))
        batch_size, heads, num_queries, head_dim = q.shape
        lse = saved.lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        kernels, launch = _kernels(), _launch(q)
        kernels.delta_kernel[-(-num_queries // DELTA.queries), batch_size * heads](
            *(out, dout, delta),
            *_strides(out, dout),
            *(heads, num_queries),
            HEAD_DIM=head_dim,
            BLOCK_Q=DELTA.queries,
            BLOCK_D=padded_head_dim(head_dim),
            num_warps=DELTA.num_warps,
        )
        operands = (q, k, v, dout, lse, delta)
        group, extents = heads // k.shape[1], _extents(blocks, q, k)
        factors = (*_score_factors(scores), scores.scale)
        programs, table = _programs(blocks, q, k, launch.dq.queries, by_keys=False)
        kernels.dq_kernel[programs, batch_size * heads](
            *(*operands, dq, table),
            *_strides(q, k, v, dout, dq),
            *(heads, group, *extents),
            *factors,
            **_constants(q, k, scores, blocks, launch.dq),
        )
        programs, table = _programs(blocks, q, k, launch.dkv.keys, by_keys=True)
        kernels.dkv_kernel[programs, batch_size * k.shape[1], 1 + launch.dkv.sums_apart](
            *(*operands, dk, dv, table),
            *_strides(q, k, v, dout, dk),
            *(k.shape[1], group, *extents),
            *factors,
            **_constants(q, k, scores, blocks, launch.dkv),
            APART=launch.dkv.sums_apart,
        )
        return dq, dk, dv

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Whether one call for many blocks launches fewer kernels than one call per block."""
        return True


def _programs(blocks: Blocks, q: Tensor, k: Tensor, block: int, by_keys: bool) -> tuple[int, Tensor]:
    """Return how many programs compute one head, and `_table`, which says what each of them computes.

    The kernel does not read the table for a single block; it is then any tensor.
    """
    if not isinstance(blocks, PackedBlocks):
        return -(-(k if by_keys else q).shape[2] // block), q
    table = _table(blocks, block, by_keys, q.device)
    return len(table), table


def _extents(blocks: Blocks, q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return (rows of lse, queries, keys, lo, hi), the sizes and band of one block as kernel arguments.

    For packed blocks the last four are 0, since the kernel reads those of each block from `_table`.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if isinstance(blocks, PackedBlocks):
        return num_queries, 0, 0, 0, 0
    return num_queries, num_queries, num_keys, *blocks.bounds(num_queries, num_keys)


@lru_cache(maxsize=256)
def _table(blocks: PackedBlocks, block: int, by_keys: bool, device: torch.device) -> Tensor:
    """Return the work of each program as a table [programs, 7] of integers.

    The columns are: first token of the program in its block; first query of the block, number of its queries; first key
    of the block, number of its keys; lo and hi of its band.
    """
    rows = []
    for queries, keys, band in blocks.parts():
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        entry = (queries.start, num_queries, keys.start, num_keys, *band.bounds(num_queries, num_keys))
        rows += [(first, *entry) for first in range(0, num_keys if by_keys else num_queries, block)]
    return copied_to(torch.tensor(rows, dtype=torch.int32), device)


def _kernels() -> Any:
    """Return the module of the kernels, imported at the first launch, when TRITON_INTERPRET is read for the process."""
    return importlib.import_module("ds_hetero.runtime.attention.kernels.triton_kernels")


def _dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with the numbers of a row side by side, and rows near enough for offsets of 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(2) < _LARGEST_STRIDE else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, heads and tokens, for each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _score_factors(scores: Scores) -> tuple[float, float]:
    """Return (score_scale, cap_scale) as `triton_kernels` uses them: before and behind the soft cap."""
    if scores.softcap is None:
        return scores.scale * _LOG2_E, 0.0
    return scores.scale / scores.softcap, scores.softcap * _LOG2_E


def _constants(q: Tensor, k: Tensor, scores: Scores, blocks: Blocks, sizes: BlockSizes) -> dict[str, int | bool]:
    """Return the compile-time arguments of a kernel."""
    return {
        "HEAD_DIM": q.shape[3],
        "BLOCK_Q": sizes.queries,
        "BLOCK_K": sizes.keys,
        "BLOCK_D": padded_head_dim(q.shape[3]),
        "SOFTCAP": scores.softcap is not None,
        "MANY": isinstance(blocks, PackedBlocks),
        "EDGES": _has_edges(blocks, q.shape[2], k.shape[2], sizes),
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
    }


def _has_edges(blocks: Blocks, num_queries: int, num_keys: int, sizes: BlockSizes) -> bool:
    """Return False if all queries see all keys and the kernel's blocks fill both, so that nothing is masked."""
    if isinstance(blocks, PackedBlocks) or num_queries % sizes.queries or num_keys % sizes.keys:
        return True
    return blocks.bounds(num_queries, num_keys) != (1 - num_queries, num_keys - 1)


def _launch(q: Tensor) -> Launch:
    """Return the block sizes for queries on their device."""
    if q.device.type != "cuda":  # the interpreter, in tests of small blocks
        return Launch(*(BlockSizes(16, 16, 1, 1),) * 3)
    major, minor = torch.cuda.get_device_capability(q.device)
    return block_sizes(padded_head_dim(q.shape[3]), 10 * major + minor, q.element_size() == 2)
