"""Content of a segment: the bytes of all tensors, then a pickled index, and the state with numbers for tensors.

    | tensor 0 | tensor 1 | ... | pickle of (index: dtype, shape and offset of every tensor; pickled state)

These methods copy tensors:

    write_now           by the training thread, which waits: all tensors that the script may change, such as buffers
    copy_to_host_now    the same, but to memory of this process, if the segment has no pages yet: page faults are slow
    write_deferred      by the saving thread: tensors that only an optimizer step changes, such as master weights. The
                        engine begins no step before this is done.

A script could still change a deferred tensor in place. The tensor's version counter shows the change, and the content
is then invalid.
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

_ALIGN = 64  # bytes, a cache line; more than any dtype needs
_SMALL_BYTES = 4096  # smaller tensors are pickled with the state; a page, chosen, never measured


@dataclass
class _Entry:
    """A tensor and its place in the content."""

    tensor: Tensor
    address: int
    start: int  # offset in the content, in bytes
    version: int | None  # version counter at the capture; None if the tensor is copied at once


class Content:
    """A captured state, split into tensors and the pickled rest.

    Args:
        state: any object that pickle can write.
        deferred: addresses of tensors that only an optimizer step changes; `write_deferred` copies them.
        note_changed: called with the addresses of deferred tensors that the script changed before they were copied.
    """

    def __init__(
        self,
        state: Any,
        deferred: Collection[int] = (),
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
            # An inference tensor has no version counter.
            is_deferred = address in deferred and not tensor.is_inference()
            self._entries.append(_Entry(tensor, address, start, tensor._version if is_deferred else None))
        self._index = pickle.dumps((index, rest.getvalue()))
        self._end = end

    @property
    def num_bytes(self) -> int:
        """Length of the content in bytes."""
        return self._end + len(self._index)

    @property
    def index_bytes(self) -> int:
        """Length of the pickled part in bytes."""
        return len(self._index)

    def write_now(self, room: memoryview) -> None:
        """Copy the tensors that are not deferred, and the pickled part. Afterwards the script may change them."""
        for entry in self._entries:
            if entry.version is None:
                _write(entry, room)
        self._entries = [entry for entry in self._entries if entry.version is not None]
        room[self._end : self.num_bytes] = self._index

    def copy_to_host_now(self) -> None:
        """Copy the tensors that are not deferred to memory of this process; `write_now` then copies from there."""
        for entry in self._entries:
            if entry.version is None:
                entry.tensor = entry.tensor.to("cpu", copy=True)

    def write_deferred(self, room: memoryview) -> bool:
        """Copy the deferred tensors. Return False if one was changed since the capture: the content is then invalid."""
        for entry in self._entries:
            _write(entry, room)
        # Versions are compared after the copy, so that a change during the copy is seen, too.
        changed = {entry.address for entry in self._entries if entry.tensor._version != entry.version}
        self._entries.clear()
        if changed:
            self._note_changed(changed)
        return not changed


def _write(entry: _Entry, room: memoryview) -> None:
    """Copy a tensor, contiguous, to its place in the content."""
    tensor = entry.tensor
    target = torch.frombuffer(room, dtype=tensor.dtype, count=tensor.numel(), offset=entry.start)
    target.view(tensor.shape).copy_(tensor)


class _Pickler(pickle.Pickler):
    """A pickler that appends large dense tensors to ``tensors``, and writes their index there instead of the data."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._tensors = tensors
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, value: object) -> tuple[Callable[[int], Tensor], tuple[int]]:
        """Replace a tensor by its number.

        ``persistent_id`` could do the same, but pickle calls it for every object, also for each number in a list.
        """
        if type(value) is nn.Parameter:
            value = value.detach()  # it shares the parameter's version counter; ``data`` would not
        if type(value) is not Tensor or value.numel() * value.element_size() <= _SMALL_BYTES:
            return NotImplemented  # type: ignore[no-any-return]
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented  # type: ignore[no-any-return]
        # Views of the same elements are written once.
        key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(value.detach())
        return _tensor, (self._numbers[key],)


# The tensors of the content that is being read. pickle calls `_tensor` with a number only, so they are passed this way.
_tensors: ContextVar[list[Tensor]] = ContextVar("_tensors")


def _tensor(number: int) -> Tensor:
    """Return a tensor by its number. Pickles of earlier saves name this function, so its module and name must stay."""
    return _tensors.get()[number]


def read_content(segment: Path | int, header: Header) -> Any:
    """Load the state in a segment, which is unpickled: the caller has to have checked it by `is_undamaged`.

    Args:
        segment: its file, or a descriptor.

    Returns:
        The state; its tensors are in private pages of this process, which are copied when they are first written to.

    Raises:
        CheckpointError: the content is not in this format.
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
    except Exception as error:  # unpickled bytes can raise anything
        name = "a segment" if isinstance(segment, int) else segment.name
        raise CheckpointError(f"{name} cannot be read ({type(error).__name__}: {error}).") from error
