"""The page docs/deepspeed-keys.md, made of the table that decides.

    python -m tests.deepspeed_keys          # writes the tables into docs/deepspeed-keys.md

`tests/unit/test_docs_pages.py` checks that the page holds these tables, `tests/integration/test_deepspeed_keys.py` that
what they say is so.
"""

from __future__ import annotations

import re
from collections import Counter

from ds_hetero.integrations.deepspeed.keys import KEYS, Key
from tests.support import ROOT

__all__ = ["PAGE", "with_tables"]

PAGE = ROOT / "docs" / "deepspeed-keys.md"


def with_tables(page: str) -> str:
    """The page with its tables replaced."""
    counts = Counter(key.kind for key in KEYS.values())
    pipelines = sum(bool(key.with_pipelines) for key in KEYS.values())
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    rows = [f"| `{path}` | {key.kind} | {_remark(key)} |" for path, key in sorted(KEYS.items())]
    tables = {
        "counts": f"{len(KEYS)} rows: {total}. {pipelines} more are refused with pipelines.",
        "keys": "\n".join(["| key | here | remark |", "|---|---|---|", *rows]),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(pattern, lambda match, text=table: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
        assert count == 1, f"{PAGE.name} has {count} places for {name!r}"
    return page


def _remark(key: Key) -> str:
    allowed = [value for value in key.off if value not in (None, False, "none", "auto", {}, [])]
    remarks = [key.why] if key.why else []
    if key.kind == "refused" and allowed:
        remarks.append(f"passes: {', '.join(f'`{value}`' for value in allowed)}")
    if key.with_pipelines:
        remarks.append(f"refused with pipelines: {key.with_pipelines}")
    return "; ".join(remarks)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
