"""Order in which one rank goes through the rounds of its lanes.

A lane is an iterator. Between two of its stops it posts a round of messages and computes; at each stop it yields the
messages that must be here before it goes on, or `NOTHING`. At its first stop it has posted its first round, which
depends on nothing, and computed nothing.

All ranks post the first rounds of all lanes first, and then lane by lane. Every rank has part in some of the lanes
only, but all go through theirs in this one order, so that of all rounds that are under way the earliest can always be
finished. Communicators that pair messages by the order of posting (NCCL) need that. Where tags pair them (gloo), a
lane that would wait yields to the next one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ds_hetero.runtime.attention.channel import NOTHING, PendingReceives
from ds_hetero.runtime.step_clock import RING_WAIT, Clock

Rounds = Iterator[PendingReceives]


def run_in_order(lanes: Sequence[Rounds], clock: Clock) -> None:
    """Run lanes, in the placement's order, to their end once all have posted their first round."""
    for lane in lanes:
        next(lane)
    for lane in lanes:
        for pending in lane:
            if pending is not NOTHING:
                with clock.phase(RING_WAIT, "ring_wait"):
                    pending.wait()


def run_as_ready(lanes: Sequence[Rounds], clock: Clock) -> None:
    """Run lanes to their end, always the first of those that need not wait; see `run_in_order`."""
    for lane in lanes:
        next(lane)
    waiting: dict[int, Future[None] | None] = dict.fromkeys(range(len(lanes)))
    while waiting:
        number = next((i for i, arrival in waiting.items() if arrival is None or arrival.done()), None)
        if number is None:
            with clock.phase(RING_WAIT, "ring_wait"):
                wait([arrival for arrival in waiting.values() if arrival is not None], return_when=FIRST_COMPLETED)
            continue
        if arrival := waiting[number]:
            arrival.result()
        pending = next(lanes[number], None)
        if pending is None:
            del waiting[number]
        elif pending is NOTHING:
            waiting[number] = None
        elif len(waiting) == 1:  # no other lane could go on meanwhile
            waiting[number] = None
            with clock.phase(RING_WAIT, "ring_wait"):
                pending.wait()
        else:
            waiting[number] = _waiters.submit(pending.wait)


class _Waiters:
    """Threads that wait in the place of the computing one, as many as are needed at once.

    gloo cannot be asked whether a message has arrived. The threads do not outlive the process, unlike those of the
    standard library's executor: one that waits for a dead rank must not keep this rank alive.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_free = 0

    def submit(self, task: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            needs_thread = self._num_free == 0
            if not needs_thread:
                self._num_free -= 1
        if needs_thread:
            threading.Thread(target=self._work, daemon=True).start()
        self._tasks.put((task, future))
        return future

    def _work(self) -> None:
        while True:
            task, future = self._tasks.get()
            try:
                task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            with self._lock:
                self._num_free += 1


_waiters = _Waiters()
