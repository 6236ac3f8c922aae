"""Page of a run in Markdown: how its parts ended, their figures, and the judgements on defaults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_LONGEST_CELL = 160
_NOT_A_COLUMN = ("env", "traceback")


def as_page(result: dict[str, Any]) -> str:
    """Return the page; the findings come last."""
    kind = "A rehearsal on CPUs: no figure here is one of a GPU" if result["rehearsal"] else "A run on one GPU"
    lines = [
        "# The first ten GPU minutes",
        "",
        f"{kind}. `{result['command']}`, {result['started']}, {result['seconds']:.0f} s"
        f" of {result.get('budget_s', 0):.0f}, processes by {result.get('start_method', 'none')}.",
        "",
        "## Parts",
        "",
    ]
    lines += _table(
        ("section", "part", "ranks", "outcome", "seconds", "rows", "why", "not rehearsed"),
        [
            (
                entry["section"],
                entry["part"],
                entry["ranks"],
                entry["outcome"],
                entry.get("seconds", ""),
                len(entry["rows"]),
                _last_line(entry.get("why", "")),
                entry.get("unrehearsed", ""),
            )
            for entry in result["parts"]
        ],
    )
    lines += ["", "## Figures" + (", rehearsed" if result["rehearsal"] else ""), ""]
    for entry in result["parts"]:
        if entry["rows"]:
            lines += [f"### {entry['section']}: {entry['part']}", "", *_rows_table(entry["rows"]), ""]
    lines += ["## What it says of the defaults", ""]
    lines += _table(
        ("finding", "today's default", "the run", "figure"),
        [(each["name"], each["default"], each["verdict"], each["figure"]) for each in result["findings"]],
    )
    return "\n".join(lines) + "\n"


def _rows_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one table of all rows, with a column for every key."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in _NOT_A_COLUMN]
    return _table(columns, [[row.get(column, "") for column in columns] for row in rows])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, dict | list):
        text = json.dumps(value)
    else:
        text = str(value)
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST_CELL or " " in text[:20] else text[:_LONGEST_CELL] + " ..."


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which is the error."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
