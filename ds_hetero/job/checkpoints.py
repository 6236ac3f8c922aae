"""Atomic replacement of checkpoint folders: parts are written to a draft, which replaces the folder when complete.

    draft = begin(folder)        # makes an empty folder "NAME.saving" for the parts
    publish(folder)              # when all parts are in the draft

A process may die at any time. The folders that it leaves, and the action of `recover`:

    NAME    NAME.saving    NAME.replaced    the process died               `recover`
    old     new            -                while it saved                 keeps the old checkpoint
    -       new            old              between the renames            renames the draft to NAME
    -       -              old              as before; the draft is gone   renames the old checkpoint back to NAME
    new     -              old              while it deleted the old one   deletes the old checkpoint

Files that the user keeps in the folder move to the new one.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ds_hetero.errors import CheckpointError

DRAFT = ".saving"  # suffix of the folder's name while its parts are written
_REPLACED = ".replaced"  # suffix of the old checkpoint's name, from the first rename until it is deleted
# torch's errors when the file system takes no more bytes of a file.
_TRUNCATION_ERROR = re.compile(r"unexpected pos|PytorchStreamWriter|enforce fail")
_OFFLOADED = "offloaded_tensors"  # DeepSpeed's folder for state on NVMe


def draft_of(folder: Path) -> Path:
    """Return the folder to which the parts of a checkpoint are written."""
    return folder.with_name(folder.name + DRAFT)


def begin(folder: Path) -> Path:
    """Make an empty draft of a checkpoint folder, and return it; an earlier draft is deleted.

    Raises:
        CheckpointError: the folder's name is not allowed.
        OSError: the file system refuses it.
    """
    if folder.name in ("", "..") or folder.name.endswith((DRAFT, _REPLACED)):
        raise CheckpointError(
            f"a checkpoint cannot be saved as {folder}: a tag names a folder, and its name must not end in {DRAFT} or "
            f"{_REPLACED}, which stand for unfinished saves. Save under another tag."
        )
    recover(folder)
    draft = draft_of(folder)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    return draft


def publish(folder: Path) -> None:
    """Replace the folder by its complete draft. Raises `OSError`: the file system refuses it."""
    recover(folder)
    if folder.exists():
        os.rename(folder, _replaced(folder))
        recover(folder)  # renames the draft, and deletes the old checkpoint
    else:
        os.rename(draft_of(folder), folder)


def recover(folder: Path) -> None:
    """Finish a `publish` that was interrupted, see the table of the module; otherwise do nothing."""
    replaced, draft = _replaced(folder), draft_of(folder)
    if not replaced.exists():
        return
    if not folder.exists():
        os.rename(draft if draft.exists() else replaced, folder)
    if replaced.exists():
        _keep_files_of_user(replaced, folder)
        shutil.rmtree(replaced)


def discard(folder: Path) -> None:
    """Delete the draft as far as possible; the folder stays as it is."""
    shutil.rmtree(draft_of(folder), ignore_errors=True)


def expect_finished(folder: Path) -> None:
    """Refuse a folder that holds no finished checkpoint. Raises `CheckpointError`."""
    if folder.name.endswith(DRAFT):
        raise CheckpointError(f"{folder} is from a save that was interrupted. Load a checkpoint that is finished.")
    if not folder.is_dir():
        draft = draft_of(folder)
        unfinished = f" {draft.name} beside it is from a save that was interrupted." if draft.exists() else ""
        raise CheckpointError(f"there is no finished checkpoint in {folder}.{unfinished} Load another one.")


def write_failure_reason(path: Path, error: Exception) -> str:
    """Return the reason why a part of a checkpoint, or a folder for parts, could not be written.

    torch's errors often hide the error of the file system. So some bytes are written once more, to see that error.

    Args:
        path: of the part or the folder.
        error: raised when it was written.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    try:
        _write_more(path)
    except OSError as os_error:
        return str(os_error)
    if _TRUNCATION_ERROR.search(str(error)):
        return "the file system took a part of it only: a full disk, a quota, or a limit on the size of files"
    return f"{type(error).__name__}: {error}"


def _write_more(path: Path) -> None:
    """Append 1 MiB to a file, or write it to a temporary file in a folder. Raises `OSError`."""
    with tempfile.TemporaryFile(dir=path) if path.is_dir() else open(path, "ab") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def _replaced(folder: Path) -> Path:
    """Return the path to which the old checkpoint is renamed while a new one replaces it."""
    return folder.with_name(folder.name + _REPLACED)


def _keep_files_of_user(replaced: Path, folder: Path) -> None:
    """Move the user's files, which no save has written, from the old checkpoint's folder into the new one."""
    for entry in replaced.iterdir():
        is_part = entry.name.endswith("states.pt") or entry.name == _OFFLOADED
        if not is_part and not (folder / entry.name).exists():
            os.rename(entry, folder / entry.name)
