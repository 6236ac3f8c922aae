"""The "triton" kernel: launches our own flash attention, and chooses its block sizes."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels.interface import Blocks, PackedBlocks, SavedForward, Scores
from ds_hetero.runtime.devices import copied_to

_LOG2_E = 1.4426950408889634


class BlockSizes(NamedTuple):
    """Queries and keys that a program takes at a time, its warps, and the blocks that are loaded ahead."""

    queries: int
    keys: int
    num_warps: int = 8
    num_stages: int = 2


class Launch(NamedTuple):
    """Block sizes of the three kernels that multiply."""

    forward: BlockSizes
    dq: BlockSizes
    dkv: BlockSizes


DELTA = BlockSizes(32, 0)  # rows of the kernel that multiplies nothing


# By padded head size: products of 16-bit numbers on tensor cores, from Ampere on.
_ON_TENSOR_CORES = {
    64: Launch(BlockSizes(128, 64), BlockSizes(128, 32), BlockSizes(32, 128)),
    128: Launch(BlockSizes(128, 64), BlockSizes(128, 32), BlockSizes(32, 64)),
    256: Launch(BlockSizes(64, 32), BlockSizes(32, 32, 8, 1), BlockSizes(32, 32, 8, 1)),
}
# By compute capability, from there to the next one: what would spill there with the sizes above.
_WOULD_SPILL = {
    80: {
        64: {"forward": BlockSizes(128, 32)},
        128: {"forward": BlockSizes(128, 32, 8, 1), "dkv": BlockSizes(32, 64, 8, 1)},
    },
    86: {128: {"forward": BlockSizes(64, 64)}, 256: {"dq": BlockSizes(32, 32, 4, 1)}},
    90: {128: {"dkv": BlockSizes(16, 64)}},
    100: {128: {"dkv": BlockSizes(16, 64, 8, 1)}},
    120: {
        64: {"forward": BlockSizes(128, 32), "dq": BlockSizes(128, 32, 8, 1)},
        128: {"forward": BlockSizes(64, 64), "dkv": BlockSizes(32, 64, 8, 1)},
    },
}
# All other products: float32, and anything on Volta and Turing.
_ON_ORDINARY_CORES = {
    64: Launch(BlockSizes(32, 32, 8, 1), BlockSizes(32, 32, 8, 1), BlockSizes(16, 32, 8, 1)),
    256: Launch(*(BlockSizes(16, 16, 8, 1),) * 3),
}


def block_sizes(head_dim: int, capability: int, sixteen_bit: bool) -> Launch:
    """Return blocks with which no kernel spills registers, and whose tiles fit into shared memory.

    Chosen by compiling with Triton 3.9: `python -m benchmarks.kernels` compiles all of them for sm75, 80, 86, 89, 90,
    100 and 120 and fails where one spills. Not timed on any GPU.

    Args:
        head_dim: D padded to a power of two.
        capability: of the GPU, ten times the major and the minor number; those between two of the table take the lower.
        sixteen_bit: the numbers are float16 or bfloat16.
    """
    on_tensor_cores = runs_on_tensor_cores(capability, sixteen_bit)
    sizes = _ON_TENSOR_CORES if on_tensor_cores else _ON_ORDINARY_CORES
    dim = next(dim for dim in sizes if head_dim <= dim)
    smaller = _WOULD_SPILL[max(key for key in _WOULD_SPILL if key <= capability)] if on_tensor_cores else {}
    return sizes[dim]._replace(**smaller.get(dim, {}))


def runs_on_tensor_cores(capability: int, sixteen_bit: bool) -> bool:
    """Whether Triton 3.9 multiplies such numbers on tensor cores; see `block_sizes`."""
    return sixteen_bit and capability >= 80


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
    """Whether Triton interprets the kernel: a second for what a compiled one does in a microsecond."""
    return device.type == "cpu"


class TritonKernel:
    """Flash attention forward and backward in Triton, with every band, soft caps and grouped heads.

    It is there for what flash-attn and torch's operators leave out, and as the place for fusion. Below Ampere Triton
    does not use tensor cores, so that torch's memory-efficient operator is preferred wherever it applies.
    """

    name = "triton"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel`."""
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
            **_constants(q, sizes, scores.softcap),
            MANY=isinstance(blocks, PackedBlocks),
        )
        return out, lse

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel`; gradients in float32."""
        dout, q, k, v, out = (_dense_rows(x) for x in (dout, saved.q, saved.k, saved.v, saved.out))
        batch_size, heads, num_queries, head_dim = q.shape
        lse = saved.lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        kernels, launch, many = _kernels(), _launch(q), isinstance(blocks, PackedBlocks)
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
            **_constants(q, launch.dq, scores.softcap),
            MANY=many,
        )
        programs, table = _programs(blocks, q, k, launch.dkv.keys, by_keys=True)
        kernels.dkv_kernel[programs, batch_size * k.shape[1]](
            *(*operands, dk, dv, table),
            *_strides(q, k, v, dout, dk),
            *(k.shape[1], group, *extents),
            *factors,
            **_constants(q, launch.dkv, scores.softcap),
            MANY=many,
        )
        return dq, dk, dv

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """See `AttentionKernel`."""
        return True


def _programs(blocks: Blocks, q: Tensor, k: Tensor, block: int, by_keys: bool) -> tuple[int, Tensor]:
    """Return the programs of a head, and the table of what each works on; it is not read for a single block."""
    if not isinstance(blocks, PackedBlocks):
        return -(-(k if by_keys else q).shape[2] // block), q
    table = _table(blocks, block, by_keys, q.device)
    return len(table), table


def _extents(blocks: Blocks, q: Tensor, k: Tensor) -> tuple[int, ...]:
    """(rows of lse, queries, keys, lo, hi); of many blocks the table has the last four."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if isinstance(blocks, PackedBlocks):
        return num_queries, 0, 0, 0, 0
    return num_queries, num_queries, num_keys, *blocks.bounds(num_queries, num_keys)


@lru_cache(maxsize=256)
def _table(blocks: PackedBlocks, block: int, by_keys: bool, device: torch.device) -> Tensor:
    """[programs, 7]: first token in the block, start and number of its queries and of its keys, lo, hi."""
    rows = []
    for queries, keys, band in blocks.parts():
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        entry = (queries.start, num_queries, keys.start, num_keys, *band.bounds(num_queries, num_keys))
        rows += [(first, *entry) for first in range(0, num_keys if by_keys else num_queries, block)]
    return copied_to(torch.tensor(rows, dtype=torch.int32), device)


def _kernels() -> Any:
    """The module, imported at the first launch: the value of TRITON_INTERPRET at that time holds for the process."""
    return importlib.import_module("ds_hetero.runtime.attention.kernels.triton_kernels")


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, heads and tokens, for each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _score_factors(scores: Scores) -> tuple[float, float]:
    """(inner, outer) of `triton_kernels`."""
    if scores.softcap is None:
        return scores.scale * _LOG2_E, 0.0
    return scores.scale / scores.softcap, scores.softcap * _LOG2_E


def _constants(q: Tensor, blocks: BlockSizes, softcap: float | None) -> dict[str, int | bool]:
    return {
        "HEAD_DIM": q.shape[3],
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "BLOCK_D": padded_head_dim(q.shape[3]),
        "SOFTCAP": softcap is not None,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def padded_head_dim(head_dim: int) -> int:
    """Return the next power of two, 16 at least, as Triton's products want it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _launch(q: Tensor) -> Launch:
    if q.device.type != "cuda":  # the interpreter, in tests of small blocks
        return Launch(*(BlockSizes(16, 16, 1, 1),) * 3)
    major, minor = torch.cuda.get_device_capability(q.device)
    return block_sizes(padded_head_dim(q.shape[3]), 10 * major + minor, q.element_size() == 2)
