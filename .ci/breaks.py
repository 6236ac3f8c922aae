"""Hook of mkdocs: where the code of a page may break at the edge of a phone.

Long names in tables break behind dots and underscores and before capitals. Elsewhere an option or a name with hyphens
stays in one piece, as in ``--tiled-loss``: browsers break behind every hyphen.
"""

from __future__ import annotations

import re
from typing import Any

_TABLE = re.compile(r"(<table.*?</table>)", re.DOTALL)
_CODE = re.compile(r"<code[^>]*>.*?</code>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<>]+")
_BREAK = re.compile(r"(?<=[._/])(?=\w)|(?<=[a-z])(?=[A-Z])")
# Longer names may not fit beside the indentation of a phone's line.
_HYPHENATED = re.compile(r"(?<!\S)(?=\S*\w-\w|--\w)[\w./\-]{3,32}(?!\S)")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's HTML with places where a name may break, and names that must not; called by mkdocs."""
    parts = _TABLE.split(html)
    parts[0::2] = (_CODE.sub(_unbroken, part) for part in parts[0::2])
    parts[1::2] = (_CODE.sub(_breakable, part) for part in parts[1::2])
    return "".join(parts)


def _unbroken(code: re.Match[str]) -> str:
    span = r'<span class="unbroken">\g<0></span>'
    return _TEXT.sub(lambda text: _HYPHENATED.sub(span, text[0]), code[0])


def _breakable(code: re.Match[str]) -> str:
    return _TEXT.sub(lambda text: _BREAK.sub("<wbr>", text[0]), code[0])
