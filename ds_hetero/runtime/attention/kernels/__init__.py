"""Block attention with log-sum-exp: interchangeable kernels, and the merging of partial results."""

from ds_hetero.batch.tiles import Band
from ds_hetero.runtime.attention.kernels.choice import KERNELS, available, select
from ds_hetero.runtime.attention.kernels.interface import AttentionKernel, PackedBlocks, SavedForward, Scores, merge_

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "Band",
    "PackedBlocks",
    "SavedForward",
    "Scores",
    "available",
    "merge_",
    "select",
]
