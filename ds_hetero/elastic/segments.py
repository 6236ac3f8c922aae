"""Segments: the state of one rank at one step, in a file of shared memory that outlives its process.

    4,096 bytes of header, then ``end_bytes`` of content. The header: length of a JSON text, its CRC, the text.

A segment is marked dirty before its content is touched, and gets its header last. So a process that is killed at any
byte leaves a segment that is dirty or whole, never one that only looks whole. Pages are reused from save to save.

A part of the content is unpickled by whoever loads it. So the header has an HMAC by the job's token, of its own fields
and of the content, and nobody unpickles before it was found to be right: neither damage nor another user's segment.

Imports no torch: the keeper of a node runs without.
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
GROWTH_BYTES = 1 << 16  # segments are multiples of it: what is pickled grows by some bytes from save to save
_HASHED_BYTES = 4 << 20  # of a content, hashed by one thread
_HASH_THREADS = 4  # SHA-256 takes 0.56 CPU s per GB where a CRC takes 0.24; two threads make up for it


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Save:
    """One save of all ranks of a world."""

    step: int
    start: str  # drawn by rank 0 when its world started, later starts being greater
    world_size: int  # number of ranks, and so of parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Description of a whole segment."""

    job: str
    model: str  # fingerprint of the model, so that no other model's state is loaded
    save: Save  # that this is a part of
    rank: int
    end_bytes: int
    index_bytes: int  # length of the description of the tensors, at the content's end
    mac: str = ""  # of the other fields and the content, see `signed`

    def to_bytes(self) -> bytes:
        """The text of the header, with its length and checksum before it."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        assert _PREFIX.size + len(text) <= HEADER_BYTES, "names in a header are short"
        return _PREFIX.pack(len(text), zlib.crc32(text)) + text

    @property
    def file_bytes(self) -> int:
        """Size of the segment with its header."""
        return HEADER_BYTES + self.end_bytes


def parse_header(raw: bytes) -> Header | None:
    """Read a header; None where it is dirty, torn, of another version or nonsense."""
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


def _checked(content: dict[str, Any]) -> Header | None:
    version, save = content.pop("version"), Save(**content.pop("save"))
    header = Header(save=save, **content)
    numbers = ((save.step, MAX_STEPS), (save.world_size, MAX_RANKS), (header.rank, save.world_size - 1))
    sizes = (header.end_bytes, header.index_bytes)
    is_sound = (
        version == _VERSION
        and all(is_whole(number, 0, most) for number, most in numbers)
        and all(is_whole(size, 0, _MAX_PART_BYTES) for size in sizes)
        and all(isinstance(text, str) for text in (save.start, header.job, header.model, header.mac))
        and header.index_bytes <= header.end_bytes
    )
    return header if is_sound else None


def signed(header: Header, content: memoryview, token: bytes) -> Header:
    """The header with the HMAC of itself and its content, by the job's token; 0.6 CPU s per GB."""
    fields = asdict(replace(header, mac=""))
    text = json.dumps({"version": _VERSION, **fields}, sort_keys=True).encode()
    key = hmac.digest(token, b"segment", hashlib.sha256)
    return replace(header, mac=hmac.new(key, text + b"\0" + _digests(content), hashlib.sha256).hexdigest())


def is_genuine(header: Header, content: memoryview, token: bytes) -> bool:
    """Whether this content was written under this header by somebody who has the token."""
    return hmac.compare_digest(header.mac.encode(), signed(header, content, token).mac.encode())


def _digests(content: memoryview) -> bytes:
    """SHA-256 of every chunk, one behind the other."""

    def digest(start: int) -> bytes:
        with content[start : start + _HASHED_BYTES] as chunk:
            return hashlib.sha256(chunk).digest()

    starts = range(0, len(content), _HASHED_BYTES)
    if len(starts) < 2:
        return b"".join(map(digest, starts))
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1, len(starts))) as pool:
        return b"".join(pool.map(digest, starts))


def read_header(segment: Path | int) -> Header | None:
    """Read the header of a segment; None where it is not whole, or shorter than it says.

    Args:
        segment: its file, or a descriptor of one.

    Raises:
        ConfigError: the file is not this user's alone.
    """
    try:
        with opened(segment) as descriptor:
            header = parse_header(os.pread(descriptor, HEADER_BYTES, 0))
            size = os.fstat(descriptor).st_size
    except OSError:
        return None
    return header if header is not None and header.file_bytes <= size else None


def is_undamaged(segment: Path | int, header: Header, token: bytes) -> bool:
    """Whether the content of a segment has the HMAC of its header."""
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
    """A descriptor of a segment, to read from; see `read_header`."""
    descriptor = os.dup(segment) if isinstance(segment, int) else open_file(segment)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class SegmentFile:
    """A segment that this process writes, again and again.

    Args:
        path: of its file, made with the first content.
        descriptor: of a file without a name that is written instead, see `os.memfd_create`.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def begin(self, num_bytes: int) -> memoryview:
        """Mark the segment dirty and return room for a content.

        Raises:
            OSError: the shared memory has no room.
        """
        size = HEADER_BYTES + num_bytes
        if self._map is None or len(self._map) < size:
            size = -(-size // GROWTH_BYTES) * GROWTH_BYTES
            self.close()
            descriptor = self._open()
            try:
                os.pwrite(descriptor, bytes(_PREFIX.size), 0)
                size = max(size, os.fstat(descriptor).st_size)
                os.posix_fallocate(descriptor, 0, size)  # or a page that does not exist would end the process
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        self._map[: _PREFIX.size] = bytes(_PREFIX.size)
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def has_room(self, num_bytes: int) -> bool:
        """Whether `begin` need not wait for pages: they were given to a content as long before."""
        return self._map is not None and len(self._map) >= HEADER_BYTES + num_bytes

    def _open(self) -> int:
        return open_file(self.path, os.O_RDWR | os.O_CREAT) if self.descriptor is None else os.dup(self.descriptor)

    def finish(self, header: Header) -> None:
        """Make the segment whole: the text first, then its length and checksum."""
        assert self._map is not None
        raw = header.to_bytes()
        self._map[_PREFIX.size : len(raw)] = raw[_PREFIX.size :]
        self._map[: _PREFIX.size] = raw[: _PREFIX.size]

    def close(self) -> None:
        """Let the mapping go; the file stays."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view of it is still alive; the garbage collector closes it
                self._map.close()
            self._map = None
