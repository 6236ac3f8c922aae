"""Numbers and lists in words, as the command line, log lines and error messages write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

from ds_hetero.common.units import GIB

T = TypeVar("T")


def time_text(seconds: float) -> str:
    """Return a time as ``12.3 us``, ``12.3 ms``, ``4.56 s`` or ``7.8 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min"


def bytes_text(num_bytes: float) -> str:
    """Return bytes in GiB with one decimal, without the unit: ``12.3``."""
    return f"{num_bytes / GIB:.1f}"


def unlike_bytes_texts(*sizes: int) -> tuple[str, ...]:
    """Sizes in the largest unit in which unequal ones print differently: ``("10.20 MiB", "10.30 MiB")``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        texts = tuple(f"{size / factor:,.2f} {unit}" for size in sizes)
        if len(set(texts)) == len(set(sizes)) and min(sizes) * 100 >= factor:
            return texts
    return tuple(f"{size:,} bytes" for size in sizes)


def listed(names: Iterable[str], most: int = 50) -> str:
    """Join the first ``most`` names with commas; names over 80 characters and further names end in "..."."""
    shown = [name if len(name) <= 80 else f"{name[:77]}..." for name in islice(names, most + 1)]
    if len(shown) > most:
        shown[most] = "..."
    return ", ".join(shown)


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Group ranks by value; groups in the order of their first rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as ``rank 1`` or ``ranks 0, 2``."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"
