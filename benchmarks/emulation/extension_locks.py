"""Remove the locks that killed processes have left in torch's folder of compiled extensions.

DeepSpeed compiles or loads an extension in every rank at its start, one rank after the other by a lock file. A rank
that is killed meanwhile leaves the file, for which every later start waits forever. A process that has such a lock has
the file open, so a lock that no process has open is abandoned.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def remove_abandoned_locks(folder: Path) -> list[Path]:
    """Remove the locks under ``folder`` that no process of this machine has open; return the removed ones."""
    locks = [path.resolve() for path in folder.rglob("lock") if path.is_file()]
    opened = _open_files() if locks else set()
    abandoned = [path for path in locks if str(path) not in opened]
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def _open_files() -> set[str]:
    """Return the paths of files that processes have open, as far as this user may see them."""
    paths = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            paths.add(os.readlink(link))
    return paths
