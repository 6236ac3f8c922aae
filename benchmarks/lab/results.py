"""What every result begins with, and where the commands say how far they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.ranks import Report

__all__ = ["header", "progress"]


def header(command: str) -> dict[str, Any]:
    """What every result begins with."""
    return {
        "command": command,
        "emulated": True,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(),
    }


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """A bar; what it yields takes the share that is done, and what is being done."""
    columns = (TextColumn("{task.description:48}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting ranks", total=1.0)
        yield lambda done, now: bar.update(task, completed=done, description=now)
