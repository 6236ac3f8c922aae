"""Replace a file atomically, so that readers never see a part of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically: a reader gets either the old content or the new one.

    Args:
        text: the new content, written in UTF-8.
        durable: whether this also holds after a loss of power; then the call waits for the disk.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    # O_EXCL: in a folder that others may write to, somebody could have made a link of this name to a file of this user.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
