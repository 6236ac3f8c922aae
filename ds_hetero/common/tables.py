"""Framed text tables, as the commands print them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

# The space between a number and its unit, at which no cell is wrapped: "694 ms" stays on one line.
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:us|ms|s|min|%|x|[GMK]i?B|GB/s)(?![\w/]))")
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


def framed_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    title: str | None = None,
    *,
    numbers: bool = False,
    width: int | None = None,
) -> str:
    """Return a table with a frame; long cells are wrapped between words.

    Args:
        columns: heads of the columns.
        rows: cells of each row; None draws a line.
        title: line above the table.
        numbers: whether all columns but the first are aligned to the right.
        width: characters of a line; None: as many as the terminal has.
    """
    from shutil import get_terminal_size

    body = list(rows)
    while body and body[-1] is None:
        body.pop()
    rows_with_cells = [columns, *(row for row in body if row is not None)]
    widths = _column_widths(rows_with_cells, width or get_terminal_size().columns)

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
    """Return the width of every column in characters: that of its longest cell, or less.

    While a line is longer than ``width``, a column loses a character: the widest of those whose longest word still
    fits; if there is none, the widest of all, whose words are broken.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    word_widths = [max(map(_longest_word, column)) for column in columns]
    num_frame = 3 * len(widths) + 1  # characters of the frame in a line
    num_excess = sum(widths) + num_frame - width
    num_removable = sum(widths) - len(widths)  # every column keeps one character
    for _ in range(max(0, min(num_excess, num_removable))):
        with_whole_words = [i for i, width_of_word in enumerate(word_widths) if widths[i] > width_of_word]
        i = max(with_whole_words or range(len(widths)), key=widths.__getitem__)
        widths[i] -= 1
    return widths


def _longest_word(cell: str) -> int:
    """Return the characters of a cell's longest word; a number and its unit are one word."""
    return max(map(len, _BEFORE_UNIT.sub(_NO_BREAK_SPACE, cell).split(" ")))


def _row_lines(row: Sequence[str], widths: Sequence[int], numbers: bool) -> Iterator[str]:
    """Yield the lines of one row, as many as the cell with the most lines has."""
    lines_of_cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for texts in zip_longest(*lines_of_cells, fillvalue=""):
        cells = []
        for i, (text, width) in enumerate(zip(texts, widths, strict=True)):
            is_number = numbers and i > 0
            cells.append(text.rjust(width) if is_number else text.ljust(width))
        yield f"│ {' │ '.join(cells)} │"


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrap a cell between words into lines of at most ``width`` characters."""
    if len(cell) <= width:
        return [cell]
    from textwrap import wrap

    lines = wrap(_BEFORE_UNIT.sub(_NO_BREAK_SPACE, cell), width)
    return [line.replace(_NO_BREAK_SPACE, " ") for line in lines]
