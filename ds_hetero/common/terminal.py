"""Fit printed text to the terminal: its width, wrapped lines with a hanging indent, and colours of verdicts.

A file or a pipe gets every line whole and without colour, so that programs can search it. The variable COLUMNS gives a
width in that case too.
"""

from __future__ import annotations

import os
import re
import sys
from textwrap import wrap
from typing import TextIO

_MIN_WIDTH = 40  # a narrower terminal wraps by itself; tables and labels need this much
_COLOURS = {"good": "32", "bad": "1;31", "caution": "33"}  # green, bold red, yellow: SGR codes of ANSI terminals
_LABEL_WIDTH = 12  # "predicted:  " and the other labels of lines are padded to it
_LABEL = re.compile(r"\w[\w -]*: +(?=\S)")
_FRAME = tuple("┌│├└")  # first characters of the lines of a table, whose width is that of `framed_table`


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of COLUMNS, else of the terminal behind a stream; None for a file or a pipe.

    Args:
        stream: stream that is written to; None: stdout.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return max(_MIN_WIDTH, int(columns))
    try:
        columns_of_terminal = os.get_terminal_size((stream or sys.stdout).fileno()).columns
    except (AttributeError, OSError, ValueError):  # not a terminal, or a stream without a descriptor
        return None
    return max(_MIN_WIDTH, columns_of_terminal) if columns_of_terminal else None


def fitted_text(text: str, width: int | None) -> str:
    """Wrap the lines of a text that are longer than a terminal's width, between words.

    Continuations stand below the text of a label: ``predicted:  914 ms per block,`` continues after 12 spaces. Lines
    without a label continue two columns further in. Frames of tables, and words longer than a line, stay whole.

    Args:
        width: result of `terminal_width`; None leaves the text as it is.
    """
    if width is None:
        return text
    return "\n".join(fitted for line in text.split("\n") for fitted in _fitted_lines(line, width))


def _fitted_lines(line: str, width: int) -> list[str]:
    """Return the lines into which one line is wrapped for a terminal of ``width`` characters."""
    if len(line) <= width or line.lstrip().startswith(_FRAME):
        return [line]
    label = _LABEL.match(line)
    if label is not None and label.end() == _LABEL_WIDTH:
        indent = _LABEL_WIDTH
    else:
        num_spaces = len(line) - len(line.lstrip())
        indent = num_spaces if num_spaces >= _LABEL_WIDTH else num_spaces + 2
    return wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def coloured(text: str, verdict: str, stream: TextIO | None = None) -> str:
    """Colour a text by its verdict if a terminal shows it: "good" green, "bad" red, "caution" yellow.

    A file, a pipe, a terminal without colours and the variable NO_COLOR get the text as it is.
    """
    target = stream or sys.stdout
    if not target.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{_COLOURS[verdict]}m{text}\033[0m"
