"""Conversion factors to SI base units: a value in GB times `GB` is in bytes."""

from __future__ import annotations

GB = 1e9  # bytes, for bandwidths
GIB = 2**30  # bytes, for sizes of memory
TERA = 1e12  # as in TFLOPS
MICRO = 1e-6  # as in microseconds
SECONDS_PER_HOUR = 3600
