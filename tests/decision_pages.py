"""Write the tables of docs/ that are made from tables of the package: keys of DeepSpeed, forward arguments, adapters.

    python -m tests.decision_pages          # writes them into deepspeed-keys.md, forward-arguments.md, adapters.md

`tests/unit/test_docs_pages.py` checks that the pages hold these tables. `test_deepspeed_keys.py`,
`test_forward_arguments.py` and `test_adapters.py` of tests/integration check that the tables are true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_hetero.common.name_rows import NameRow
from ds_hetero.engine.arguments import ARGUMENTS, Argument
from ds_hetero.frameworks.deepspeed.keys import KEYS, Key
from ds_hetero.frameworks.transformers.model.model_checks import ADAPTERS
from tests.generated_places import with_generated
from tests.integration.models.test_quantized import parity_table
from tests.support import ROOT

MAX_REMARK = 60  # characters; a longer remark stands in a list below the table
_NOTHING = (None, False, "none", "auto", {}, [])  # values that need no mention


class Page(NamedTuple):
    """One page and its table.

    Args:
        path: of the page.
        name: heading of the first column; it also marks the places of the table and of its counts in the page.
        rows: the package's table.
        remarks: return a row's text besides its reason and the values that pass.
        summary: returns the text on all rows besides their counts by kind.
    """

    path: Path
    name: str
    rows: Mapping[str, Any]
    remarks: Callable[[Any], list[str]] = lambda row: []
    summary: Callable[[list[Any]], str] = lambda rows: ""

    def with_tables(self) -> str:
        """Return the page's text with its table and counts replaced."""
        text, rows = self.path.read_text(), list(self.rows.values())
        total = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in rows).most_common())
        lines: list[str] = []
        names_by_remark: dict[str, list[str]] = {}
        for name, row in sorted(self.rows.items()):
            remark = self._remark(row)
            if len(remark) > MAX_REMARK:
                names_by_remark.setdefault(remark, []).append(f"`{name}`")
                remark = "see below"
            lines.append(f"| `{name}` | {row.kind} | {remark} |")
        if names_by_remark:
            notes = [f"* {', '.join(names)}: {remark}" for remark, names in names_by_remark.items()]
            lines += ["", f"Longer remarks on {self.name}s:", "", *notes]
        tables = {
            f"counts of {self.name}s": f"{len(rows)} rows: {total}. {self.summary(rows)}".rstrip(),
            f"{self.name}s": "\n".join([f"| {self.name} | here | remark |", "|---|---|---|", *lines]),
        }
        for name, table in tables.items():
            text = with_generated(text, name, table)
        return text

    def _remark(self, row: NameRow) -> str:
        passing = [value for value in row.off if value not in _NOTHING]
        passes = (
            [f"passes: {', '.join(f'`{value}`' for value in passing)}"] if row.kind == "refused" and passing else []
        )
        return "; ".join([*([row.why] if row.why else []), *passes, *self.remarks(row)])


class ParityPage(NamedTuple):
    """The page of adapters, whose table is by base, ZeRO stage and sharding; see `Page`."""

    path: Path
    name: str = "parity"

    def with_tables(self) -> str:
        """See `Page.with_tables`."""
        return with_generated(self.path.read_text(), self.name, parity_table())


def _of_key(key: Key) -> list[str]:
    return [f"refused with pipelines: {key.with_pipelines}"] if key.with_pipelines else []


def _of_argument(argument: Argument) -> list[str]:
    in_calls = [f"in `handle.sharded_call`: {argument.in_calls}"] if argument.in_calls else []
    return [*in_calls, *(["only for models with images or sounds"] if argument.of_towers else [])]


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
            f"Pipelines take only {sum(argument.in_pipelines for argument in arguments)} of them: "
            + ", ".join(f"`{name}`" for name, argument in ARGUMENTS.items() if argument.in_pipelines)
            + "."
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
