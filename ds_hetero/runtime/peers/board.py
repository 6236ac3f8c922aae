"""Place of every rank, and what ranks tell each other in the key-value store, where no collective can help any more.

    asked            how often ranks have asked where the others are; who sees it grow writes its status
    status/RANK      where that rank is
    num_ends, end/N  the last words of the ranks that have ended, in their order
    diagnosis        why the job cannot go on; the first one counts

Any process that reaches the store can write to it: torch's has no secret. In an elastic job, whose processes share one,
what ranks write has an HMAC (`sign_with`), and what has none is as if it were not there.

A store that cannot be reached raises `torch.distributed.DistError` or a RuntimeError, from any method.

Where the main thread of this process is, is read from its stack, and what it waits for where its calls return at once,
as on NCCL, from what it has posted (`posted`). Of the processes of other ranks, those of the same host and container
are looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    TCPStore,
    distributed_c10d,
)
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_hetero.common.reading import JsonDict
from ds_hetero.runtime.peers.calls import History, own_calls
from ds_hetero.runtime.peers.posted import Collective, Numbered, is_unfinished, latest_posted, num_begun
from ds_hetero.runtime.peers.stack import is_call_of_script, line_of_script, place_of, waits_for_ranks

ENDED, FAILED, STOPPED = "ended", "failed", "stopped"

T = TypeVar("T")

logger = logging.getLogger(__name__)

_num_boards = 0
_key: bytes | None = None  # of the HMACs


def sign_with(token: bytes) -> None:
    """Sign what this rank writes, and believe only what is signed, on boards that are made from here on."""
    global _key
    _key = hmac.digest(token, b"board", hashlib.sha256)


class Status(NamedTuple):
    """Position of a rank. ``counts``: of the collectives that it has begun, by the name of their process group."""

    asked: int  # the question that this answers
    place: str  # file, line and function of the script, and of the collective that it waits in, if it does
    waits: bool  # whether it waits for other ranks there
    in_script: bool  # whether in a collective that the script itself calls
    unchanged_s: float  # for how long it has been there
    history: History
    collective: Collective | None = None  # of torch's that it waits in
    counts: Mapping[str, int] = MappingProxyType({})
    may_compute: bool = False  # whether it may be a kernel of its own that it waits for, and no rank; see `Place`
    posted: Mapping[str, Sequence[Numbered]] = MappingProxyType({})  # the latest collectives, by process group
    gathers: History = History((), 0, False)  # of ZeRO-3, `calls.own_gathers`


class End(NamedTuple):
    """The last words of a rank."""

    rank: int
    how: str  # `ENDED` with its script, `FAILED` with an error of its own, or `STOPPED` because of other ranks
    text: str


class Board:
    """This rank's access to what the ranks write.

    It has a connection of its own, so that it works while another thread waits in the store.

    Args:
        attempt: a name that these processes share, and no others: torchrun's store outlives them, and processes that it
            starts again would read the last words of those before.

    Attributes:
        has_lost_rank_0: whether rank 0 is seen to be gone. If it has kept the store, nothing is asked any more: torch
            would print the stack of its C++ code before the error says who is gone.
    """

    def __init__(self, attempt: str = "") -> None:
        global _num_boards
        _num_boards += 1  # the same on every rank, also where process groups are made one after another
        store = _get_default_store()
        clone = getattr(store, "clone", None)
        self.has_lost_rank_0: Callable[[], bool] = lambda: False
        self._is_kept_by_rank_0 = _is_kept_by_rank_0(store)
        self._prefix, self._key = f"ds_hetero/{_num_boards}/{attempt}", _key
        self._store: Store = PrefixStore(self._prefix, store if clone is None else clone())
        self._has_warned = False
        self._num_ends_read = 0
        self._ends: list[End] = []
        self._asked_at_s: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has not answered the request under way; 0 where there is none."""
        asked_at_s = self._asked_at_s
        return 0.0 if asked_at_s is None else time.monotonic() - asked_at_s

    def asked(self) -> int:
        """How often ranks have asked for positions."""
        return int(self._request(self._store.add, "asked", 0))

    def ask(self) -> int:
        """Ask all ranks where they are; return the number of the question."""
        return int(self._request(self._store.add, "asked", 1))

    def may_ask(self, asked: int) -> bool:
        """Whether this rank is the one that asks after question ``asked``; one of all that want to."""
        return int(self._request(self._store.add, f"asks_after/{asked}", 1)) == 1

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Tell the other ranks the process of this one."""
        self._write(f"process/{rank}", process)

    def process(self, rank: int) -> JsonDict | None:
        """Return the process that a rank has introduced itself with."""
        content: JsonDict | None = self._read(f"process/{rank}")
        return content

    def write_status(self, rank: int, status: Status) -> None:
        """Write where this rank is."""
        self._write(f"status/{rank}", status._replace(counts=dict(status.counts), posted=dict(status.posted)))

    def status(self, rank: int) -> Status | None:
        """Return the latest status of a rank."""
        content = self._read(f"status/{rank}")
        if content is None:
            return None
        status = Status(*content)
        collective = None if status.collective is None else Collective(*status.collective)
        posted = {group: [Numbered(*call) for call in calls] for group, calls in status.posted.items()}
        history, gathers = History(*status.history), History(*status.gathers)
        return status._replace(history=history, collective=collective, posted=posted, gathers=gathers)

    def write_end(self, end: End) -> None:
        """Write this rank's last words."""
        number = self._request(self._store.add, "num_ends", 1)
        self._write(f"end/{number}", end)

    def ends(self) -> list[End]:
        """Return the last words of all ranks that have ended."""
        while self._request(self._store.check, [f"end/{self._num_ends_read + 1}"]):
            self._num_ends_read += 1
            content = self._read(f"end/{self._num_ends_read}")
            if content is not None:
                self._ends.append(End(*content))
        return self._ends

    def settle(self, diagnosis: list[str]) -> list[str]:
        """Write a diagnosis unless there is one; return the one that counts."""
        raw = self._request(self._store.compare_set, "diagnosis", "", self._signed("diagnosis", diagnosis))
        content: list[str] | None = self._believed("diagnosis", raw)
        return diagnosis if content is None else content

    def diagnosis(self) -> list[str] | None:
        """Return the diagnosis that counts, if there is one."""
        content: list[str] | None = self._read("diagnosis")
        return content

    def _read(self, key: str) -> Any:
        has_key = self._request(self._store.check, [key])
        return self._believed(key, self._request(self._store.get, key)) if has_key else None

    def _write(self, key: str, content: object) -> None:
        self._request(self._store.set, key, self._signed(key, content))

    def _signed(self, key: str, content: object) -> str:
        text = json.dumps(content)
        return text if self._key is None else f"{self._mac(key, text)} {text}"

    def _believed(self, key: str, raw: bytes) -> Any:
        """Return the content that a rank has written; None where another process has written it."""
        text = raw.decode(errors="replace")
        if self._key is not None:
            mac, _, text = text.partition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(key, text).encode()):
                if not self._has_warned:
                    logger.warning("a process that is not of this job writes to its store (%s); it is ignored", key)
                self._has_warned = True
                return None
        return json.loads(text)

    def _mac(self, key: str, text: str) -> str:
        assert self._key is not None
        return hmac.new(self._key, f"{self._prefix}/{key}\0{text}".encode(), hashlib.sha256).hexdigest()

    def _request(self, ask: Callable[..., T], *args: Any) -> T:
        if self._is_kept_by_rank_0 and self.has_lost_rank_0():
            raise dist.DistNetworkError("rank 0, which has kept the store, is gone")
        self._asked_at_s = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._asked_at_s = None


