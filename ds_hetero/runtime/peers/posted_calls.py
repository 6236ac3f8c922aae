"""Record the collectives and messages that this rank posts, and find out whether one of them has not ended.

With gloo, the stack of a rank that waits ends in a function of torch.distributed, which shows what the rank waits for.
NCCL returns from a call at once, and a kernel does the waiting: the rank goes on until it needs a number, and then
waits in ``loss.item()``, in ``torch.cuda.synchronize()`` or in an allocation. So posted calls are recorded here.

* Counters of torch's flight recorder tell whether all calls have ended. The recorder exists unless
  ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE`` in older releases) is 0. torch's own watchdog thread writes
  the counters, ten times a second. Reading them calls no function of CUDA, which might block: a thread in ``cudaFree``
  that waits until the device is idle may hold a lock that ``cudaEventQuery``, and so ``Work.is_completed()``, needs.
* No `Work` is stored here: NCCL's `Work` refers to its outputs (torch, ProcessGroupNCCL: "references to outputs to be
  used by WorkNCCL::result"), so the allocator could not use their memory again.
* Calls are recorded by wrappers around the methods of `ProcessGroup`. In builds of torch without NCCL all calls block
  and the stack shows them, so there only the messages of gloo are counted.
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
"""Methods of torch's `ProcessGroup` that are collectives, in any supported release; a release may lack some."""

MESSAGES = ("send", "recv", "recv_anysource")
"""Methods of `ProcessGroup` that send or receive a point-to-point message."""

_MAX_COLLECTIVES_PER_GROUP = 16  # recorded ones; other ranks may wait in a collective before this rank's latest


class Collective(NamedTuple):
    """A collective of torch.distributed."""

    name: str
    group: str  # name of its process group
    ranks: Sequence[int]  # global ranks of the group


class CallRecord(NamedTuple):
    """A collective or message that this rank has posted."""

    place: str  # for people: the function of torch.distributed, and the line of the script
    in_script: bool  # the script itself has called it, not an engine
    collective: Collective | None  # None for messages


class PostedCollective(NamedTuple):
    """A posted collective, with its number in its process group."""

    number: int  # among the collectives of the process group, counted from 1
    name: str
    place: str  # see `CallRecord`
    in_script: bool = False  # see `CallRecord`


class _Record(NamedTuple):
    """What is stored of a call; texts are made from it only when they are needed."""

    number: int  # see `PostedCollective`; 0 for a message
    group: str  # name of the process group
    ranks: Sequence[int]  # global ranks of a collective's group; () for a message
    function: str  # the function of torch.distributed that the script knows
    line: ScriptLine | None  # of the script
    in_script: bool

    @property
    def place(self) -> str:
        """Text for people: the function of torch.distributed, and the line of the script."""
        return place_of(self.function, self.line)

    def call(self) -> CallRecord:
        """Return the call in the form in which `PostedCalls.latest_call` reports it."""
        collective = Collective(self.function, self.group, self.ranks) if self.number else None
        return CallRecord(self.place, self.in_script, collective)

    def collective(self) -> PostedCollective:
        """Return the call, which must be a collective, with its number in its process group."""
        return PostedCollective(self.number, self.function, self.place, self.in_script)


