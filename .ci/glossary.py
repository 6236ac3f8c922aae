"""Hook of mkdocs: link the first use of a glossary term on every page of the site to its explanation.

Code, links, headings, tables and HTML stay as they are. The meaning of a term is also the title of the link, which
browsers show under the mouse.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).resolve().parents[1] / "docs" / "glossary.md"
WITHOUT_LINKS = ("glossary.md", "api.md")

# Words of the table that mean the same wherever they stand. Others, such as "unit" and "move", are everyday words too.
TERMS = (
    "1F1B",
    "all-to-all",
    "cost model",
    "filler",
    "fingerprint",
    "global batch",
    "gloo",
    "GQA",
    "head exchange",
    "KV head",
    "lane",
    "MFU",
    "micro-batch",
    "NIC",
    "node server",
    "placement",
    "rank",
    "rendezvous",
    "replica",
    "ring attention",
    "schedule",
    "shard",
    "sharded call",
    "sub-ring",
    "token weight",
    "Ulysses",
    "USP",
)

_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_MASKED = re.compile(
    r"^ *```.*?^ *```$"  # blocks of code
    r"|<!--.*?-->|<form.*?</form>|<summary>.*?</summary>|<[^>]+>"
    r"|^#.*?$|^ *\|.*?$|^:::.*?$|^!!!.*?$"  # headings, tables, directives
    r"|!?\[[^\]]*\]\([^)\s]*(?: \"[^\"]*\")?\)"  # links and pictures
    r"|`[^`]+`"
    r"|(?:[Aa]dapters?|LoRA) (?:of|have|has) (?:this )?rank\b|\b(?:four|eight|\d+) lanes\b",  # of LoRA, and of PCIe
    re.DOTALL | re.MULTILINE,
)


def meanings() -> dict[str, str]:
    """Return the table of the glossary: meaning by word."""
    rows = _ROW.findall(GLOSSARY.read_text())
    return dict(rows[1:])  # the first row is the head


def anchor(term: str) -> str:
    """Return the id of a term's row."""
    return "term-" + re.sub(r"\W+", "-", term.lower())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links; called by mkdocs."""
    source = page.file.src_uri
    if source == "glossary.md":
        return with_anchors(markdown)
    return markdown if source in WITHOUT_LINKS else with_links(markdown, source)


def with_anchors(markdown: str) -> str:
    """Return the glossary with an id in the row of every term."""
    return _ROW.sub(lambda row: f'| <a id="{anchor(row[1])}"></a>{row[1]} | {row[2]} |', markdown)


def with_links(markdown: str, source: str) -> str:
    """Return a page's text in which the first use of every term is a link to the glossary.

    Args:
        source: path of the page below docs/.
    """
    glossary = posixpath.relpath("glossary.md", posixpath.dirname(source) or ".")
    table = meanings()
    for term in sorted(TERMS, key=len, reverse=True):  # "sharded call" before "shard"
        masked = [match.span() for match in _MASKED.finditer(markdown)]
        for use in _uses(term).finditer(markdown):
            if any(start <= use.start() < stop for start, stop in masked):
                continue
            title = re.sub(r"[`\"]", "", table[term])
            link = f'[{use[0]}]({glossary}#{anchor(term)} "{title}")' + "{ .term }"
            markdown = markdown[: use.start()] + link + markdown[use.end() :]
            break
    return markdown


def _uses(term: str) -> re.Pattern[str]:
    """Return the pattern of a term in running text: also as a plural, and with a capital at the start of a sentence."""
    first, rest = term[0], re.escape(term[1:])
    return re.compile(rf"(?<![\w/.\-])[{first.upper()}{first}]{rest}(?:es|s)?(?![\w\-/])")
