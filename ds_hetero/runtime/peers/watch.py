"""Two threads per process: one answers where this rank is and asks when it waits in vain, one ends what cannot go on.

They cost one small request to the store four times a second and a look at the main thread's stack. All requests to the
store are made by the first thread, for a store may be gone, or its process stopped: then the second one still knows how
long this rank has waited.

`waiting_for_peers` is the one way in which this engine waits for other ranks: in a named phase, with an error that says
who is gone.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from ds_hetero import errors
from ds_hetero.errors import PeerError, StepError
from ds_hetero.runtime.peers.board import (
    ENDED,
    FAILED,
    STOPPED,
    Board,
    End,
    Processes,
    Status,
    Stay,
    default_group,
    own_collectives,
    run_before_forced_exit,
)
from ds_hetero.runtime.peers.calls import own_calls, own_gathers
from ds_hetero.runtime.peers.diagnosis import GONE, STEP, STORE_GONE, Diagnosis, Evidence, diagnose, diagnose_alone
from ds_hetero.runtime.peers.posted import begin_noting, posted_by_group, stop_noting

_TICK_S = 0.25
_PATIENCE_S = 1.0  # in one place, before this rank asks where the others are; doubled after every answer
_LONGEST_PATIENCE_S = 60.0
_ANSWER_S = 1.2  # within which the others answer
_SAID_S = 0.9  # for rank 0 to say what this rank would say too
_GRACE_S = 1.25  # for a rank that waits in vain to be freed by its backend: `_SAID_S`, and for the other to end
_GRACE_OF_UNFREED_S = 0.5  # the same where no connection is closed by which the backend would notice
_POLL_S = 0.02
_LINGER_S = 2.0  # for the others to read the last words, on the rank that keeps the store
_STORE_ANSWER_S = 1.0  # within which the store answers
_STORE_ANSWER_OF_STOPPED_S = 0.1  # the same where a process of this host is stopped, which may keep it


class Watch:
    """Watch of this rank over the others; after ``timeout_s`` in vain, those that do not answer count as gone."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, attempt: str = "") -> None:
        self.group, self._timeout_s = group, timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.diagnosis: Diagnosis | None = None
        begin_noting()
        self._board = Board(attempt)
        self._processes = Processes(self._board, self.rank, self.size)
        self._board.has_lost_rank_0 = self._processes.has_lost_rank_0
        self._answered = self._board.asked()
        self._stay = Stay()
        self._patience_s, self._patient_since_s = _PATIENCE_S, self._stay.since_s
        self._diagnosed_s: float | None = None
        self._is_alone = False  # with its diagnosis, of nobody who was killed, since the store was gone or silent
        self._has_lost_peer = False
        self._own_end: End | None = None
        self._settled = threading.Event()  # a diagnosis is there, or will not come
        self._waits_for_rank_0 = False  # to say its last words
        self._ends: list[End] = []
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ds_hetero.peers", daemon=True)
        self._thread.start()
        self._guard_thread = threading.Thread(target=self._guard, name="ds_hetero.guard", daemon=True)
        self._guard_thread.start()
        atexit.register(self._speak, ENDED, "")

    def stop(self) -> None:
        """Leave the other ranks to themselves, and end both threads. Caller: every rank, when none waits."""
        atexit.unregister(self._speak)
        self._speak(ENDED, "")
        self._is_over = True
        self._guard_thread.join(4 * _TICK_S)

    def explain(self) -> Diagnosis | None:
        """Find out which rank is gone, after the backend has reported that one is; None if none is to blame."""
        if self.diagnosis is None and self._thread.is_alive():
            self._settled.clear()
            self._has_lost_peer = True
            self._wake.set()
            deadline = time.monotonic() + 3 * _ANSWER_S  # two questions, and some
            while not self._settled.wait(_POLL_S):
                if self._is_cut_off() or time.monotonic() > deadline:
                    self._note_alone(patience_s=0.0)
        return self.diagnosis

    def say_last_words(self, how: str, text: str) -> None:
        """Tell the other ranks why this one ends, the first time; see `End`."""
        self._own_end = self._own_end or End(self.rank, how, text)
        self._wake.set()

    def is_said_by_rank_0(self, text: str) -> bool:
        """Whether rank 0 ends with ``text`` too; waits a moment for its last words, unless this rank is rank 0."""
        self._waits_for_rank_0 = self.rank > 0
        deadline = time.monotonic() + _SAID_S
        while self._waits_for_rank_0 and self._can_speak() and time.monotonic() < deadline:
            if any(end.rank == 0 for end in self._ends):
                break
            time.sleep(_POLL_S)
        self._waits_for_rank_0 = False
        return any(end.rank == 0 != self.rank and end.text == text for end in self._ends)

    def _speak(self, how: str, text: str) -> None:
        """Say the last words, and wait until the other ranks can have read them."""
        self.say_last_words(how, text)
        deadline = time.monotonic() + _LINGER_S + 1.0
        while self._can_speak() and time.monotonic() < deadline:
            self._thread.join(0.05)

    def _can_speak(self) -> bool:
        """Whether the other ranks can still be reached by the store."""
        return self._thread.is_alive() and not self._is_cut_off()

    def _is_cut_off(self) -> bool:
        """Whether the store does not answer: the process that keeps it may be stopped, or its host out of reach."""
        silent_s = self._board.silent_s
        return silent_s > _STORE_ANSWER_S or (silent_s > _STORE_ANSWER_OF_STOPPED_S and bool(self._processes.stopped()))

    def _guard(self) -> None:
        """Watch this rank alone, in a thread."""
        while not self._is_over and dist.group.WORLD is self.group:
            time.sleep(_TICK_S)
            self._stay.look()
            waits_in_vain = self._stay.place.waits and self._stay.unchanged_s >= self._timeout_s
            if self.diagnosis is None and waits_in_vain and self._is_cut_off():
                self._note_alone(patience_s=0.0)
            if self._is_stuck():
                self._end_stuck_process()

    def _is_stuck(self) -> bool:
        """Whether this rank waits in vain: it is known why the job cannot go on, and no rank will answer it."""
        if self.diagnosis is None or self._diagnosed_s is None:
            return False
        if self._own_end is not None or not self._stay.place.waits:
            return False
        place = self._stay.place
        is_never_freed = place.in_store or place.may_compute or bool(self._processes.stopped())
        grace_s = _GRACE_OF_UNFREED_S if is_never_freed else _GRACE_S
        if self.diagnosis.error != GONE:
            grace_s = 0.1  # who went another way closes no connection
        if self._is_alone:  # maybe what is gone is the store, and nothing else, or goes on in time
            return self._stay.unchanged_s >= self._timeout_s + grace_s
        return min(time.monotonic() - self._diagnosed_s, self._stay.unchanged_s) >= grace_s

    def _end_stuck_process(self) -> None:
        assert self.diagnosis is not None
        sys.stdout.flush()
        text = f"{errors.__name__}.{self.diagnosis.error}: {self.diagnosis.text}"
        print(text, file=sys.stderr, flush=True)
        run_before_forced_exit(text)
        self._speak(STOPPED, self.diagnosis.text)
        os._exit(1)

    def _run(self) -> None:
        """Talk to the other ranks, in a thread."""
        try:
            while not self._is_over:
                self._wake.wait(_TICK_S)
                self._wake.clear()
                if dist.group.WORLD is not self.group:  # destroyed: this rank is done with the others
                    self.say_last_words(ENDED, "")
                self._tick()
        except RuntimeError:  # the store is gone
            if self._own_end is None:
                self._note_alone(patience_s=_ANSWER_S)
        finally:
            self._settled.set()

    def _tick(self) -> None:
        self._stay.look()
        if self._stay.since_s != self._patient_since_s:
            self._patience_s, self._patient_since_s = _PATIENCE_S, self._stay.since_s
        if self._own_end is not None:
            self._write_end(self._own_end)
            return
        self._answer()
        unchanged_s = self._stay.unchanged_s
        if self.diagnosis is not None:
            return
        if self._has_lost_peer or any(end.how == FAILED for end in self._ends):
            self._inquire()
        elif unchanged_s >= self._present_patience_s(unchanged_s) and self._board.may_ask(self._board.asked()):
            # A group that DeepSpeed made has a timeout of its own, half an hour, whatever the job's is.
            self._has_lost_peer = self._stay.place.waits and unchanged_s >= self._timeout_s
            self._patience_s = self._next_patience_s(unchanged_s)
            self._inquire()

    def _present_patience_s(self, unchanged_s: float) -> float:
        """Return the patience of now; less for the first question where a process of this host is gone."""
        is_first = unchanged_s >= _TICK_S and self._patience_s == _PATIENCE_S
        return _TICK_S if is_first and self._processes.dead() else self._patience_s

    def _next_patience_s(self, unchanged_s: float) -> float:
        """Doubled, but not beyond the moment at which the job's timeout is over."""
        doubled_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        return min(doubled_s, self._timeout_s) if unchanged_s < self._timeout_s else doubled_s

    def _answer(self) -> None:
        asked = self._board.asked()
        if asked > self._answered:
            self._answered = asked
            self._stay.look()
            place = self._stay.place
            history, stay_s = own_calls.history(), self._stay.unchanged_s
            collective, counts = own_collectives() if place.waits else (None, {})
            status = Status(
                asked=asked,
                place=place.text,
                waits=place.waits,
                in_script=place.in_script,
                unchanged_s=stay_s,
                history=history,
                collective=collective,
                counts=counts,
                may_compute=place.may_compute,
                posted=posted_by_group(),
                gathers=own_gathers.history(),
            )
            self._board.write_status(self.rank, status)
            self._ends = self._board.ends()
            settled = self._board.diagnosis()
            if settled is not None:
                self._note(Diagnosis(*settled))

    def _inquire(self) -> None:
        """Ask all ranks where they are, and settle on a diagnosis if their answers allow one.

        They answer one after another: a rank that seems to wait in vain may have been freed since it answered, together
        with those that answered later. So it is asked again.
        """
        diagnosis = self._ask_all()
        if diagnosis is not None and diagnosis.error == STEP:
            diagnosis = self._ask_all()
        if diagnosis is not None and self.diagnosis is None:
            self._note(Diagnosis(*self._board.settle(list(diagnosis))))
            self._board.ask()
        if self._has_lost_peer:
            self._settled.set()
            self._has_lost_peer = False

    def _ask_all(self) -> Diagnosis | None:
        """Conclusion from the answers to one question."""
        number = self._board.ask()
        deadline = time.monotonic() + _ANSWER_S
        while self.diagnosis is None and self._own_end is None:
            self._answer()
            is_late = time.monotonic() > deadline
            evidence = self._evidence(number, is_late)
            answered = {*evidence.statuses, *(end.rank for end in evidence.ends)}
            is_complete = is_late or len(answered.union(evidence.stopped)) >= self.size
            urgent = bool(evidence.dead or evidence.ends)
            diagnosis = diagnose(evidence) if is_complete or urgent else None
            if diagnosis is not None or is_complete:
                return diagnosis
            time.sleep(_POLL_S)
        return None

    def _note(self, diagnosis: Diagnosis | None) -> None:
        if self.diagnosis is None and diagnosis is not None:
            self.diagnosis, self._diagnosed_s = diagnosis, time.monotonic()
            self._settled.set()

    def _write_end(self, end: End) -> None:
        """Write the last words, and wait while the others read them: rank 0 may keep the store."""
        self._board.write_end(end)
        if end.how != ENDED or self.rank == 0:
            self._board.ask()
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline:
            self._ends = self._board.ends()
            over = {*self._processes.dead(), *self._processes.stopped(), *(other.rank for other in self._ends)}
            is_needed = self.rank == 0 and len(over) < self.size
            if not (is_needed or self._waits_for_rank_0):
                break
            time.sleep(_POLL_S)
        if self.rank == 0 and end.how != ENDED:
            time.sleep(3 * _POLL_S)  # for the others to read these words, too
        self._is_over = True

    def _evidence(self, number: int, is_late: bool) -> Evidence:
        read = {rank: self._board.status(rank) for rank in range(self.size)}
        statuses = {rank: status for rank, status in read.items() if status is not None and status.asked >= number}
        ends = self._ends = self._board.ends()
        ended = {end.rank for end in ends}
        return Evidence(
            statuses={rank: status for rank, status in statuses.items() if rank not in ended},
            ends=ends,
            dead=self._processes.dead(),
            stopped=self._processes.stopped(),
            silent=[rank for rank in range(self.size) if rank not in statuses] if is_late else [],
            has_lost_peer=self._has_lost_peer,
        )

    def _note_alone(self, patience_s: float) -> None:
        """Find out who is gone without the store; a process may take ``patience_s`` to end after its connections."""
        deadline = time.monotonic() + patience_s
        while (
            alone := diagnose_alone(self._ends, self._processes.dead(), self._processes.stopped())
        ) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        known = {end.rank for end in self._ends}
        was_killed = not self._processes.stopped() and not known.issuperset(self._processes.dead())
        if self.diagnosis is None:
            self._is_alone = not was_killed
        self._note(alone or STORE_GONE)


