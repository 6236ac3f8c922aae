"""Tables of docs/ that are made of the tables that decide: keys of DeepSpeed, arguments of a forward, adapters of PEFT.

    python -m tests.decision_pages          # writes them into deepspeed-keys.md, forward-arguments.md, adapters.md

`tests/unit/test_docs_pages.py` checks that the pages hold these tables, `test_deepspeed_keys.py`,
`test_forward_arguments.py` and `test_adapters.py` of tests/integration that what they say is so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_hetero.common.reading import NameRow
from ds_hetero.engine.arguments import ARGUMENTS, Argument
from ds_hetero.frameworks.deepspeed.keys import KEYS, Key
from ds_hetero.frameworks.transformers.model.model_checks import ADAPTERS
from tests.integration.models.test_quantized import parity_table
from tests.support import ROOT

_NOTHING = (None, False, "none", "auto", {}, [])  # values that need no mention


class Page(NamedTuple):
    """A table of a page.

    Args:
        path: of the page.
        name: of the first column, and of the places of the table and its counts.
        rows: the table that decides.
        remarks: of a row, beside its reason and what passes.
        summary: of all rows, beside their counts by kind.
    """

    path: Path
    name: str
    rows: Mapping[str, Any]
    remarks: Callable[[Any], list[str]] = lambda row: []
    summary: Callable[[list[Any]], str] = lambda rows: ""

    def with_tables(self) -> str:
        """The page with this table and its counts replaced."""
        text, rows = self.path.read_text(), list(self.rows.values())
        total = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in rows).most_common())
        lines = [f"| `{name}` | {row.kind} | {self._remark(row)} |" for name, row in sorted(self.rows.items())]
        tables = {
            f"counts of {self.name}s": f"{len(rows)} rows: {total}. {self.summary(rows)}".rstrip(),
            f"{self.name}s": "\n".join([f"| {self.name} | here | remark |", "|---|---|---|", *lines]),
        }
        for name, table in tables.items():
            text = _with_table(text, name, table)
        return text

    def _remark(self, row: NameRow) -> str:
        passing = [value for value in row.off if value not in _NOTHING]
        passes = (
            [f"passes: {', '.join(f'`{value}`' for value in passing)}"] if row.kind == "refused" and passing else []
        )
        return "; ".join([*([row.why] if row.why else []), *passes, *self.remarks(row)])


class ParityPage(NamedTuple):
    """The table of adapters by base, stage and sharing; see `Page`."""

    path: Path
    name: str = "parity"

    def with_tables(self) -> str:
        """See `Page.with_tables`."""
        return _with_table(self.path.read_text(), self.name, parity_table())


def _with_table(text: str, name: str, table: str) -> str:
    place = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    text, count = re.subn(place, lambda match: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL)
    assert count == 1, f"a page has {count} places for {name!r}"
    return text


def _of_key(key: Key) -> list[str]:
    return [f"refused with pipelines: {key.with_pipelines}"] if key.with_pipelines else []


def _of_argument(argument: Argument) -> list[str]:
    in_calls = [f"in `handle.sharded_call`: {argument.in_calls}"] if argument.in_calls else []
    return [*in_calls, *(["models with images or sounds alone"] if argument.of_towers else [])]


PAGES = (
    Page(
        ROOT / "docs" / "deepspeed-keys.md",
        "key",
        KEYS,
        _of_key,
        lambda keys: f"{sum(bool(key.with_pipelines) for key in keys)} more are refused with pipelines.",
    ),
    Page(
        ROOT / "docs" / "forward-arguments.md",
        "argument",
        ARGUMENTS,
        _of_argument,
        lambda arguments: (
            "Pipelines take "
            + ", ".join(f"`{name}`" for name, argument in ARGUMENTS.items() if argument.in_pipelines)
            + f" alone, {sum(argument.in_pipelines for argument in arguments)} of them."
        ),
    ),
    Page(ROOT / "docs" / "adapters.md", "kind", {name: row for name, row in ADAPTERS.items() if "." not in name}),
    Page(
        ROOT / "docs" / "adapters.md",
        "setting",
        {name.removeprefix("LORA."): row for name, row in ADAPTERS.items() if "." in name},
    ),
    ParityPage(ROOT / "docs" / "adapters.md"),
)


if __name__ == "__main__":
    for page in PAGES:
        page.path.write_text(page.with_tables())
