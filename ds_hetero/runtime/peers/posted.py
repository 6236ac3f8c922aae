"""Collectives and messages that this rank has posted: the latest one, how many there are, and whether all are over.

Where gloo runs, a rank that waits stands in a function of torch.distributed, and its stack says what it waits for. NCCL
returns from a call at once, and its wait is a kernel's: the rank goes on until it needs a number, and stands in
``loss.item()``, in ``torch.cuda.synchronize()`` or in an allocation. Then this module is asked.

* Whether all is over is read from the counters of torch's flight recorder, which are there unless
  ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE`` in older releases) is 0. torch's own watchdog thread writes
  them, ten times a second. Reading them calls nothing of CUDA, which might block in turn: a thread that stands in
  ``cudaFree`` until the device is idle may hold what ``cudaEventQuery``, and so ``Work.is_completed()``, needs.
* No `Work` is kept here: one of NCCL's holds its outputs (torch, ProcessGroupNCCL: "references to outputs to be used by
  WorkNCCL::result"), which the allocator could not use again.
* What was posted is noted by wrappers around the methods of `ProcessGroup`, in builds of torch that have NCCL.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hetero.runtime.backends import name_of_backend
from ds_hetero.runtime.peers.stack import ScriptLine, is_call_of_script, line_of_script, place_of

COLLECTIVES = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of torch's `ProcessGroup` that are collectives, in all releases that are let in; one may lack some."""

_KEPT = 16  # the latest collectives of a process group; what a rank has passed by is in a step that others wait in

MESSAGES = ("send", "recv", "recv_anysource")


class Collective(NamedTuple):
    """A collective of torch's."""

    name: str
    group: str  # name of its process group
    ranks: Sequence[int]  # of the group, in the whole job


class Posted(NamedTuple):
    """A call that this rank has made."""

    place: str  # the function of torch.distributed, and the line of the script, for people
    in_script: bool  # whether the script itself called it, past this engine
    collective: Collective | None  # None for messages


class Numbered(NamedTuple):
    """A collective that was posted."""

    number: int  # among those of its process group, counted from 1
    name: str
    place: str  # see `Posted`
    in_script: bool = False  # see `Posted`


def begin_noting() -> None:
    """Note what is posted from here on; counts of `num_begun` begin at 0. Every rank calls it at the same place."""
    global _counts_before
    _wrap_process_groups()
    _num_messages.clear()
    _num_noted.clear()
    _by_group.clear()
    _ranks.clear()
    _counts_before = _counts()


def stop_noting() -> None:
    """Put the methods of `ProcessGroup` back."""
    global _latest
    while _stock_methods:
        name, stock = _stock_methods.popitem()
        setattr(dist.ProcessGroup, name, stock)
    _latest = None


def latest_posted() -> Posted | None:
    """The latest call, where calls return before they are over, as on NCCL; None elsewhere, and before the first."""
    return None if _latest is None else _latest.posted()


def posted_by_group() -> dict[str, list[Numbered]]:
    """Return the latest collectives of every process group, oldest first, where calls return before they are over."""
    with _lock_of_counts:
        noted = {group: list(calls) for group, calls in _by_group.items()}
    return {group: [each.numbered() for each in calls] for group, calls in noted.items()}


def is_unfinished() -> bool:
    """Whether something is posted and not over, as far as torch's flight recorder of NCCL knows."""
    recorder = _flight_recorder()
    return recorder is not None and has_unfinished(recorder(False))


def has_unfinished(record: str | bytes) -> bool:
    """Whether a record of torch's flight recorder, as JSON, tells of a process group that is not through.

    Its counters hold the number of the latest call, a collective or message, that was posted, and that was completed.
    """
    groups = json.loads(record).get("pg_status", {}).values()
    return any(int(of["last_enqueued_collective"]) > int(of["last_completed_collective"]) for of in groups)


