"""Tables with a frame, as commands print them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest


def framed_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    title: str | None = None,
    *,
    numbers: bool = False,
    width: int | None = None,
) -> str:
    """Return a table with a frame; cells that are too long for the width are broken between words.

    Args:
        rows: their cells; None draws a line.
        numbers: all columns but the first are aligned at the right.
        width: characters of a line; left out, those of the terminal.
    """
    from shutil import get_terminal_size

    body = list(rows)
    while body and body[-1] is None:
        body.pop()
    cells_of_all = [columns, *(row for row in body if row is not None)]
    widths = _column_widths(cells_of_all, width or get_terminal_size().columns)

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (column_width + 2) for column_width in widths) + right

    top = rule("┌", "┬", "┐")
    lines = [title.center(len(top)).rstrip()] if title else []
    lines.append(top)
    for row in (columns, None, *body):
        if row is None:
            lines.append(rule("├", "┼", "┤"))
        else:
            lines += _row_lines(row, widths, numbers)
    lines.append(rule("└", "┴", "┘"))
    return "\n".join(lines)


def _column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Characters of every column: as its longest cell, the widest columns less until the lines fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    frame = 3 * len(widths) + 1
    too_wide = sum(widths) + frame - width
    at_most = sum(widths) - len(widths)  # every column keeps one character
    for _ in range(max(0, min(too_wide, at_most))):
        widths[widths.index(max(widths))] -= 1
    return widths


def _row_lines(row: Sequence[str], widths: Sequence[int], numbers: bool) -> Iterator[str]:
    """Lines of one row: as many as its highest cell has."""
    broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*broken, fillvalue=""):
        cells = []
        for i, (part, width) in enumerate(zip(parts, widths, strict=True)):
            at_right = numbers and i > 0
            cells.append(part.rjust(width) if at_right else part.ljust(width))
        yield f"│ {' │ '.join(cells)} │"


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell, broken between words."""
    if len(cell) <= width:
        return [cell]
    from textwrap import wrap

    return wrap(cell, width)
