"""A checkpoint is written beside its folder and takes the folder's place when it is whole.

    draft = begin(folder)        # an empty folder beside it, for the parts
    publish(folder)              # once all parts are in the draft

A process may die at any moment and leaves a whole checkpoint, the one of before or the new one: at its place or,
between two renames, beside it, from where `recover` moves it. Files that the user keeps in the folder stay there.

The manifest of a checkpoint: the step it is of, and the size and checksum of every part.

A part is a file that one rank has written. Each has a stamp inside that names its save, so that a part of another save
can be named; the manifest is written last, so that a folder with one is complete.

Files of weights as transformers reads them: safetensors, and an index that says which file holds what.

Whatever the file system or safetensors refuses is a `CheckpointError` that names the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ds_hetero.common.reading import JsonObject, is_whole, read_file
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


MANIFEST = "ds_hetero_manifest.json"
_VERSION = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """A file of a checkpoint as it was saved."""

    size_bytes: int
    crc32: int  # of its content, as zip files have it. It finds damage, not forgery


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint."""

    step: int  # optimizer steps done when it was saved
    save_id: str  # drawn for this save; stamped into its parts
    parts: Mapping[str, SavedFile] = field(default_factory=dict)  # by file name
    plan: JsonObject | None = None  # of a job that re-planning has changed, as in a file of version 2

    def to_json(self) -> str:
        """The content of the manifest's file."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)


def seal_part(path: Path) -> SavedFile:
    """Entry of the manifest for a written part, once the disk keeps it. Raises `OSError`: it does not."""
    part = _measure(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return part


def _measure(path: Path) -> SavedFile:
    """Read a file from end to end; 0.2 s per GB where it is in memory."""
    crc, size, buffer = 0, 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return SavedFile(size_bytes=size, crc32=crc)


def read_manifest(folder: Path) -> Manifest | None:
    """Read a checkpoint's manifest; None where DeepSpeed wrote it alone. Raises `CheckpointError`."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    content = read_file(path, "manifest", CheckpointError)
    try:
        if content["version"] != _VERSION:
            raise CheckpointError(f"{path} has version {content['version']}; this release reads version {_VERSION}.")
        step, save_id, plan = content["step"], content["save_id"], content["plan"]
        parts = {name: SavedFile(**part) for name, part in content["parts"].items()}
        numbers = [step, *(number for part in parts.values() for number in (part.size_bytes, part.crc32))]
        if not all(is_whole(number, 0, 2**62) for number in numbers) or not isinstance(save_id, str):
            raise TypeError("a number or the name of the save is of another kind")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Load an earlier checkpoint.") from None
    return Manifest(step=step, save_id=save_id, parts=parts, plan=plan)


def changed_parts(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """Compare parts with the manifest; return what is wrong, by name of a part that has changed."""
    faults = {}
    for name in names:
        expected = manifest.parts[name]
        try:
            part = _measure(folder / name)
        except FileNotFoundError:
            faults[name] = "is missing"
        except OSError as error:
            faults[name] = f"cannot be read ({error})"
        else:
            if part.size_bytes != expected.size_bytes:
                faults[name] = f"is damaged ({part.size_bytes:,} bytes instead of {expected.size_bytes:,})"
            elif part != expected:
                faults[name] = "is damaged (its checksum is not the one that it was saved with)"
    return faults


def file_name(number: int, count: int) -> str:
    """Return the name of the ``number``-th of ``count`` files, counted from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def make_folder(folder: Path) -> None:
    """Make a folder where there is none. Raises `CheckpointError`: it cannot be made."""
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file. Raises `CheckpointError`: it cannot be written."""
    with _naming(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a folder: the file of every tensor, and bytes in all. Raises `CheckpointError`."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    write_text(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises `CheckpointError`: it cannot be written."""
    with _naming(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {why_not_written(path, error)}.") from error