def num_begun() -> dict[str, int]:
    """Return how many collectives the rank has begun since `begin_noting`, by process group."""
    if _flight_recorder() is not None:
        return {name: _num_noted[name] for name in _counts()}
    return {name: number - _counts_before.get(name, 0) for name, number in _counts().items()}


_num_noted: Counter[str] = Counter()  # collectives, by process group; before they are made, since NCCL may block there
_by_group: dict[str, deque[_Note]] = {}
_ranks: dict[str, Sequence[int]] = {}  # of process groups, by name
_counts_before: dict[str, int] = {}
# gloo counts messages from rank to rank among the collectives, of which ranks send unequally many: they are subtracted.
_num_messages: Counter[str] = Counter()  # of gloo, by process group
_lock_of_counts = threading.Lock()
_latest: _Note | None = None


def _flight_recorder() -> Callable[[bool], str | bytes] | None:
    """Return the function that reads NCCL's flight recorder in torch; its argument asks for calls besides counters."""
    recorder: Callable[[bool], str | bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return recorder


def _counts() -> dict[str, int]:
    """Collectives begun so far, by process group."""
    groups: Any = distributed_c10d._world.pg_map
    numbers = {str(group.group_name): int(group._get_sequence_number_for_group()) for group in groups}
    return {name: number - _num_messages[name] for name, number in numbers.items()}


_stock_methods: dict[str, Any] = {}  # of `ProcessGroup`, by name, while they are wrapped


def _wrap_process_groups() -> None:
    if _stock_methods:
        return
    returns_at_once = _flight_recorder() is not None  # else all calls block where they are made
    for name in (*COLLECTIVES, *MESSAGES) if returns_at_once else MESSAGES:
        if not hasattr(dist.ProcessGroup, name):
            continue
        # As it stands in the class, where it binds its group; what getattr makes of a method of pybind11's does not.
        _stock_methods[name] = inspect.getattr_static(dist.ProcessGroup, name)
        stock = getattr(dist.ProcessGroup, name)
        counted = _counted(stock) if name in MESSAGES else stock
        setattr(dist.ProcessGroup, name, _noted(name, counted) if returns_at_once else counted)


def _counted(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if name_of_backend(group) == "gloo":
            with _lock_of_counts:
                _num_messages[group.group_name] += 1
        return stock(group, *args, **kwargs)

    return counted


def _noted(method: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _note(method, group, sys._getframe(1))
        return stock(group, *args, **kwargs)

    return noted


class _Note(NamedTuple):
    """A call that was made, as it is noted: what people are told is written when it is asked for."""

    number: int  # of a collective among those of its process group, 0 of a message
    group: str  # name of the process group
    ranks: Sequence[int]  # of a collective's group, in the whole job
    function: str  # that the script knows
    line: ScriptLine | None  # of the script
    in_script: bool

    @property
    def place(self) -> str:
        """See `Posted`."""
        return place_of(self.function, self.line)

    def numbered(self) -> Numbered:
        """Return a collective."""
        return Numbered(self.number, self.function, self.place, self.in_script)

    def posted(self) -> Posted:
        """Return the call."""
        collective = Collective(self.function, self.group, self.ranks) if self.number else None
        return Posted(self.place, self.in_script, collective)


def _note(method: str, group: dist.ProcessGroup, caller: FrameType) -> None:
    global _latest
    # Scripts know the functions of torch.distributed, not the methods below them.
    is_public = caller.f_code.co_filename == distributed_c10d.__file__
    function = caller.f_code.co_name if is_public else method
    name, line, in_script = group.group_name, line_of_script(caller), is_call_of_script(caller)
    if method in MESSAGES:
        note = _Note(0, name, (), function, line, in_script)
    else:
        ranks = _ranks.get(name)
        if ranks is None:
            ranks = _ranks[name] = dist.get_process_group_ranks(group)
        with _lock_of_counts:
            _num_noted[name] += 1
            note = _Note(_num_noted[name], name, ranks, function, line, in_script)
            _by_group.setdefault(name, deque(maxlen=_KEPT)).append(note)
    if threading.current_thread() is threading.main_thread():
        _latest = note
