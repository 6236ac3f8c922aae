"""Run the lanes of one rank, in an order in which no rank waits for ever.

A lane is an iterator. Between two of its stops it posts a round of messages and computes. At each stop it yields the
receives that must end before it goes on, or `NOTHING`. At its first stop it has posted its first round, which depends
on no other message, and has computed nothing.

All ranks post the first rounds of all lanes first, and then run lane by lane. A rank takes part in some of the lanes
only, but all ranks run theirs in the same order, so the earliest round that is under way can always be finished.
Communicators that pair messages by the order of posting (NCCL) need that. If tags pair messages (gloo), a lane that
would wait lets the next lane run.
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
    """Let all lanes post their first round, then run one lane after the other to its end, in the placement's order."""
    for lane in lanes:
        next(lane)
    for lane in lanes:
        for pending in lane:
            if pending is not NOTHING:
                with clock.phase(RING_WAIT, "ring_wait"):
                    pending.wait()


def run_as_ready(lanes: Sequence[Rounds], clock: Clock) -> None:
    """Let all lanes post their first round, then always run the first lane that need not wait."""
    for lane in lanes:
        next(lane)
    # By lane, the receives for which it waits, or None if it can go on; lanes that have ended are not in it.
    arrivals: dict[int, Future[None] | None] = dict.fromkeys(range(len(lanes)))
    while arrivals:
        number = next((i for i, arrival in arrivals.items() if arrival is None or arrival.done()), None)
        if number is None:
            with clock.phase(RING_WAIT, "ring_wait"):
                wait([arrival for arrival in arrivals.values() if arrival is not None], return_when=FIRST_COMPLETED)
            continue
        if arrival := arrivals[number]:
            arrival.result()
        pending = next(lanes[number], None)
        if pending is None:
            del arrivals[number]
        elif pending is NOTHING:
            arrivals[number] = None
        elif len(arrivals) == 1:  # no other lane could run in the meantime
            arrivals[number] = None
            with clock.phase(RING_WAIT, "ring_wait"):
                pending.wait()
        else:
            arrivals[number] = _waiters.submit(pending.wait)


class _Waiters:
    """Threads that wait for messages while the main thread computes; as many as are needed at the same time.

    gloo has no call that tells whether a message has arrived, so a thread has to wait for it. These are daemon threads,
    unlike those of the standard library's executor: a thread that waits for a dead rank must not keep this process
    alive.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_free = 0

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` in a free thread, or in a new one if there is none."""
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
