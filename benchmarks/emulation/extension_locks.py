"""Locks that a killed process left in torch's folder of compiled extensions.

DeepSpeed compiles or loads an extension in every rank as it starts, and the ranks take turns by a lock file. A rank
that is killed in its turn leaves the file, and every later start waits for it without end. Whoever holds such a lock
has the file open, so a lock that no process has open is abandoned.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def remove_abandoned_locks(folder: Path) -> list[Path]:
    """Remove the locks under ``folder`` that no process of this machine holds; return what was removed."""
    locks = [path.resolve() for path in folder.rglob("lock") if path.is_file()]
    opened = _open_files() if locks else set()
    abandoned = [path for path in locks if str(path) not in opened]
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def _open_files() -> set[str]:
    """Paths of the files that processes have open, as far as this user may see them."""
    paths = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            paths.add(os.readlink(link))
    return paths
