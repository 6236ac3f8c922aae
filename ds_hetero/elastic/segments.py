"""Segments: the state of one rank at one step, in a file of shared memory that outlives its process.

    offset 0       length of the JSON text (4 bytes); 0 if the segment is dirty
    offset 4       CRC of the text (4 bytes)
    offset 8       JSON text: job, model, save, rank, sizes, HMAC
    offset 4096    content, ``end_bytes`` long

Order of writing, so that a process which is killed at any byte leaves a dirty or a complete segment:

    1. length and CRC are set to 0       dirty
    2. content                           dirty
    3. JSON text                         dirty
    4. length and CRC                    complete

The HMAC, by the job's token over header and content, is checked before any of the content is unpickled. It shows
damage, and segments of other users. Pages are reused from save to save.

Imports no torch, because the server of a node runs without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ds_hetero.common.private_files import open_file
from ds_hetero.common.reading import MAX_RANKS, MAX_STEPS, is_whole

HEADER_BYTES = 4096
SUFFIX = ".seg"
_PREFIX = struct.Struct("<II")  # length of the text, its CRC
_VERSION = 2
_MAX_PART_BYTES = 2**50
# Segment sizes are multiples of this: a pickled state grows by some bytes from save to save. Chosen, never measured.
GROWTH_BYTES = 1 << 16
_HASHED_BYTES = 4 << 20  # hashed at a time by one thread; chosen, never measured
_HASH_THREADS = 4  # SHA-256 takes 0.56 CPU s per GB, a CRC 0.24; with two threads or more it takes no longer


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Save:
    """One save of all ranks of a world."""

    step: int
    start: str  # drawn by rank 0 when the world started; of two worlds, the later has the greater one
    world_size: int  # number of ranks, which is the number of parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Description of a complete segment."""

    job: str
    model: str  # fingerprint of the model; a job that trains another model refuses the segment
    save: Save  # the save that this segment is a part of
    rank: int
    end_bytes: int  # length of the content
    index_bytes: int  # length of the pickled part, at the end of the content
    mac: str = ""  # HMAC of the other fields and the content, see `signed`

    def to_bytes(self) -> bytes:
        """Return length, CRC and JSON text."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        assert _PREFIX.size + len(text) <= HEADER_BYTES, "names in a header are short"
        return _PREFIX.pack(len(text), zlib.crc32(text)) + text

    @property
    def file_bytes(self) -> int:
        """Size of the segment with its header."""
        return HEADER_BYTES + self.end_bytes


def parse_header(raw: bytes) -> Header | None:
    """Parse a header. Return None if it is dirty, torn, of another version or malformed."""
    if len(raw) < _PREFIX.size:
        return None
    length, crc = _PREFIX.unpack_from(raw)
    text = raw[_PREFIX.size : _PREFIX.size + length]
    if not length or len(text) != length or zlib.crc32(text) != crc:
        return None
    try:
        return _checked(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _checked(fields: dict[str, Any]) -> Header | None:
    """Return the header with these fields; None if one has a wrong type or is out of range."""
    version = fields.pop("version")
    save = Save(**fields.pop("save"))
    header = Header(save=save, **fields)
    limits = (
        (save.step, MAX_STEPS),
        (save.world_size, MAX_RANKS),
        (header.rank, save.world_size - 1),
        (header.end_bytes, _MAX_PART_BYTES),
        (header.index_bytes, _MAX_PART_BYTES),
    )
    texts = (save.start, header.job, header.model, header.mac)
    if version != _VERSION:
        return None
    if not all(is_whole(number, 0, limit) for number, limit in limits):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    if header.index_bytes > header.end_bytes:
        return None
    return header


def signed(header: Header, content: memoryview, token: bytes) -> Header:
    """Return the header with the HMAC of its fields and the content, by the job's token. Takes 0.6 CPU s per GB."""
    fields = asdict(replace(header, mac=""))
    text = json.dumps({"version": _VERSION, **fields}, sort_keys=True).encode()
    key = hmac.digest(token, b"segment", hashlib.sha256)
    return replace(header, mac=hmac.new(key, text + b"\0" + _digests(content), hashlib.sha256).hexdigest())


def is_genuine(header: Header, content: memoryview, token: bytes) -> bool:
    """Return True if header and content were signed together by a process that has the token."""
    return hmac.compare_digest(header.mac.encode(), signed(header, content, token).mac.encode())


def _digests(content: memoryview) -> bytes:
    """Return the concatenated SHA-256 digests of all chunks of a content."""

    def digest(start: int) -> bytes:
        with content[start : start + _HASHED_BYTES] as chunk:
            return hashlib.sha256(chunk).digest()

    starts = range(0, len(content), _HASHED_BYTES)
    if len(starts) < 2:
        return b"".join(map(digest, starts))
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1, len(starts))) as pool:
        return b"".join(pool.map(digest, starts))


def read_header(segment: Path | int) -> Header | None:
    """Read the header of a segment. Return None if the segment is dirty, or shorter than its header says.

    Args:
        segment: its file, or a descriptor.

    Raises:
        ConfigError: other users may write to the file, or own it.
    """
    try:
        with opened(segment) as descriptor:
            header = parse_header(os.pread(descriptor, HEADER_BYTES, 0))
            size = os.fstat(descriptor).st_size
    except OSError:
        return None
    if header is None or header.file_bytes > size:
        return None
    return header


def is_undamaged(segment: Path | int, header: Header, token: bytes) -> bool:
    """Return True if the segment's content has the HMAC in the header."""
    try:
        with (
            opened(segment) as descriptor,
            mmap.mmap(descriptor, header.file_bytes, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped)[HEADER_BYTES : header.file_bytes] as content,
        ):
            return is_genuine(header, content, token)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def opened(segment: Path | int) -> Iterator[int]:
    """Open a segment for reading, and yield a descriptor. ``segment``: see `read_header`."""
    descriptor = os.dup(segment) if isinstance(segment, int) else open_file(segment)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class SegmentFile:
    """A segment that this process writes repeatedly.

    Args:
        path: its file, which `begin` creates.
        descriptor: of an anonymous file that is written instead of ``path``, see `os.memfd_create`.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def begin(self, num_bytes: int) -> memoryview:
        """Mark the segment dirty and return the memory for a content of this length.

        Raises:
            OSError: the shared memory is full.
        """
        size = HEADER_BYTES + num_bytes
        if self._map is None or len(self._map) < size:
            size = -(-size // GROWTH_BYTES) * GROWTH_BYTES
            self.close()
            descriptor = self._open()
            try:
                os.pwrite(descriptor, bytes(_PREFIX.size), 0)
                size = max(size, os.fstat(descriptor).st_size)
                # Without it, the first write to a page that the full file system cannot provide raises SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        self._map[: _PREFIX.size] = bytes(_PREFIX.size)
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def has_room(self, num_bytes: int) -> bool:
        """Return True if `begin` has to allocate no pages, because an earlier content was as long."""
        return self._map is not None and len(self._map) >= HEADER_BYTES + num_bytes

    def _open(self) -> int:
        return open_file(self.path, os.O_RDWR | os.O_CREAT) if self.descriptor is None else os.dup(self.descriptor)

    def finish(self, header: Header) -> None:
        """Complete the segment: write the JSON text, then length and CRC."""
        assert self._map is not None
        raw = header.to_bytes()
        self._map[_PREFIX.size : len(raw)] = raw[_PREFIX.size :]
        self._map[: _PREFIX.size] = raw[: _PREFIX.size]

    def close(self) -> None:
        """Unmap the segment; its file stays."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still alive; the mapping is closed when that is freed
                self._map.close()
            self._map = None