_current: Watch | None = None


def current_watch() -> Watch | None:
    """Return the watch of this process; None where none runs."""
    return _current


def start_watch(timeout_s: float, attempt: str = "") -> Watch:
    """Return the watch over the default process group; every rank starts it by its first call. See `Watch`, `Board`."""
    global _current
    if _current is None or _current.group is not dist.group.WORLD:
        _current = Watch(default_group(), timeout_s, attempt)
    return _current


def stop_watch() -> None:
    """End the watch of this process: the other ranks hear that this one has ended, and nothing is noted any more."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None
    stop_noting()


# What gloo and NCCL say when another rank is gone; no class of exception tells it from other failures.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL error|connection refused", re.I
)
_phase: ContextVar[str] = ContextVar("_phase", default="agreeing with the other ranks")


def current_phase() -> str:
    """Phase of this rank's work with the others: that of the innermost `waiting_for_peers`."""
    return _phase.get()


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is a backend's way to say that another rank is gone."""
    if not isinstance(error, RuntimeError) or isinstance(error, PeerError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST_PEER.search(str(error)))


def lost_peer_error(error: BaseException, phase: str) -> PeerError | StepError:
    """The error to raise where a backend reported ``error`` in ``phase``: which rank is gone, or went another way."""
    watch = current_watch()
    diagnosis = None if watch is None else watch.explain()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if diagnosis is None:
        return PeerError(
            f"another rank has closed its connections or stopped answering; which one is not known. Rank {rank} was "
            f"{phase}, and saw: {str(error).splitlines()[0]}"
        )
    kind = StepError if diagnosis.error == STEP else PeerError
    return kind(f"{diagnosis.text.rstrip('.')}. Rank {rank} was {phase}.")


@contextmanager
def waiting_for_peers(phase: str) -> Iterator[None]:
    """Raise an error that names the rank when a collective or a message inside fails because one is gone.

    Args:
        phase: what the ranks do together, to complete "rank 3 was ..."; the same on all ranks that meet inside.

    Raises:
        PeerError: a rank is gone, or has ended with an error of its own.
        StepError: a rank has ended or gone on without the others.
    """
    token = _phase.set(phase)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise lost_peer_error(error, phase) from error
    finally:
        _phase.reset(token)
