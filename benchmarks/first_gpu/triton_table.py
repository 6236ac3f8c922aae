"""Block sizes to time: all candidates of the package for the GPU, and those it launches with masks for all blocks."""

from __future__ import annotations

from benchmarks.first_gpu.triton_builds import KERNELS, Config, default_launch
from ds_hetero.runtime.attention.kernels.triton_blocks import BlockSizes, candidates

HEAD_DIMS = (128, 64, 256)


def configs(capability: int) -> list[Config]:
    """Return all configurations to time on a GPU: those of the package first, common head sizes before others."""
    all_configs = []
    for head_dim in HEAD_DIMS:
        of_kernels = candidates(head_dim, capability, sixteen_bit=True)._asdict()
        launched = [Config(kernel, head_dim, of_kernels[kernel][0]) for kernel in KERNELS]
        others = [Config(kernel, head_dim, sizes) for kernel in KERNELS for sizes in of_kernels[kernel][1:]]
        masked = [Config(kernel, head_dim, of_kernels[kernel][0], masked=True) for kernel in KERNELS]
        all_configs += [*launched, *others, *masked]
    return all_configs


def is_default(config: Config, capability: int) -> bool:
    """Return whether the package launches this kernel with these block sizes."""
    return not config.masked and getattr(default_launch(config.head_dim, capability), config.kernel) == config.blocks


def rehearsed_configs() -> list[Config]:
    """Return those that a rehearsal compiles: one of each way to make a kernel."""
    return [Config("dq", 64, BlockSizes(128, 32)), Config("forward", 64, BlockSizes(128, 64), masked=True)]
