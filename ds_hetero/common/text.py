"""Numbers and words for people, as the command line, log lines and error messages write them.

Factors from the units that people write to SI base units: a value in GB times `GB` is in bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice, zip_longest
from typing import TypeVar

GB = 1e9  # bytes, as in bandwidths
GIB = 2**30  # bytes, as in sizes of memory
TERA = 1e12  # as in TFLOPS
MICRO = 1e-6  # as in microseconds

T = TypeVar("T")


def announce(text: str) -> None:
    """Say something once: as a log record where the script lets these through, else on stderr."""
    import logging  # planning does without

    logger = logging.getLogger("ds_hetero")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(f"ds_hetero: {text}", file=sys.stderr, flush=True)


def time_text(seconds: float) -> str:
    """``12.3 us``, ``12.3 ms``, ``4.56 s`` or ``7.8 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


def bytes_text(num_bytes: float) -> str:
    """GiB with one decimal, without the unit: ``12.3``."""
    return f"{num_bytes / GIB:.1f}"


def unlike_bytes_texts(*sizes: int) -> tuple[str, ...]:
    """Sizes in the largest unit in which they differ as they are printed: ``("10.20 MiB", "10.30 MiB")``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        texts = tuple(f"{size / factor:,.2f} {unit}" for size in sizes)
        if len(set(texts)) == len(set(sizes)) and min(sizes) * 100 >= factor:
            return texts
    return tuple(f"{size:,} bytes" for size in sizes)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that ``word`` is probably a misspelling of, upper and lower case aside; None if none is close.

    Args:
        cutoff: least similarity, from 0 (anything) to 1 (equal).
    """
    if len(word) > 100:  # no misspelling, and the comparison takes quadratic time
        return None
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in islice(known, 1000) if len(name) <= 100}
    close = get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean "x"?)`` with the known word nearest to ``word``; empty if none is near. See `nearest`."""
    near = nearest(word, known, cutoff)
    return f' (did you mean "{near}"?)' if near else ""


def listed(names: Iterable[str], most: int = 50) -> str:
    """The names with commas between them; of very many, the first ``most``."""
    shown = [name if len(name) <= 80 else f"{name[:77]}..." for name in islice(names, most + 1)]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Ranks with equal values together, in the order of their first rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def framed_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    title: str | None = None,
    *,
    numbers: bool = False,
    width: int | None = None,
) -> str:
    """A table with a frame; cells that are too long for the width are broken between words.

    Args:
        rows: their cells; None draws a line.
        numbers: all columns but the first are aligned at the right.
        width: characters of a line; left out, those of the terminal.
    """
    from shutil import get_terminal_size

    body = list(rows)
    while body and body[-1] is None:
        body.pop()
    widths = [max(len(row[i]) for row in (columns, *body) if row is not None) for i in range(len(columns))]
    too_wide = sum(widths) + 3 * len(widths) + 1 - (width or get_terminal_size().columns)
    for _ in range(max(0, min(too_wide, sum(widths) - len(widths)))):
        widths[widths.index(max(widths))] -= 1

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (each + 2) for each in widths) + right

    lines = [title.center(len(line("┌", "┬", "┐"))).rstrip()] if title else []
    lines.append(line("┌", "┬", "┐"))
    for row in (columns, None, *body):
        if row is None:
            lines.append(line("├", "┼", "┤"))
            continue
        broken = (_broken(cell, each) for cell, each in zip(row, widths, strict=True))
        for parts in zip_longest(*broken, fillvalue=""):
            cells = (
                part.rjust(each) if numbers and i else part.ljust(each)
                for i, (part, each) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append(f"│ {' │ '.join(cells)} │")
    return "\n".join([*lines, line("└", "┴", "┘")])


def _broken(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    from textwrap import wrap

    return wrap(cell, width)
