"""Replace what a command has generated in a page: the lines between the comments ``begin NAME`` and ``end NAME``."""

from __future__ import annotations

import re


def with_generated(page: str, name: str, content: str) -> str:
    """Return the text of a page with ``content`` between the comments of ``name``, which it must have once."""
    place = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    text, count = re.subn(place, lambda match: f"{match[1]}{content}\n{match[2]}", page, flags=re.DOTALL)
    assert count == 1, f"the page has {count} places for {name!r}"
    return text
