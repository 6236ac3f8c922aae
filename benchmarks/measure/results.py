"""Write result files with their header into their folder, and show a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.ranks import Report

WIDTH = 320  # of what is written in a line
FOLDER = Path(__file__).resolve().parents[1] / "results"


def header(command: str) -> dict[str, Any]:
    """Return the begin of every result: the command that made it, the time, and the machine."""
    return {"command": command, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": describe_machine()}


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """Show a bar; yield a function that takes the share that is done, and a name of the current work."""
    columns = (TextColumn("{task.description:48}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting ranks", total=1.0)
        yield lambda done, now: bar.update(task, completed=done, description=now)


def write(result: dict[str, Any], path: Path) -> None:
    """Write ``result`` as JSON; the folder is made if it is missing, and short values share a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(result) + "\n")


def _text(value: Any, indent: str = "\n ") -> str:
    line = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(line) <= WIDTH:
        return line
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{indent}{json.dumps(str(key))}: {_text(value[key], indent + ' ')}" for key in value)
            + indent[:-1]
            + "}"
        )
    return "[" + ",".join(indent + _text(each, indent + " ") for each in value) + indent[:-1] + "]"
