"""Keys, units and checks of the values in a cluster file; every message names the place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from ds_hetero.common.text import nearest
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.errors import ClusterError

__all__ = ["DEVICE_KEYS", "MAY_BE_ZERO", "did_you_mean", "expect_keys", "number", "whole_number"]

# Keys of the file, the unit behind each, and the field it fills.
DEVICE_KEYS = {
    "peak_tflops": ("peak_flops_per_s", TERA),
    "memory_gib": ("memory_bytes", GIB),
    "memory_bandwidth_gb_per_s": ("memory_bytes_per_s", GB),
    "reserved_gib": ("reserved_bytes", GIB),
    "watts": ("watts", 1.0),
    "idle_watts": ("idle_watts", 1.0),
    "price_per_hour": ("price_per_hour", 1.0),
}
MAY_BE_ZERO = {"reserved_gib", "idle_watts", "price_per_hour"}
_UNIT_OF = {
    "bandwidth": "bandwidth_gb_per_s, in GB/s (10^9 bytes per second, one direction)",
    "memory_bandwidth": "memory_bandwidth_gb_per_s, in GB/s (10^9 bytes per second)",
    "latency": "latency_us, in microseconds",
    "memory": "memory_gib, in GiB (2^30 bytes)",
    "peak": "peak_tflops, in 10^12 dense bf16 operations per second",
    "total": "total_gb_per_s, in GB/s (10^9 bytes per second)",
}


def expect_keys(where: str, data: Any, *, required: set[str], allowed: set[str]) -> None:
    """Refuse what is no mapping, lacks a required key or has one that is not allowed; ``where`` is its place."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} must be a mapping with the keys {', '.join(sorted(allowed))}, got {data!r}.")
    for key in data:
        if key in allowed:
            continue
        stem = next((s for s in sorted(_UNIT_OF, key=len, reverse=True) if str(key).startswith(s)), None)
        if stem and any(name.startswith(stem) for name in allowed):
            raise ClusterError(f"{where}.{key}: this file has one unit per quantity. Give {_UNIT_OF[stem]}.")
        raise ClusterError(
            f"{where}: unknown key {key!r}{did_you_mean(str(key), allowed)} It takes {', '.join(sorted(allowed))}."
        )
    missing = sorted(required - set(data))
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}. It takes {', '.join(sorted(allowed))}.")


def number(where: str, value: Any, *, zero_ok: bool = False) -> float:
    """A positive number, or one that is not negative; ``where`` is its place in the file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ClusterError(f"{where} must be a number without a unit, got {value!r}; the unit is in the key.")
    if value < 0 or (value == 0 and not zero_ok):
        raise ClusterError(f"{where} must be {'at least' if zero_ok else 'greater than'} 0, got {value!r}.")
    return float(value)


def whole_number(where: str, value: Any) -> int:
    """A whole number of at least 1; ``where`` is its place in the file."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{where} must be a whole number >= 1, got {value!r}.")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names an unknown word: what it is probably a misspelling of."""
    close = nearest(word, known, cutoff=0.5)
    return f"; did you mean {close!r}?" if close else "."