class PostedCalls:
    """Collectives and messages of this process, by the name of their process group; see the instance `posted_calls`.

    A call is recorded before it is made, since NCCL may block inside it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the counters and records, which the watch's threads read
        self._num_collectives: Counter[str] = Counter()  # recorded by the wrappers
        self._latest_collectives: dict[str, deque[_Record]] = {}
        self._ranks_of_group: dict[str, Sequence[int]] = {}  # global ranks
        self._latest_call: _Record | None = None  # of the main thread
        # gloo's sequence number counts messages as collectives, and ranks send unequal numbers of them: the number of
        # messages is subtracted.
        self._num_gloo_messages: Counter[str] = Counter()
        self._sequence_numbers_at_start: dict[str, int] = {}
        self._stock_methods: dict[str, Any] = {}  # of `ProcessGroup`, by name, while they are wrapped

    def start(self) -> None:
        """Record calls from now on; `collective_counts` starts at 0. Every rank calls this at the same point."""
        self._wrap_process_group()
        self._num_gloo_messages.clear()
        self._num_collectives.clear()
        self._latest_collectives.clear()
        self._ranks_of_group.clear()
        self._sequence_numbers_at_start = self._sequence_numbers()

    def stop(self) -> None:
        """Restore the methods of `ProcessGroup`."""
        while self._stock_methods:
            name, stock_method = self._stock_methods.popitem()
            setattr(dist.ProcessGroup, name, stock_method)
        self._latest_call = None

    def latest_call(self) -> CallRecord | None:
        """Return the call that the main thread posted last; None without one, or if calls block, as on gloo."""
        return None if self._latest_call is None else self._latest_call.call()

    def latest_collectives(self) -> dict[str, list[PostedCollective]]:
        """Return the latest collectives of every process group, oldest first; {} if calls block, as on gloo."""
        with self._lock:
            records_of_group = {group: list(records) for group, records in self._latest_collectives.items()}
        return {group: [record.collective() for record in records] for group, records in records_of_group.items()}

    def collective_counts(self) -> dict[str, int]:
        """Return how many collectives this rank has begun since `start`, by process group.

        Process groups that were destroyed meanwhile are counted only if calls return at once, as on NCCL.
        """
        groups = self._sequence_numbers()
        if calls_return_at_once():
            return {name: self._num_collectives[name] for name in {*groups, *self._num_collectives}}
        return {name: number - self._sequence_numbers_at_start.get(name, 0) for name, number in groups.items()}

    def _sequence_numbers(self) -> dict[str, int]:
        """Return torch's number of collectives begun so far, without messages of gloo, by process group."""
        groups: Any = distributed_c10d._world.pg_map
        numbers = {str(group.group_name): int(group._get_sequence_number_for_group()) for group in groups}
        return {name: number - self._num_gloo_messages[name] for name, number in numbers.items()}

    def _wrap_process_group(self) -> None:
        """Wrap the methods of `ProcessGroup` so that their calls are recorded and counted."""
        if self._stock_methods:
            return
        is_recorded = calls_return_at_once()  # else all calls block, and the stack shows them
        for name in (*COLLECTIVES, *MESSAGES) if is_recorded else MESSAGES:
            if not hasattr(dist.ProcessGroup, name):
                continue
            # The method as it is in the class, which binds a group when it is restored; getattr's result of a pybind11
            # method would not.
            self._stock_methods[name] = inspect.getattr_static(dist.ProcessGroup, name)
            method = getattr(dist.ProcessGroup, name)
            if name in MESSAGES:
                method = self._counting_gloo_messages(method)
            setattr(dist.ProcessGroup, name, self._recording(name, method) if is_recorded else method)

    def _counting_gloo_messages(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method``, which sends or receives a message, wrapped so that messages of gloo are counted."""

        @functools.wraps(method)
        def counting(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if name_of_backend(group) == "gloo":
                with self._lock:
                    self._num_gloo_messages[group.group_name] += 1
            return method(group, *args, **kwargs)

        return counting

    def _recording(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` of `ProcessGroup`, called ``name`` there, wrapped so that every call is recorded."""

        @functools.wraps(method)
        def recording(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._record(name, group, sys._getframe(1))
            return method(group, *args, **kwargs)

        return recording

    def _record(self, method: str, group: dist.ProcessGroup, caller: FrameType) -> None:
        """Record a call of a method of ``group`` from the frame ``caller``."""
        # Scripts know the functions of torch.distributed, not the methods below them.
        is_public = caller.f_code.co_filename == distributed_c10d.__file__
        function = caller.f_code.co_name if is_public else method
        group_name, line, in_script = group.group_name, line_of_script(caller), is_call_of_script(caller)
        if method in MESSAGES:
            record = _Record(0, group_name, (), function, line, in_script)
        else:
            ranks = self._ranks_of_group.get(group_name)
            if ranks is None:
                ranks = self._ranks_of_group[group_name] = dist.get_process_group_ranks(group)
            with self._lock:
                self._num_collectives[group_name] += 1
                record = _Record(self._num_collectives[group_name], group_name, ranks, function, line, in_script)
                records = self._latest_collectives.setdefault(group_name, deque(maxlen=_MAX_COLLECTIVES_PER_GROUP))
                records.append(record)
        if threading.current_thread() is threading.main_thread():
            self._latest_call = record


posted_calls = PostedCalls()
"""The calls of this process. There is one record, since the methods of the class `ProcessGroup` are wrapped."""


def calls_return_at_once() -> bool:
    """Whether calls of collectives may return before they have ended: torch has NCCL's flight recorder."""
    return _flight_recorder() is not None


def has_unfinished_call() -> bool:
    """Whether a posted call has not ended, by NCCL's flight recorder; False without the recorder."""
    recorder = _flight_recorder()
    return recorder is not None and shows_unfinished_call(recorder(False))


def shows_unfinished_call(flight_record: str | bytes) -> bool:
    """Whether a process group has calls that have not ended, by a JSON record of torch's flight recorder.

    The record has, for each group, the number of the latest posted call and that of the latest ended one. Example: 7
    and 6, if the seventh call still runs.
    """
    groups = json.loads(flight_record).get("pg_status", {}).values()
    return any(int(group["last_enqueued_collective"]) > int(group["last_completed_collective"]) for group in groups)


def _flight_recorder() -> Callable[[bool], str | bytes] | None:
    """Return torch's function that reads NCCL's flight recorder, or None if torch has none.

    The argument of the function: whether to return the recorded calls, besides the counters.
    """
    recorder: Callable[[bool], str | bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return recorder
