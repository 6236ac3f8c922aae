"""Start a peer's program and read what it prints."""

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
        done = subprocess.run(
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
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise NoPlan(f"it ends with {done.returncode}: {' '.join(last)[:200]}")
    return done.stdout
