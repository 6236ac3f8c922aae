"""The sections in the order in which they run: ten minutes in all."""

from __future__ import annotations

from benchmarks.first_gpu.sections import cudnn, environment, triton

SECTIONS = (environment.SECTION, cudnn.SECTION, triton.SECTION)
