"""Manifest of a checkpoint: the step it is of, and the size and checksum of every part.

A part is a file that one rank has written. Each has a stamp inside that names its save, so that a part of another save
can be named; the manifest is written last, so that a folder with one is complete.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ds_hetero.common.reading import JsonObject, is_whole, read_file
from ds_hetero.errors import CheckpointError

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
