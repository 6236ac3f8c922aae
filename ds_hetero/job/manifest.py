"""Manifest of a checkpoint: its step, and the size and checksum of every part.

A part is a file that one rank has written. It has the id of its save inside, so that a part of another save can be
recognized. The manifest is written last: a folder that has one is complete.
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
    crc32: int  # of its content, as in zip files; it shows damage, but no forgery


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint's manifest."""

    step: int  # optimizer steps done when it was saved
    save_id: str  # random, one per save; also inside its parts
    parts: Mapping[str, SavedFile] = field(default_factory=dict)  # by file name
    plan: JsonObject | None = None  # as in a plan file of version 2, if re-planning has changed the job's plan
    losses: JsonObject | None = None  # state of the weighing of losses, if ranks take different batches

    def to_json(self) -> str:
        """Return the content of the manifest's file."""
        content = {"version": _VERSION, **asdict(self)}
        if self.losses is None:
            del content["losses"]
        return json.dumps(content, indent=1)


def seal_part(path: Path) -> SavedFile:
    """Flush a written part to the disk and return its entry of the manifest. Raises `OSError`: the disk fails."""
    part = _measure(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return part


def _measure(path: Path) -> SavedFile:
    """Return size and checksum of a file. This reads the whole file: 0.2 s per GB if it is in the page cache."""
    crc, size = 0, 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return SavedFile(size_bytes=size, crc32=crc)


def read_manifest(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest; None if it has none, as when stock DeepSpeed wrote it.

    Raises:
        CheckpointError: the manifest is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    content = read_file(path, "manifest", CheckpointError)
    try:
        if content["version"] != _VERSION:
            raise CheckpointError(f"{path} has version {content['version']}; this release reads version {_VERSION}.")
        step, save_id, plan = content["step"], content["save_id"], content["plan"]
        losses = content.get("losses")
        parts = {name: SavedFile(**part) for name, part in content["parts"].items()}
        numbers = [step]
        for part in parts.values():
            numbers += [part.size_bytes, part.crc32]
        if losses is not None and not isinstance(losses["of_micro_batches"], list):
            raise TypeError("the terms of losses are no list")
        if not all(is_whole(number, 0, 2**62) for number in numbers) or not isinstance(save_id, str):
            raise TypeError("a number, or the id of the save, has a wrong type or range")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Load an earlier checkpoint.") from None
    return Manifest(step=step, save_id=save_id, parts=parts, plan=plan, losses=losses)


def changed_parts(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """Compare parts with the manifest; return a fault, such as "is missing", for each part that differs, by its name.

    Args:
        names: names of the parts to compare.
    """
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
