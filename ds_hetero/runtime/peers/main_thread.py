"""Find out where the main thread of this process is, how long it has been there, and for which collective it waits.

The thread's stack shows the function that runs. If calls of collectives return at once, as on NCCL, `posted_calls` has
a record of the collective that the thread waits for.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import (
    distributed_c10d,
)

from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.peers.posted_calls import Collective, has_unfinished_call, posted_calls
from ds_hetero.runtime.peers.stack import (
    is_call_of_script,
    line_of_script,
    outside_of_recorder,
    place_of,
    waits_for_ranks,
)

_MAKING_GROUPS = ("_new_process_group_helper", "_store_based_barrier")
# Functions of torch.distributed: a rank with one of them on its stack waits in that collective.
_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "gather", "scatter"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}


class Place(NamedTuple):
    """Position of a thread in the code.

    Attributes:
        mark: a value that stays the same as long as the thread has not moved: identity of the frame, and instruction.
        text: line of the script and innermost function, for messages.
        waits: the innermost function is one that waits for other ranks.
        in_script: the script itself has called that function, not an engine.
        in_store: the innermost function makes a process group, and waits in the store.
        may_compute: the thread waits because a call that it has posted has not ended. The reason may be kernels that
            run before that call on this device, and not other ranks.
    """

    mark: tuple[int, ...]
    text: str
    waits: bool
    in_script: bool
    in_store: bool = False
    may_compute: bool = False


class Stay:
    """Measures how long the main thread has been in one place without recording a call in `own_calls`.

    Attributes:
        place: position of the thread at the latest `look`.
        since_s: time on the monotonic clock at which the thread was first seen there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads call `look`
        self.place, self._num_calls, self.since_s = place_of_main_thread(), own_calls.number, time.monotonic()

    @property
    def unchanged_s(self) -> float:
        """Seconds since `since_s`."""
        return time.monotonic() - self.since_s

    def look(self) -> None:
        """Read the position of the main thread; set `since_s` to now if the thread has moved."""
        with self._lock:
            place = place_of_main_thread(before=self.place)
            if own_calls.number != self._num_calls or place.mark != self.place.mark:
                self._num_calls, self.since_s = own_calls.number, time.monotonic()
            elif not place.waits and has_unfinished_call():
                place = _waiting_for_posted(place)
            self.place = place


def place_of_main_thread(before: Place | None = None) -> Place:
    """Return the position of the main thread.

    The callers of its innermost function are read only if the thread has not moved since ``before``: CPython 3.11 has
    ended with SIGSEGV while another thread followed ``f_back`` of a thread that was running. At the first look in a
    place, ``text`` is the name of the function alone and ``in_script`` False; a thread that waits is seen there again.

    Args:
        before: the thread's position at the look before; None at the first look.
    """
    innermost = _innermost_frame()
    if innermost is None:
        return Place((0,), "nowhere", False, False)
    mark = (id(innermost), innermost.f_lasti)
    called = outside_of_recorder(innermost)
    waits, name = waits_for_ranks(called), called.f_code.co_name
    has_moved = before is None or mark != before.mark
    return Place(
        mark=mark,
        text=name if has_moved else place_of(name, line_of_script(called)),
        waits=waits,
        in_script=waits and not has_moved and is_call_of_script(called),
        in_store=name in _MAKING_GROUPS,
    )


def _innermost_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if there is none."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waiting_for_posted(place: Place) -> Place:
    """Return ``place`` with the text of the call that the thread has posted last, for which it waits.

    Caller: `Stay.look`, if the thread has not moved and a posted call has not ended.
    """
    posted = posted_calls.latest_call()
    if posted is None:
        return place._replace(waits=True, may_compute=True)
    return place._replace(waits=True, text=posted.place, in_script=posted.in_script, may_compute=True)


def collectives_of_main_thread() -> tuple[Collective | None, dict[str, int]]:
    """Return torch's collective in which the main thread waits, and how many collectives each process group has begun.

    The collective is None if the thread is in none. The functions of torch.distributed have their group in a local
    variable, and process groups count their collectives. Both are read only here, so that collectives cost no more time
    than without the watch. If calls return at once, as on NCCL, the collective is the latest posted one.
    Counts begin at the start of `posted_calls`.
    """
    innermost = _innermost_frame()
    called = None if innermost is None else outside_of_recorder(innermost)
    if called is not None and called.f_code.co_filename == distributed_c10d.__file__:
        name, group = called.f_code.co_name, called.f_locals.get("group")
        if name in _COLLECTIVES and isinstance(group, dist.ProcessGroup):
            return Collective(
                name, group.group_name, dist.get_process_group_ranks(group)
            ), posted_calls.collective_counts()
    posted = posted_calls.latest_call()
    return None if posted is None else posted.collective, posted_calls.collective_counts()
