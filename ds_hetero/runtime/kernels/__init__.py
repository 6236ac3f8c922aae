"""Block attention with log-sum-exp: three interchangeable kernels, and the merging of partial results."""

from ds_hetero.runtime.kernels.choice import available, select
from ds_hetero.runtime.kernels.interface import AttentionKernel, Band
from ds_hetero.runtime.kernels.merge import merge_

__all__ = ["AttentionKernel", "Band", "available", "merge_", "select"]
