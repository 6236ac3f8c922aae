"""Hook of mkdocs: let long names in tables break behind dots and underscores, so that they fit on a phone."""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(r"(?<=<td><code>)[\w.\-]+[._][\w.\-]+(?=</code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's HTML with places where a name may break; called by mkdocs."""
    return _NAME.sub(lambda name: re.sub(r"([._])", r"\1<wbr>", name[0]), html)
