"""Rounding of whole numbers, which floats would get wrong beyond 2^53."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up: 2 for 7 / 4."""
    return -(-dividend // divisor)
