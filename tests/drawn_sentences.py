"""Draw sentences of README.md and the manual, for a reader who grades them: ``python -m tests.drawn_sentences SEED``.

Give them to somebody who knows deep learning but not this project. At least 34 of 40 should be clear at one reading.
Draw again with another seed after a page was rewritten.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

MIN_WORDS = 5  # shorter pieces are labels
_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_HTML = re.compile(r"<!--.*?-->|<form.*?</form>|<[^>]+>", re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)")  # of a link
_ITEM = re.compile(r"^([*+-]|\d+\.) ")
_OTHER = ("#", "|", ":::", "!!!", "![")  # beginnings of lines that are no running text
_END = re.compile(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*\[\"])")  # of a sentence: the next one begins with a capital


def paragraphs_of(text: str) -> Iterator[str]:
    """Yield the paragraphs and items of lists of a page, each as one line."""
    lines: list[str] = []
    for line in [*_HTML.sub("", _CODE.sub("", text)).splitlines(), ""]:
        stripped = line.strip()
        is_item = bool(_ITEM.match(stripped))
        if lines and (is_item or not stripped or stripped.startswith(_OTHER)):
            yield " ".join(lines)
            lines = []
        if stripped and not stripped.startswith(_OTHER):
            lines.append(_ITEM.sub("", stripped))


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a page's running text, without the targets of links."""
    pieces = (_TARGET.sub("]", piece) for paragraph in paragraphs_of(text) for piece in _END.split(paragraph))
    return [piece for piece in pieces if len(piece.split()) >= MIN_WORDS]


def pages() -> list[Path]:
    """Return README.md and the pages of the manual; those of docs/evidence are looked up, not read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.drawn_sentences", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--number", type=int, default=40)
    options = parser.parse_args()
    sentences = [(page.name, sentence) for page in pages() for sentence in sentences_of(page.read_text())]
    for name, sentence in random.Random(options.seed).sample(sentences, options.number):
        print(f"{name}: {sentence}")


if __name__ == "__main__":
    main()
