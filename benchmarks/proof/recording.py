"""Apply NCCL's rules without a GPU: record the calls of a gloo rank, for `benchmarks.proof.order` to judge.

Messages match in the order of posting, as on NCCL, which knows no tags: the k-th send from a to b meets the k-th
receive that b posts for a. So tags are replaced by counters here, and code that relies on them gets the wrong tensor,
as it would on GPUs. The ring posts the messages of a round together, as on NCCL.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.proof.events import Call, Event, Message, Wait
from ds_hetero.runtime.attention import channel
from ds_hetero.runtime.peers.posted_calls import COLLECTIVES
from ds_hetero.runtime.pipeline import runner

_THIS_FILE = Path(__file__).resolve()
_ROOT = _THIS_FILE.parents[2]
_UNEVEN = ("all_to_all_single", "alltoall_base")
# The argument that is alike on all ranks. Others may differ: parts of unequal size, lists that only the root has.
_ALIKE = {"allgather": 0, "gather": 1, "reduce_scatter": 1, "scatter": 0}
# What ncclDataType_t has, as torch maps it.
_DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16} | {
    torch.float32,
    torch.float64,
}


@contextmanager
def recording(events: list[Any] | None = None) -> Iterator[list[Event]]:
    """Record all calls that this process posts inside, in order.

    Args:
        events: list to append to; left out, a new one.
    """
    recorder = _Recorder([] if events is None else events)
    group_type = dist.ProcessGroup
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        replaced.append((owner, name, inspect.getattr_static(owner, name)))  # not what a lookup would make of it
        setattr(owner, name, wrap(getattr(owner, name)))

    for name in COLLECTIVES:
        if hasattr(group_type, name):
            replace(group_type, name, functools.partial(recorder.collective, name))
    replace(group_type, "send", functools.partial(recorder.message, True))
    replace(group_type, "recv", functools.partial(recorder.message, False))
    replace(dist.Work, "wait", recorder.wait)
    replace(dist, "batch_isend_irecv", recorder.batch)
    for module in (channel, runner):
        replace(module, "pairs_by_order", lambda original: lambda group: True)
    try:
        yield recorder.events
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


class _Recorder:
    """Replaces the functions of torch.distributed by ones that record."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._num_calls = 0
        self._work_numbers: dict[int, int] = {}  # by id of the Work, while its owner holds it
        self._num_messages: Counter[tuple[str, int, int]] = Counter()  # by group, sender, receiver
        self._together: list[tuple[dist.ProcessGroup, Message, int]] | None = None

    def collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = [_tensors(arg) for arg in (*args, *kwargs.values())]
            _check_tensors(name, tensors)
            splits = None
            if name in _UNEVEN:
                output, source, received, sent = args[:4]
                splits = (_sizes(sent, source, group), _sizes(received, output, group))
                shape: tuple[object, ...] = (_dtype(source),)
            else:
                options = next((arg for arg in args if hasattr(arg, "timeout")), None)
                alike = [tensors[_ALIKE[name]]] if name in _ALIKE else tensors
                shape = (*filter(None, map(_described, alike)), *_described_options(options))
            self._post(group, _name(group), name, shape, splits, ())
            work = original(group, *args, **kwargs)
            self._work_numbers[id(work)] = self._num_calls
            if getattr(next((a for a in args if hasattr(a, "asyncOp")), None), "asyncOp", True) is False:
                self.events.append(Wait(self._num_calls))  # torch waits below Python
            return work

        return call

    def message(self, sends: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> Any:
            _check_tensors("send" if sends else "recv", [tensors])
            (tensor,) = tensors
            message = Message(sends, peer, tensor.numel() * tensor.itemsize, _dtype(tensor), tag)
            ends = (group.rank(), peer) if sends else (peer, group.rank())
            key = (_name(group), *ends)
            self._num_messages[key] += 1
            work = original(group, tensors, peer, self._num_messages[key])
            if self._together is not None:
                self._together.append((group, message, id(work)))
            else:
                low, high = sorted(ends)
                self._post(group, f"{_name(group)}, pair {low}-{high}", "", (), None, (message,))
                self._work_numbers[id(work)] = self._num_calls
            return work

        return call

    def batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(operations: Sequence[dist.P2POp]) -> Any:
            self._together = []
            works = original(operations)
            posted, self._together = self._together, None
            group = posted[0][0]
            self._post(group, _name(group), "", (), None, tuple(message for _, message, _ in posted))
            for _, _, work in posted:
                self._work_numbers[work] = self._num_calls
            return works

        return call

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            if id(work) in self._work_numbers:
                self.events.append(Wait(self._work_numbers[id(work)]))
            return original(work, *args, **kwargs)

        return call

    def _post(
        self,
        group: dist.ProcessGroup,
        communicator: str,
        name: str,
        shape: tuple[object, ...],
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
        messages: tuple[Message, ...],
    ) -> None:
        self._num_calls += 1
        self.events.append(
            Call(
                self._num_calls,
                communicator,
                group.rank(),
                group.size(),
                name,
                shape,
                splits,
                messages,
                _site(),
                tuple(dist.get_process_group_ranks(group)),
            )
        )


def _name(group: dist.ProcessGroup) -> str:
    return f"group {group.group_name}"


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [tensor for inner in argument for tensor in _tensors(inner)]
    return []


def _check_tensors(name: str, arguments: list[list[Tensor]]) -> None:
    """Refuse tensors that torch's NCCL backend refuses, at once."""
    tensors = [tensor for argument in arguments for tensor in argument]
    if any(not tensor.is_contiguous() for tensor in tensors):
        raise AssertionError(f"NCCL takes contiguous tensors only; {name} at {_site()} was given another.")
    if wrong := {_dtype(tensor) for tensor in tensors if tensor.dtype not in _DTYPES}:
        raise AssertionError(f"NCCL has no data type for {', '.join(sorted(wrong))}, given to {name} at {_site()}.")
    if len({tensor.device for tensor in tensors}) > 1:
        raise AssertionError(f"tensors of one call are on one device; those of {name} at {_site()} are not.")


def _described(tensors: list[Tensor]) -> tuple[object, ...]:
    return tuple((_dtype(tensor), tensor.numel()) for tensor in tensors)


def _described_options(options: Any) -> tuple[object, ...]:
    described = [str(options.reduceOp.op)] if hasattr(options, "reduceOp") else []
    return (*described, *(f"{name} {getattr(options, name)}" for name in ("rootRank",) if hasattr(options, name)))


def _sizes(splits: list[int] | None, tensor: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the elements for each rank of an all-to-all."""
    per_row = tensor.numel() // len(tensor) if len(tensor) else 1
    rows = splits or [len(tensor) // group.size()] * group.size()
    return tuple(count * per_row for count in rows)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _site() -> str:
    """Return file and line of the nearest caller inside this repository, preceded by DeepSpeed's if it called."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(_ROOT) and path != _THIS_FILE and ".venv" not in path.parts
        if inside and frame.f_code.co_name != "timed":  # a wrapper around every collective
            return f"{library}{path.relative_to(_ROOT)}:{frame.f_lineno}"
        if not library and "deepspeed" in path.parts and path.parent.name != "comm" and ".venv" in path.parts:
            library = f"deepspeed's {path.name}:{frame.f_lineno}, called from "
        frame = frame.f_back  # type: ignore[assignment]
    return library or "unknown"
