"""A checkpoint is written beside its folder and takes the folder's place when it is whole.

    draft = begin(folder)        # an empty folder beside it, for the parts
    publish(folder)              # once all parts are in the draft

A process may die at any moment and leaves a whole checkpoint, the one of before or the new one: at its place or,
between two renames, beside it, from where `recover` moves it. Files that the user keeps in the folder stay there.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from ds_hetero.errors import CheckpointError

DRAFT = ".saving"  # what the name of a folder ends in while its parts are written
_REPLACED = ".replaced"  # likewise of the checkpoint of before, from the first rename until it is deleted
_CUT_SHORT = re.compile(r"unexpected pos|PytorchStreamWriter|enforce fail")  # torch, of a file that stops growing
_OFFLOADED = "offloaded_tensors"  # DeepSpeed's folder for state on NVMe


def draft_of(folder: Path) -> Path:
    """Where the parts of a checkpoint are written."""
    return folder.with_name(folder.name + DRAFT)


def begin(folder: Path) -> Path:
    """Make an empty draft in an earlier one's place. Raises `CheckpointError`: a bad name; `OSError`."""
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
    """Put the draft, which is whole, in the place of the folder. Raises `OSError`: the file system refuses it."""
    recover(folder)
    if folder.exists():
        os.rename(folder, _replaced(folder))
        recover(folder)
    else:
        os.rename(draft_of(folder), folder)


def recover(folder: Path) -> None:
    """Finish what `publish` has begun, if it was cut off."""
    replaced, draft = _replaced(folder), draft_of(folder)
    if not replaced.exists():
        return
    if not folder.exists():
        os.rename(draft if draft.exists() else replaced, folder)
    if replaced.exists():
        _keep_files_of_user(replaced, folder)
        shutil.rmtree(replaced)


def discard(folder: Path) -> None:
    """Delete the draft as far as that is possible; the folder stays as it is."""
    shutil.rmtree(draft_of(folder), ignore_errors=True)


def expect_finished(folder: Path) -> None:
    """Refuse a folder that holds no finished checkpoint. Raises `CheckpointError`."""
    if folder.name.endswith(DRAFT):
        raise CheckpointError(f"{folder} is what a save that was cut off has left. Load a checkpoint that is finished.")
    if not folder.is_dir():
        draft = draft_of(folder)
        unfinished = f" {draft.name} beside it is what a save that was cut off has left." if draft.exists() else ""
        raise CheckpointError(f"there is no finished checkpoint in {folder}.{unfinished} Load another one.")


def why_not_written(path: Path, error: Exception) -> str:
    """Why a part, or a folder for it, could not be written: torch hides it, but the file system says it again."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    try:
        _try_to_grow(path)
    except OSError as refusal:
        return str(refusal)
    if _CUT_SHORT.search(str(error)):
        return "the file system took a part of it only: a full disk, a quota, or a limit on the size of files"
    return f"{type(error).__name__}: {error}"


def _try_to_grow(path: Path) -> None:
    with tempfile.TemporaryFile(dir=path) if path.is_dir() else open(path, "ab") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + _REPLACED)


def _keep_files_of_user(replaced: Path, folder: Path) -> None:
    """Move what is no part of the checkpoint of before into the new one."""
    for entry in replaced.iterdir():
        is_part = entry.name.endswith("states.pt") or entry.name == _OFFLOADED
        if not is_part and not (folder / entry.name).exists():
            os.rename(entry, folder / entry.name)
