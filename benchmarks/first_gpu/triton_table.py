"""Block sizes to time: those of the package, and others whose spills are outside of loops.

A review of 2026-11 compiled them for sm_90 with Triton 3.9 (registers, spills, width of wgmma); none had been timed. On
another architecture, those that do not compile are reported and left out.
"""

from __future__ import annotations

from benchmarks.first_gpu.triton_builds import KERNELS, Config, default_launch
from ds_hetero.runtime.attention.kernels.triton_native import BlockSizes

# (queries, keys, warps, blocks loaded ahead), chosen by `benchmarks.kernels`' compiler output: registers and spills.
_OTHER_BLOCK_SIZES = {
    "forward": ((128, 64, 8, 3), (128, 128, 8, 2)),
    "dq": ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1)),
    "dkv": ((32, 64, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 1)),
}
# The loop alone, without the masked phases, in which most spills lie.
_EDGE_FREE = {
    "forward": ((128, 128, 8, 2),),
    "dq": ((128, 64, 8, 3),),
    "dkv": ((32, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 1)),
}
HEAD_DIMS = (128, 64)


def configs(capability: int) -> list[Config]:
    """Return all configurations to time on a GPU: those of the package first, head size 128 before 64."""
    all_configs = []
    for head_dim in HEAD_DIMS:
        launch = default_launch(head_dim, capability)
        of_size = [Config(kernel, head_dim, getattr(launch, kernel)) for kernel in KERNELS]
        for edge_free, table in ((False, _OTHER_BLOCK_SIZES), (True, _EDGE_FREE)):
            for kernel in KERNELS:
                of_size += [Config(kernel, head_dim, BlockSizes(*blocks), edge_free) for blocks in table[kernel]]
        all_configs += list(dict.fromkeys(of_size))
    return all_configs


def is_default(config: Config, capability: int) -> bool:
    """Return whether the package launches this kernel with these block sizes."""
    return not config.edge_free and getattr(default_launch(config.head_dim, capability), config.kernel) == config.blocks


def rehearsed_configs() -> list[Config]:
    """Return those that a rehearsal compiles: one of each way to make a kernel."""
    return [Config("dq", 64, BlockSizes(128, 32)), Config("forward", 64, BlockSizes(128, 64), edge_free=True)]
