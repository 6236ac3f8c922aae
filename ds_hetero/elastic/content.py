"""Content of a segment: tensors raw, one behind the other, and a pickled rest in which numbers stand for them.

What a thread may copy later is kept by reference; whatever a forward or the script may change before, by value: buffers
of the model, and everything that is small.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import zlib
from collections.abc import Callable, Collection
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.elastic.segments import HEADER_BYTES, Header
from ds_hetero.errors import CheckpointError

_ALIGN = 64
_SMALL_BYTES = 4096  # up to which tensors are pickled where they stand


class Content:
    """A state, taken apart.

    Args:
        at_once: addresses of tensors that are copied now, because somebody may change them before the thread comes.
    """

    def __init__(self, state: Any, at_once: Collection[int] = ()) -> None:
        self._tensors: list[Tensor] = []
        rest = io.BytesIO()
        _Pickler(rest, self._tensors, at_once).dump(state)
        index, end = [], 0
        for tensor in self._tensors:
            start = -(-end // _ALIGN) * _ALIGN
            end = start + tensor.numel() * tensor.element_size()
            index.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        self._index, self._starts = pickle.dumps((index, rest.getvalue())), [start for _, _, start in index]
        self._end = end

    @property
    def num_bytes(self) -> int:
        """Length of the content."""
        return self._end + len(self._index)

    @property
    def index_bytes(self) -> int:
        """Length of the part that is pickled."""
        return len(self._index)

    def write_tensors(self, room: memoryview) -> None:
        """Copy the tensors; from here on they may change."""
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            target = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            target.view(tensor.shape).copy_(tensor)
        self._tensors.clear()

    def write_rest(self, room: memoryview) -> int:
        """Write what is pickled; return the checksum of all."""
        room[self._end : self.num_bytes] = self._index
        return zlib.crc32(room[: self.num_bytes])


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], at_once: Collection[int]) -> None:
        super().__init__(file, protocol=5)
        self._tensors, self._at_once = tensors, at_once
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, value: object) -> tuple[Callable[[int], Tensor], tuple[int]]:
        """Let a number stand for a tensor; unlike for ``persistent_id``, nobody asks for each number in a list."""
        if type(value) is nn.Parameter:
            value = value.data
        if type(value) is not Tensor or value.numel() * value.element_size() <= _SMALL_BYTES:
            return NotImplemented  # type: ignore[no-any-return]
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented  # type: ignore[no-any-return]
        key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            value = value.detach()
            self._tensors.append(value.clone() if value.data_ptr() in self._at_once else value)
        return _tensor, (self._numbers[key],)


_tensors: ContextVar[list[Tensor]] = ContextVar("_tensors")  # of the content that is being read


def _tensor(number: int) -> Tensor:
    return _tensors.get()[number]


def read_content(path: Path, header: Header) -> Any:
    """The state in a segment that is known to be undamaged; its tensors lie in pages of this process alone.

    Raises:
        CheckpointError: the segment was written by something else.
    """
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), header.file_bytes, access=mmap.ACCESS_COPY)
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
        raise CheckpointError(f"{path.name} cannot be read ({type(error).__name__}: {error}).") from error
