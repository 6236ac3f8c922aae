"""Start a peer's program and read its output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.judge import NoPlan


def printed_by(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Return a program's stdout.

    Raises:
        NoPlan: it fails, or takes longer than ``timeout_s``.
    """
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoPlan(f"no end within {timeout_s:.0f} s") from None
    if completed.returncode:
        last = (completed.stderr.strip() or completed.stdout.strip()).splitlines()[-1:]
        raise NoPlan(f"it ends with {completed.returncode}: {' '.join(last)[:200]}")
    return completed.stdout
