"""Content of a segment: tensors raw, one behind the other, and a pickled rest in which numbers stand for them.

What the script can change is copied while it waits (`write_now`, or `take_now` where the segment has no pages yet).
Only tensors that are held, which nobody changes before the next optimizer step, are left to a thread (`write_held`);
the engine lets no step begin before they are copied. A script could still change one of them in place: the thread sees
that by the tensors' versions, and such a copy does not count.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.elastic.segments import HEADER_BYTES, Header, opened
from ds_hetero.errors import CheckpointError

_ALIGN = 64
_SMALL_BYTES = 4096  # up to which tensors are pickled where they stand


@dataclass
class _Entry:
    """A tensor and its place in the content."""

    tensor: Tensor
    address: int
    start: int
    version: int | None  # when it was captured; None where it is not held


class Content:
    """A state, taken apart.

    Args:
        held: addresses of tensors that nobody changes before `write_held` has copied them.
        note_changed: takes the addresses of those that somebody has changed all the same.
    """

    def __init__(
        self,
        state: Any,
        held: Collection[int] = (),
        note_changed: Callable[[set[int]], None] = lambda _: None,
    ) -> None:
        self._note_changed = note_changed
        tensors: list[Tensor] = []
        rest = io.BytesIO()
        _Pickler(rest, tensors).dump(state)
        index, end = [], 0
        self._entries: list[_Entry] = []
        for tensor in tensors:
            start = -(-end // _ALIGN) * _ALIGN
            end = start + tensor.numel() * tensor.element_size()
            index.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
            address = tensor.data_ptr()
            is_held = address in held and not tensor.is_inference()  # which has no version
            self._entries.append(_Entry(tensor, address, start, tensor._version if is_held else None))
        self._index = pickle.dumps((index, rest.getvalue()))
        self._end = end

    @property
    def num_bytes(self) -> int:
        """Length of the content."""
        return self._end + len(self._index)

    @property
    def index_bytes(self) -> int:
        """Length of the part that is pickled."""
        return len(self._index)

    def write_now(self, room: memoryview) -> None:
        """Copy what is not held, and what is pickled; from here on the script may change it."""
        for entry in self._entries:
            if entry.version is None:
                _write(entry, room)
        self._entries = [entry for entry in self._entries if entry.version is not None]
        room[self._end : self.num_bytes] = self._index

    def take_now(self) -> None:
        """Copy what is not held to memory of this process, where there is no room for it yet; as `write_now`."""
        for entry in self._entries:
            if entry.version is None:
                entry.tensor = entry.tensor.to("cpu", copy=True)

    def write_held(self, room: memoryview) -> bool:
        """Copy what is held; return False, where some of it was changed since, and the content is not to be used."""
        for entry in self._entries:
            _write(entry, room)
        changed = {entry.address for entry in self._entries if entry.tensor._version != entry.version}
        self._entries.clear()
        if changed:
            self._note_changed(changed)
        return not changed


def _write(entry: _Entry, room: memoryview) -> None:
    tensor = entry.tensor
    target = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=entry.start)
    target.view(tensor.shape).copy_(tensor)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, value: object) -> tuple[Callable[[int], Tensor], tuple[int]]:
        """Let a number stand for a tensor; unlike for ``persistent_id``, nobody asks for each number in a list."""
        if type(value) is nn.Parameter:
            value = value.detach()  # whose version is that of the parameter, as that of ``data`` is not
        if type(value) is not Tensor or value.numel() * value.element_size() <= _SMALL_BYTES:
            return NotImplemented  # type: ignore[no-any-return]
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented  # type: ignore[no-any-return]
        key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(value.detach())
        return _tensor, (self._numbers[key],)


_tensors: ContextVar[list[Tensor]] = ContextVar("_tensors")  # of the content that is being read


def _tensor(number: int) -> Tensor:
    return _tensors.get()[number]


def read_content(segment: Path | int, header: Header) -> Any:
    """The state in a segment that `is_undamaged`, for it is unpickled; its tensors lie in pages of this process alone.

    Args:
        segment: its file, or a descriptor of one.

    Raises:
        CheckpointError: the segment was written by something else.
    """
    with opened(segment) as descriptor:
        content = mmap.mmap(descriptor, header.file_bytes, access=mmap.ACCESS_COPY)
    view = memoryview(content)
    try:
        index, rest = pickle.loads(view[header.file_bytes - header.index_bytes :])
        tensors = []
        for dtype, shape, start in index:
            flat = torch.frombuffer(
                content, dtype=getattr(torch, dtype), count=math.prod(shape), offset=HEADER_BYTES + start
            )
            tensors.append(flat.view(shape))
        token = _tensors.set(tensors)
        try:
            return pickle.loads(rest)
        finally:
            _tensors.reset(token)
    except Exception as error:  # pickle raises what it meets in the bytes
        name = "a segment" if isinstance(segment, int) else segment.name
        raise CheckpointError(f"{name} cannot be read ({type(error).__name__}: {error}).") from error
