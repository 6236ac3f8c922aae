"""Bounds of what people write: far above anything that exists, and low enough that nothing overflows further down.

Sums of what they bound fit into 64 bits, and their products into a float.
"""

from __future__ import annotations

from typing import Any

MAX_RANKS = 1_000_000
MAX_HEADS = 4096  # they are searched over one by one
MAX_LAYERS = 100_000
MAX_SEQ_LEN = 2**40  # tokens
MAX_BATCH = 2**20  # sequences of a micro-batch, and micro-batches of a step
MAX_STEPS = 10**9
MAX_WEIGHT = 1e18  # of tokens or of ZeRO shares, of which only ratios matter


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether a value is a whole number, and neither true nor false, within ``[least, most]``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_weight(value: Any) -> bool:
    """Whether a value is a number, and neither true nor false, within ``[0, MAX_WEIGHT]``; NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_WEIGHT


def whole_rule(value: Any, least: int, most: int) -> str:
    """The rule of `is_whole`, as far as ``value`` breaks it: ``a whole number >= 1``."""
    is_too_large = isinstance(value, int) and value > most
    return f"a whole number <= {most:,}" if is_too_large else f"a whole number >= {least}"
