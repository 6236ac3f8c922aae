"""Update the outputs of commands that README.md and docs/ show to what the commands print now.

    python -m tests.docs_outputs [PAGE ...]

A page shows some of the lines that a command prints. Each shown line that is no longer printed is replaced by the most
similar printed line; tables keep their columns.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

from ds_hetero.cli import main
from tests.markdown import BLOCKS, Block, write_files
from tests.support import ROOT

MIN_SIMILARITY = 0.4  # of two lines that are the same one with other numbers


def printed_lines(block: Block) -> list[str]:
    """Return the lines that the commands of a block print, without the frames of tables."""
    out, here = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        write_files(block.page, Path(folder))
        os.chdir(folder)
        try:
            for command in block.text.replace("\\\n", " ").splitlines():
                with contextlib.suppress(SystemExit):
                    main(_arguments(command))
        finally:
            os.chdir(here)
    return [line for line in out.getvalue().splitlines() if line.strip()]


def _arguments(command: str) -> list[str]:
    import shlex

    return shlex.split(command, comments=True)[1:]


def _cells(line: str) -> list[str]:
    """Return the cells of a table's row, printed or shown."""
    if line[:1] in "│┃":
        return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
    return re.split(r" {2,}", line.strip())


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """Return the shown lines as they are printed now, with columns of neighbouring rows aligned."""
    rows = [_cells(line) for line in printed]
    texts = [" ".join(row) for row in rows]
    out: list[list[str]] = []
    unused, first = set(range(len(texts))), 0
    for line in shown:
        words = " ".join(_cells(line))
        scores = [SequenceMatcher(None, words, text, autojunk=False).ratio() for text in texts]
        best = max(unused, key=lambda i: (scores[i] - (0.2 if i < first else 0), -i), default=None)
        if best is None or scores[best] < MIN_SIMILARITY:
            raise SystemExit(f"nothing that is printed is like {line!r}")
        out.append(rows[best] if printed[best][:1] in "│┃" else [printed[best]])
        first = best + 1
        unused.discard(best)
    return _aligned(out)


def _aligned(rows: list[list[str]]) -> list[str]:
    lines: list[str] = []
    start = 0
    while start < len(rows):
        stop = start
        while stop < len(rows) and len(rows[stop]) == len(rows[start]):
            stop += 1
        part = rows[start:stop]
        widths = [max(len(row[i]) for row in part) for i in range(len(part[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in part
        ]
        start = stop
    return lines


def renew(page: Path) -> None:
    """Update all outputs of a page."""
    for block in [block for block in BLOCKS if block.page == page and block.prints]:
        if block.language != "bash" or block.not_run or block.on_ranks:
            continue
        shown = (block.prints or "").splitlines()
        lines = renewed(shown, printed_lines(block))
        if lines != shown:
            page.write_text(page.read_text().replace(f"\n{block.prints}\n", "\n" + "\n".join(lines) + "\n", 1))
            print(f"{block.name}: renewed")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "10000"  # no line is wrapped
    names = [Path(name).resolve() for name in sys.argv[1:]]
    for each in names or sorted({block.page for block in BLOCKS}):
        print(each.relative_to(ROOT))
        renew(each)
