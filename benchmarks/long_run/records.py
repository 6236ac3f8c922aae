"""The files of a run: one line of JSON per step, evaluation and event, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """Lines of one file.

    Args:
        path: of the file; lines are added to its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, event: str, **details: Any) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **details}) + "\n")

    def drop_half_line(self) -> None:
        """Cut off the half line that a killed process may have left at the end."""
        if self.path.exists():
            content = self.path.read_bytes()
            self.path.write_bytes(content[: content.rfind(b"\n") + 1])

    def read(self) -> list[Record]:
        """Return all whole lines so far."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def by_step(records: list[Record], event: str) -> dict[int, Record]:
    """Return the latest record of each step, by step: a step that was repeated counts as it was repeated last."""
    return dict(sorted({record["step"]: record for record in records if record["event"] == event}.items()))
