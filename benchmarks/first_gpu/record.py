"""What a run has found so far, on disk after every row: one JSON file, and a page of it.

    {"command", "started", "machine", "rehearsal", "budget_s", "seconds", "start_method",
     "parts": [{"section", "part", "outcome", "why", "seconds", "limit_s", "ranks", "rows": [...], "outputs": {...}}],
     "findings": [{"name", "default", "verdict", "figure"}]}

Every part has its entry from the beginning; "not reached" is the outcome of one that never began.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_gpu.findings import Measured, judged
from benchmarks.first_gpu.judgements import FINDINGS
from benchmarks.first_gpu.page import as_page
from benchmarks.first_gpu.parts import Part, Row, Section
from benchmarks.measure.results import header, write
from ds_hetero.common.atomic_writing import write_whole

NOT_REACHED = "not reached"


class Record:
    """The result of a run, saved in ``output`` and as a Markdown page beside it."""

    def __init__(self, command: str, sections: Sequence[Section], output: Path, rehearsal: bool) -> None:
        self._output = output
        self._began = time.monotonic()
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        for section, part in parts_of(sections):
            self._entries[section.name, part.name] = {
                "section": section.name,
                "part": part.name,
                "ranks": part.ranks,
                "outcome": NOT_REACHED,
                "rows": [],
            }
            if rehearsal and part.unrehearsed:
                self._entries[section.name, part.name]["unrehearsed"] = part.unrehearsed
        self.result: dict[str, Any] = {
            **header(command),
            "rehearsal": rehearsal,
            "seconds": 0.0,
            "parts": list(self._entries.values()),
            "findings": [],
        }
        self.write()

    @property
    def page(self) -> Path:
        """Path of the page."""
        return self._output.with_suffix(".md")

    def entry(self, section: Section, part: Part) -> dict[str, Any]:
        """Return the entry of a part; call `write` after changing it."""
        return self._entries[section.name, part.name]

    def add(self, section: Section, part: Part, row: Row) -> None:
        """Append a row to a part."""
        self.entry(section, part)["rows"].append(row)
        self.write()

    def write(self) -> None:
        """Judge the results so far, and save them; an interrupted write leaves the previous files."""
        self.result["seconds"] = round(time.monotonic() - self._began, 1)
        self.result["findings"] = judged(Measured(self.result), FINDINGS)
        part = self._output.with_name(f".{self._output.name}.part")
        write(self.result, part)
        os.replace(part, self._output)
        write_whole(self.page, as_page(self.result))


def parts_of(sections: Sequence[Section]) -> Iterator[tuple[Section, Part]]:
    """Yield every part with its section, in the order in which they run."""
    for section in sections:
        for part in section.parts:
            yield section, part
