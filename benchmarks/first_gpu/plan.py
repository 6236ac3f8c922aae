"""The sections in the order in which they run; their budgets sum to ten minutes."""

from __future__ import annotations

from benchmarks.first_gpu.sections import cudnn, environment, more_ranks, overlap, ring, steps, triton, two_ranks

SECTIONS = (
    environment.SECTION,
    cudnn.SECTION,
    triton.SECTION,
    ring.SECTION,
    overlap.SECTION,
    two_ranks.SECTION,
    more_ranks.SECTION,
    steps.SECTION,
)
