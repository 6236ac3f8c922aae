"""Framed tables of the commands' output."""

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
        rows: cells of each row; None draws a line.
        numbers: whether all columns but the first are aligned at the right.
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
    """Characters of every column: those of its longest cell; while lines are too long, the widest column loses one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    frame = 3 * len(widths) + 1
    too_wide = sum(widths) + frame - width
    at_most = sum(widths) - len(widths)  # every column keeps one character
    for _ in range(max(0, min(too_wide, at_most))):
        widths[widths.index(max(widths))] -= 1
    return widths


def _row_lines(row: Sequence[str], widths: Sequence[int], numbers: bool) -> Iterator[str]:
    """Yield the lines of one row, as many as the cell with the most lines has."""
    lines_of_cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
    for texts in zip_longest(*lines_of_cells, fillvalue=""):
        cells = []
        for i, (text, width) in enumerate(zip(texts, widths, strict=True)):
            is_number = numbers and i > 0
            cells.append(text.rjust(width) if is_number else text.ljust(width))
        yield f"│ {' │ '.join(cells)} │"


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a cell, broken between words."""
    if len(cell) <= width:
        return [cell]
    from textwrap import wrap

    return wrap(cell, width)