def _is_kept_by_rank_0(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


_MAKING_GROUPS = ("_new_process_group_helper", "_store_based_barrier")
# Of torch.distributed, by which a stack tells what a rank waits in.
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "scatter"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}


class Place(NamedTuple):
    """Position of a thread in the code."""

    mark: tuple[int, ...]  # equal as long as it has not moved
    text: str  # the line of the script and the function that it is in, for people
    waits: bool  # whether the innermost function is one that waits for other ranks
    in_script: bool  # whether the script called that itself, past this engine
    in_store: bool = False  # whether the innermost function makes a process group, by the store
    # Whether it waits since something posted is not over, which it cannot be while kernels before it run.
    may_compute: bool = False


class Stay:
    """Time that the main thread has been in one place, without a call that all ranks make.

    Attributes:
        place: where it was at the latest look.
        since_s: when it was first seen there, on the monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads look
        self.place, self._num_calls, self.since_s = own_place(), own_calls.number, time.monotonic()

    @property
    def unchanged_s(self) -> float:
        """Seconds since `since_s`."""
        return time.monotonic() - self.since_s

    def look(self) -> None:
        """See where the main thread is now."""
        with self._lock:
            place = own_place()
            if own_calls.number != self._num_calls or place.mark != self.place.mark:
                self._num_calls, self.since_s = own_calls.number, time.monotonic()
            elif not place.waits and is_unfinished():
                place = _waiting_for_posted(place)
            self.place = place


def own_place() -> Place:
    """Return the position of the main thread."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return Place((0,), "nowhere", False, False)
    waits = waits_for_ranks(innermost)
    name = innermost.f_code.co_name
    return Place(
        mark=(id(innermost), innermost.f_lasti),
        text=place_of(name, line_of_script(innermost)),
        waits=waits,
        in_script=waits and is_call_of_script(innermost),
        in_store=name in _MAKING_GROUPS,
    )


