"""Read the fenced blocks of README.md and docs/ for the tests that run them.

A block of commands or Python is run as it stands, unless one of these comments is in the line before its fence. Readers
of the page do not see them:

    <!-- not run in tests: REASON -->
    <!-- runs on two CPU ranks in the tests -->
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(
    r"(?P<before>[^\n]*)\n(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)\n *```(?=\n)",
    re.DOTALL,
)
_NOT_RUN = re.compile(r"<!-- not run in tests: (.+) -->")
_ON_RANKS = re.compile(r"<!-- runs on two CPU ranks in the tests.* -->")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block.

    Args:
        page: the file.
        line: of the fence, counted from 1.
        language: as written after the fence.
        title: name of the file that the block shows; empty if it shows none.
        text: its content.
        not_run: reason for which the tests do not run it; empty if they do.
        on_ranks: whether it trains on two ranks.
        prints: the block of text that follows, which the page says is its output.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None
    on_ranks: bool
    prints: str | None

    @property
    def runnable(self) -> bool:
        """Whether a reader would run it."""
        return self.language in ("bash", "python") and self.title is None

    @property
    def name(self) -> str:
        """Id of the test that runs it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> tuple[Block, ...]:
    """Return all fenced blocks of a page, in order."""
    text = page.read_text()
    matches = list(_FENCE.finditer(text))
    blocks = []
    for i, match in enumerate(matches):
        output = matches[i + 1] if i + 1 < len(matches) else None
        follows = output is not None and output["language"] == "text"
        not_run = _NOT_RUN.search(match["before"])
        blocks.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start("language")) + 1,
                language=match["language"],
                title=match["title"],
                text=textwrap.dedent(match["indent"] + match["text"]) if match["indent"] else match["text"],
                not_run=not_run[1] if not_run else None,
                on_ranks=bool(_ON_RANKS.search(match["before"])),
                prints=output["text"] if output is not None and follows else None,
            )
        )
    return tuple(blocks)


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows into ``folder``, and links to the folders of the clone."""
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.text + "\n")
    for name in ("ds_configs", "examples"):
        (folder / name).symlink_to(ROOT / name)


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page))
