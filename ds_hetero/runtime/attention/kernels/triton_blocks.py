"""Block sizes of the Triton kernels: candidates by architecture and head size, of which the first is launched.

They were chosen by compiling, not by timing. `python -m benchmarks.kernels` prints for each the columns of its
tensor-core instructions and the bytes that it spills in the loop over visible blocks. `benchmarks.first_gpu` times
all of them.

On Hopper and data-centre Blackwell one instruction multiplies at least 64 rows by a number of columns, and takes as
long to start for few columns as for many. The columns of scores are keys in the forward and dQ kernels, which therefore
have 64 keys or more in a block. In the dK and dV kernel they are queries, 32 or more, since its scores are transposed.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Sizes with which a Triton kernel is compiled.

    Attributes:
        queries: in a block that a program processes at a time.
        keys: in such a block.
        num_warps: of a program.
        num_stages: blocks that are loaded ahead.
        sums_apart: of the dK and dV kernel: one program sums dK of a block of keys, another dV.
    """

    queries: int
    keys: int
    num_warps: int = 8
    num_stages: int = 2
    sums_apart: bool = False


class Launch(NamedTuple):
    """Block sizes of the three kernels that contain matmuls."""

    forward: BlockSizes
    dq: BlockSizes
    dkv: BlockSizes


class Candidates(NamedTuple):
    """Block sizes to choose from, for each of the three kernels; the first are launched."""

    forward: tuple[BlockSizes, ...]
    dq: tuple[BlockSizes, ...]
    dkv: tuple[BlockSizes, ...]


# Of the kernels without matmuls; chosen, never measured.
DELTA = BlockSizes(32, 0)
MERGE = BlockSizes(64, 0)


_AMPERE = {
    64: Candidates(
        forward=(BlockSizes(128, 64), BlockSizes(128, 32)),
        dq=(BlockSizes(128, 32), BlockSizes(128, 64)),
        dkv=(BlockSizes(32, 128), BlockSizes(64, 128)),
    ),
    128: Candidates(
        forward=(BlockSizes(128, 32), BlockSizes(128, 64, 8, 1)),
        dq=(BlockSizes(128, 32), BlockSizes(64, 64)),
        dkv=(BlockSizes(32, 64), BlockSizes(64, 64, 8, 1)),
    ),
    256: Candidates(
        forward=(BlockSizes(64, 32),),
        dq=(BlockSizes(32, 32, 8, 1),),
        dkv=(BlockSizes(32, 32, 8, 1),),
    ),
}
_ADA = _AMPERE | {256: _AMPERE[256]._replace(dq=(BlockSizes(32, 32, 4, 1),))}
_HOPPER = {
    64: Candidates(
        forward=(BlockSizes(128, 64), BlockSizes(128, 128)),
        dq=(BlockSizes(128, 64), BlockSizes(128, 128)),
        dkv=(BlockSizes(64, 128), BlockSizes(32, 128)),
    ),
    128: Candidates(
        forward=(BlockSizes(128, 64), BlockSizes(128, 128)),
        dq=(BlockSizes(128, 64), BlockSizes(128, 64, 8, 3), BlockSizes(128, 128, 8, 1)),
        dkv=(BlockSizes(32, 128), BlockSizes(64, 64), BlockSizes(64, 128, 8, 1)),
    ),
    # dK and dV of 64 keys, or one of them of 128, fill half of the registers. So they are summed apart: together they
    # spill 1,080 bytes in the loop with 64 keys, and have 8 columns with 32 keys. In dQ two warpgroups share 64
    # queries, and each has half of the 64 columns; 128 queries spill 188 bytes, or with two stages take 256 KiB of
    # shared memory.
    256: Candidates(
        forward=(BlockSizes(128, 64, 8, 1),),
        dq=(BlockSizes(64, 64),),
        dkv=(BlockSizes(32, 128, sums_apart=True), BlockSizes(32, 32, 8, 1)),
    ),
}
# Sums are in memory of their own here, beside the tensor cores.
_BLACKWELL = {
    64: _HOPPER[64],
    128: Candidates(
        forward=(BlockSizes(128, 64), BlockSizes(128, 128)),
        dq=(BlockSizes(128, 64), BlockSizes(128, 64, 8, 3), BlockSizes(128, 128, 8, 1)),
        dkv=(BlockSizes(64, 128, 8, 1), BlockSizes(32, 128, 8, 1), BlockSizes(64, 64, 8, 1)),
    ),
    256: Candidates(
        forward=(BlockSizes(128, 64, 8, 1),),
        dq=(BlockSizes(128, 64, 8, 1),),
        dkv=(BlockSizes(32, 64, 8, 1),),
    ),
}
# By compute capability, valid up to the next one in the table, and by padded head size: for 16-bit numbers on tensor
# cores. Blackwell GPUs of workstations (120) have the instructions of Ampere.
_ON_TENSOR_CORES = {80: _AMPERE, 86: _ADA, 90: _HOPPER, 100: _BLACKWELL, 120: _AMPERE}
# For all other matmuls: float32, and every type on Volta and Turing.
_ON_ORDINARY_CORES = {
    64: Candidates((BlockSizes(32, 32, 8, 1),), (BlockSizes(32, 32, 8, 1),), (BlockSizes(16, 32, 8, 1),)),
    256: Candidates(*((BlockSizes(16, 16, 8, 1),),) * 3),
}


def candidates(head_dim: int, capability: int, sixteen_bit: bool) -> Candidates:
    """Return block sizes with which no loop spills registers, and whose tiles fit into shared memory.

    That holds for the first of each kernel; `python -m benchmarks.kernels` fails if one of them does not.

    Args:
        head_dim: D padded to a power of two.
        capability: of the GPU, ten times the major number plus the minor one, such as 86. One that is not in the table
            gets the sizes of the next lower one.
        sixteen_bit: the numbers are float16 or bfloat16.
    """
    by_head_dim = _ON_ORDINARY_CORES
    if runs_on_tensor_cores(capability, sixteen_bit):
        by_head_dim = _ON_TENSOR_CORES[max(key for key in _ON_TENSOR_CORES if key <= capability)]
    return by_head_dim[min(key for key in by_head_dim if head_dim <= key)]


def block_sizes(head_dim: int, capability: int, sixteen_bit: bool) -> Launch:
    """Return the block sizes that are launched: the first of `candidates`."""
    return Launch(*(sizes[0] for sizes in candidates(head_dim, capability, sixteen_bit)))


def runs_on_tensor_cores(capability: int, sixteen_bit: bool) -> bool:
    """Whether Triton 3.9 multiplies such numbers on tensor cores: those of Ampere and newer GPUs."""
    return sixteen_bit and capability >= 80


def padded_head_dim(head_dim: int) -> int:
    """Return the next power of two that is at least 16, as Triton's matmuls require."""
    return max(16, 1 << (head_dim - 1).bit_length())
