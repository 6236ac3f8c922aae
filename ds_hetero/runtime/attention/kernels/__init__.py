"""Block attention with log-sum-exp: three interchangeable kernels, and the merging of partial results."""

from ds_hetero.runtime.attention.kernels.choice import available, select
from ds_hetero.runtime.attention.kernels.interface import AttentionKernel, Band
from ds_hetero.runtime.attention.kernels.merge import merge_

__all__ = ["AttentionKernel", "Band", "available", "merge_", "select"]
