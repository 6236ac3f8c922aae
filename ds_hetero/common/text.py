"""Texts for numbers and lists in output, log lines and error messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

from ds_hetero.common.units import GIB

T = TypeVar("T")


def time_text(seconds: float) -> str:
    """Write a time as ``12.3 us``, ``12.3 ms``, ``4.56 s`` or ``7.8 min``; no time as ``0 s``."""
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min"


def bytes_text(num_bytes: float) -> str:
    """Write a number of bytes in GiB with one decimal, without the unit: ``12.3``."""
    return f"{num_bytes / GIB:.1f}"


def unlike_bytes_texts(*sizes: int) -> tuple[str, ...]:
    """Write sizes in the largest unit in which unequal sizes have different texts: ``("10.20 MiB", "10.30 MiB")``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        texts = tuple(f"{size / factor:,.2f} {unit}" for size in sizes)
        if len(set(texts)) == len(set(sizes)) and min(sizes) * 100 >= factor:
            return texts
    return tuple(f"{size:,} bytes" for size in sizes)


def listed(names: Iterable[str], max_names: int = 50) -> str:
    """Join names with commas: ``a, b, ...``; the dots stand for names after the first ``max_names``.

    A name of more than 80 characters is shortened to 77 and dots.
    """
    shown = [name if len(name) <= 80 else f"{name[:77]}..." for name in islice(names, max_names + 1)]
    if len(shown) > max_names:
        shown[max_names] = "..."
    return ", ".join(shown)


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks of every value, in the order in which values first occur.

    ((0, "a"), (1, "b"), (2, "a")) gives {"a": [0, 2], "b": [1]}.
    """
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ranks as ``rank 1`` or ``ranks 0, 2``."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return the text of ranks, with runs of consecutive ranks as ranges: ``0-3, 7`` for ranks 0, 1, 2, 3 and 7."""
    ranges: list[tuple[int, int]] = []  # first and last rank
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
