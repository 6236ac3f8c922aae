"""Write self-contained HTML pages: text, tables, and charts with the library that draws them.

    page = Page("title")
    page.section("Memory", html_table(("rank", "GiB"), rows), page.chart("bars", "Memory by rank", {...}))
    out.write_text(page.render())

All text that callers pass is escaped, except for `Markup`, which only this module makes. A page loads nothing from the
network: its content policy forbids requests. The numbers of a chart should also be in a table, for readers without a
mouse, a screen or scripts.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ds_hetero.common.reading import JsonDict, JsonObject

ECHARTS = "echarts-6.1.0.min.js"
"""The chart library: Apache ECharts 6.1.0, only the parts that the page uses; ``assets/echarts/README.md`` says how."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"  # forbids all requests
_MAX_NUMBER_WIDTH = 28  # characters of a cell up to which it counts as a number or a name, not as a sentence
_ASSETS = Path(__file__).with_name("assets")


class Markup(str):
    """HTML of this module, which is not escaped again."""

    __slots__ = ()


def _text(value: Any) -> str:
    """Return a value as text that is escaped for HTML; `Markup` is returned unchanged."""
    return value if isinstance(value, Markup) else html.escape(str(value))


def paragraph(*lines: Any) -> Markup:
    """Return a paragraph with a line break after each line but the last."""
    return Markup(f"<p>{'<br>'.join(map(_text, lines))}</p>")


def heading(text: str) -> Markup:
    """Return the title of a part of a section."""
    return Markup(f"<h3>{html.escape(text)}</h3>")


def html_table(headings: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> Markup:
    """Return a table whose first column has the names of the rows; columns with sentences are aligned to the left."""
    rows = list(rows)
    text_columns: set[int] = set()
    for row in rows:
        text_columns.update(column for column, value in enumerate(row) if _is_sentence(value))
    head = "".join(
        f'<th scope="col"{" class=text" if column in text_columns else ""}>{_text(heading)}</th>'
        for column, heading in enumerate(headings)
    )
    body = ""
    for row in rows:
        cells = (_cell(value, column in text_columns) for column, value in enumerate(row[1:], 1))
        body += f"<tr>{_row_name(row[0])}{''.join(cells)}</tr>"
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    return Markup(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption or "table")}"><table>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row_name(value: Any) -> str:
    """Return the name of a row as its heading; a sentence may wrap."""
    return f'<th scope="row"{" class=text" if _is_sentence(value) else ""}>{_text(value)}</th>'


def _cell(value: Any, is_text: bool) -> str:
    """Return a value as a cell of an HTML table; in a column of sentences it is aligned to the left and may wrap."""
    return f"<td{' class=text' if is_text else ''}>{_text(value)}</td>"


def _is_sentence(value: Any) -> bool:
    """Whether a cell's text is so long that it must be a sentence."""
    return len(str(value)) > _MAX_NUMBER_WIDTH


def details(summary: str, *parts: Any) -> Markup:
    """Put ``parts`` below a line ``summary``, hidden until the reader clicks that line."""
    return Markup(f"<details><summary>{_text(summary)}</summary>{''.join(map(_text, parts))}</details>")


def preformatted(text: str) -> Markup:
    """Make preformatted text, such as code to copy."""
    return Markup(f"<pre>{html.escape(text)}</pre>")


def definitions(values: JsonObject) -> Markup:
    """Make the list of the page's most important values, each with its name."""
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in values.items())
    return Markup(f'<dl class="cards">{items}</dl>')


class Page:
    """A page to which sections are added.

    Args:
        lead: one or two sentences on the subject of the page, below its title.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self._title, self._lead = title, lead
        self._sections: list[tuple[str, str, str]] = []
        self._charts: list[JsonDict] = []
        self._grid: JsonObject | None = None

    def section(self, title: str, *parts: Any) -> None:
        """Add a section; parts that are plain text become paragraphs."""
        number = len(self._sections) + 1
        body = "".join(part if isinstance(part, Markup) else paragraph(part) for part in parts)
        self._sections.append((f"section-{number}", title, body))

    def chart(self, kind: str, label: str, data: JsonObject, height: int = 260) -> Markup:
        """Add a chart, and return the element in which the page's script draws it.

        Args:
            kind: function of ``page.js`` that draws it: ``bars``, ``lines``, ``timeline`` or ``links``.
            label: caption.
            data: argument of that function.
            height: pixels.
        """
        number = len(self._charts)
        self._charts.append({"kind": kind, "data": data})
        return Markup(
            f'<figure><div class="chart" id="chart-{number}" role="img" aria-label="{html.escape(label)}" '
            f'style="height:{height}px"></div><figcaption>{html.escape(label)}</figcaption></figure>'
        )

    def sliders(self, grid: JsonObject) -> Markup:
        """Make the sliders for a grid of `ds_hetero.reporting.grid`, and below them the prediction that they select."""
        self._grid = grid
        rows = (
            ("length", "Sequence length", len(grid["lengths"])),
            ("link", "Speed of the links", len(grid["links"])),
            ("removal", "Take away", len(grid["removals"])),
        )
        inputs = "".join(
            f'<label for="slide-{name}">{title}: <output id="slide-{name}-text"></output></label>'
            f'<input type="range" id="slide-{name}" min="0" max="{count - 1}" step="1">'
            for name, title, count in rows
        )
        return Markup(f'<div id="sliders">{inputs}</div><div id="slid" aria-live="polite"></div>')

    def render(self) -> str:
        """Return the whole page as the content of an HTML file."""
        data = {"charts": self._charts, "grid": self._grid}
        contents = "".join(f'<li><a href="#{name}">{_text(title)}</a></li>' for name, title, _ in self._sections)
        sections = "".join(
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{_text(title)}</h2>{body}</section>'
            for name, title, body in self._sections
        )
        licence = details("Licence of the chart library in this file", preformatted(_asset("echarts/LICENSE")))
        return "".join(
            (
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
                f"<title>{_text(self._title)}</title><style>{_asset('page.css')}</style></head><body>",
                f"<header><h1>{_text(self._title)}</h1>{paragraph(self._lead) if self._lead else ''}</header>",
                f'<nav aria-label="Contents"><ul>{contents}</ul></nav><main>{sections}</main>',
                f"<footer>{licence}</footer>",
                f'<script type="application/json" id="data">{_embedded(data)}</script>',
                f"<script>{_script('echarts/' + ECHARTS)}</script><script>{_script('page.js')}</script>",
                "</body></html>\n",
            )
        )


def _embedded(data: Any) -> str:
    """Return JSON for a script element, without characters that could end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _asset(name: str) -> str:
    """Return the text of a file in the folder ``assets``."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    """Read a script of the folder ``assets``, which must not contain the end of a script element."""
    source = _asset(name)
    assert "</script" not in source.lower(), name
    return source