def _waiting_for_posted(place: Place) -> Place:
    """Return ``place`` if the thread has not moved while a message that it posted is under way."""
    posted = latest_posted()
    if posted is None:
        return place._replace(waits=True, may_compute=True)
    return place._replace(waits=True, text=posted.place, in_script=posted.in_script, may_compute=True)


def own_collectives() -> tuple[Collective | None, dict[str, int]]:
    """Return torch's collective in which the main thread waits, and how many it has begun, by process group.

    The functions of torch.distributed hold their group in a local variable, and process groups count their collectives:
    both are read where they are, and a call costs nothing. Where calls return before they are over it is the latest
    that was posted. Numbers are those since `begin_noting`.
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is not None and innermost.f_code.co_filename == distributed_c10d.__file__:
        name, group = innermost.f_code.co_name, innermost.f_locals.get("group")
        if name in _COLLECTIVES and isinstance(group, dist.ProcessGroup):
            return Collective(name, group.group_name, dist.get_process_group_ranks(group)), num_begun()
    posted = latest_posted()
    return None if posted is None else posted.collective, num_begun()


_GONE = "ZX-"
_EXITING = 0x4  # of the kernel's flags of a process: it gives its memory back, which takes a while, and does not answer


class Introductions(Protocol):
    """Where ranks tell each other their processes."""

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Tell the other ranks the process of this one."""

    def process(self, rank: int) -> JsonDict | None:
        """Return the process that a rank has introduced itself with; None if it has not."""


class Processes:
    """The processes of all ``size`` ranks; every rank waits here until all have introduced themselves."""

    def __init__(self, board: Introductions, rank: int, size: int) -> None:
        pid = os.getpid()
        board.introduce(rank, {"host": _host(), "pid": pid, "started": _state(pid, "")[1]})
        processes: list[JsonDict] = []
        while len(processes) < size:
            process = board.process(len(processes))
            if process is None:
                time.sleep(0.005)
            else:
                processes.append(process)
        own_host = processes[rank]["host"]
        self._here = {number: process for number, process in enumerate(processes) if process["host"] == own_host}

    def dead(self) -> list[int]:
        """Return ranks of this host whose process is gone."""
        return self._in_state(_GONE)

    def has_lost_rank_0(self) -> bool:
        """Whether rank 0 is of this host, and its process gone."""
        process = self._here.get(0)
        return process is not None and _state(process["pid"], process["started"])[0] in _GONE

    def stopped(self) -> list[int]:
        """Return ranks of this host whose process is stopped by a signal."""
        return self._in_state("T")

    def _in_state(self, states: str) -> list[int]:
        return [rank for rank, process in self._here.items() if _state(process["pid"], process["started"])[0] in states]


def _host() -> str:
    """Return a name of the host and container: processes with the same one can see each other's state."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _state(pid: int, started: str) -> tuple[str, str]:
    """State letter and start time of a process; state "-" where it does not exist or is another one, "X" on its way."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-", ""
    state = "X" if int(fields[6]) & _EXITING else fields[0]
    return (state, fields[19]) if started in ("", fields[19]) else ("-", "")


_calls: list[Callable[[str], object]] = []


def before_forced_exit(call: Callable[[str], object]) -> Callable[[], None]:
    """Call ``call`` with the reason, in the watch's thread, before a vain wait is ended; return what undoes this."""
    _calls.append(call)
    return lambda: _calls.remove(call) if call in _calls else None


def run_before_forced_exit(reason: str) -> None:
    """Call what was given to `before_forced_exit`."""
    for call in _calls:
        call(reason)
