"""Exact rounding of quotients of whole numbers; floats would be wrong beyond 2^53."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up: 2 for 7 / 4."""
    return -(-dividend // divisor)
