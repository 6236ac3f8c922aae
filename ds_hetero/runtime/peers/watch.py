"""Watch the other ranks in two threads per process, and end a process that waits in vain.

    ds_hetero.peers   answers where this rank is, and asks where the others are when this rank waits long
    ds_hetero.guard   ends this process when it waits for a rank that will not come

The threads cost one small request to the store four times a second, and a look at the main thread's stack. Only the
first thread makes requests to the store. If the store does not answer, since its process is gone or stopped, the second
thread still knows how long this rank has waited.

The engine waits for other ranks inside `waiting_for_peers`, which names the phase and raises an error that names the
rank that is gone.
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
from ds_hetero.runtime.peers.board import ENDED, FAILED, STOPPED, Board, End, Status, default_group
from ds_hetero.runtime.peers.calls import own_calls, own_gathers
from ds_hetero.runtime.peers.diagnosis import GONE, STEP, STORE_GONE, Diagnosis, Evidence, diagnose, diagnose_alone
from ds_hetero.runtime.peers.forced_exit import run_before_forced_exit
from ds_hetero.runtime.peers.main_thread import Stay, collectives_of_main_thread
from ds_hetero.runtime.peers.posted_calls import posted_calls
from ds_hetero.runtime.peers.processes import Processes

_TICK_S = 0.25  # between two looks of a thread
_PATIENCE_S = 1.0  # time in one place after which this rank asks where the others are; doubled after every question
_MAX_PATIENCE_S = 60.0
_ANSWER_S = 1.2  # time in which the other ranks answer a question
_RANK_0_S = 0.9  # time in which rank 0 writes its last words, if it ends for the same reason as this rank
# Time in which the backend raises an error on a rank that waits in vain: `_RANK_0_S`, and the end of the other rank.
_GRACE_S = 1.25
_GRACE_UNNOTICED_S = 0.5  # the same if no connection is closed, so that the backend notices nothing
_POLL_S = 0.02  # between two looks of a loop that waits for one event
_LINGER_S = 2.0  # time in which the others read the last words of a rank; its process may be the one with the store
_STORE_ANSWER_S = 1.0  # time in which the store answers a request
_STORE_ANSWER_STOPPED_S = 0.1  # the same if a process of this host, which may keep the store, is stopped


class Watch:
    """The watch of this rank over the other ranks: two threads, and what they know.

    The first thread (`_run`) talks to the other ranks through the store; the second one (`_guard`) ends this process.

    Args:
        group: the default process group.
        timeout_s: time after which ranks that do not answer count as gone.
        attempt: see `Board`.

    Attributes:
        diagnosis: why the job cannot go on, once it is known.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, attempt: str = "") -> None:
        self.group, self._timeout_s = group, timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.diagnosis: Diagnosis | None = None
        posted_calls.start()
        self._board = Board(attempt)
        self._processes = Processes(self._board, self.rank, self.size)
        self._board.has_lost_rank_0 = self._processes.has_lost_rank_0
        self._answered = self._board.num_asked()  # number of the latest question that this rank has answered
        self._stay = Stay()
        self._patience_s, self._patient_since_s = _PATIENCE_S, self._stay.since_s
        self._diagnosed_at_s: float | None = None  # time on the monotonic clock
        # This rank has made the diagnosis without the store, and has seen no process that was killed.
        self._is_alone = False
        self._has_lost_peer = False  # the backend has reported that a rank is gone
        self._own_end: End | None = None
        self._settled = threading.Event()  # there is a diagnosis, or there will be none
        self._waits_for_rank_0 = False  # the main thread waits for the last words of rank 0
        self._ends: list[End] = []  # of all ranks, as far as they were read
        self._wake = threading.Event()  # the first thread has something to do
        self._is_over = False  # both threads end
        self._thread = threading.Thread(target=self._run, name="ds_hetero.peers", daemon=True)
        self._thread.start()
        self._guard_thread = threading.Thread(target=self._guard, name="ds_hetero.guard", daemon=True)
        self._guard_thread.start()
        atexit.register(self._announce_end, ENDED, "")

    def stop(self) -> None:
        """End the watch and both threads. Caller: every rank, when none waits."""
        atexit.unregister(self._announce_end)
        self._announce_end(ENDED, "")
        self._is_over = True
        self._guard_thread.join(4 * _TICK_S)

    def explain(self) -> Diagnosis | None:
        """Return why the job cannot go on, after the backend has reported a lost rank; None if no reason is found.

        Takes up to three times `_ANSWER_S`, in which the first thread asks the other ranks.
        """
        if self.diagnosis is None and self._thread.is_alive():
            self._settled.clear()
            self._has_lost_peer = True
            self._wake.set()
            deadline = time.monotonic() + 3 * _ANSWER_S  # time for two questions, and a reserve
            while not self._settled.wait(_POLL_S):
                if self._is_cut_off() or time.monotonic() > deadline:
                    self._diagnose_alone(patience_s=0.0)
        return self.diagnosis

    def say_last_words(self, how: str, text: str) -> None:
        """Let the first thread write how and why this rank ends (see `End`); later calls are ignored."""
        if self._own_end is None:
            self._own_end = End(self.rank, how, text, posted_calls.collective_counts() if how == ENDED else None)
        self._wake.set()

    def is_said_by_rank_0(self, text: str) -> bool:
        """Whether rank 0 ends with the same ``text``, so that this rank need not print it. False on rank 0.

        Waits up to `_RANK_0_S` for the last words of rank 0.
        """
        self._waits_for_rank_0 = self.rank > 0
        deadline = time.monotonic() + _RANK_0_S
        while self._waits_for_rank_0 and self._reaches_others() and time.monotonic() < deadline:
            if any(end.rank == 0 for end in self._ends):
                break
            time.sleep(_POLL_S)
        self._waits_for_rank_0 = False
        return any(end.rank == 0 != self.rank and end.text == text for end in self._ends)

    def _announce_end(self, how: str, text: str) -> None:
        """Write the last words of this rank, and wait until the other ranks have had time to read them."""
        self.say_last_words(how, text)
        deadline = time.monotonic() + _LINGER_S + 1.0
        while self._reaches_others() and time.monotonic() < deadline:
            self._thread.join(0.05)

    def _reaches_others(self) -> bool:
        """Whether this rank can still write to the other ranks, through the store."""
        return self._thread.is_alive() and not self._is_cut_off()

    def _is_cut_off(self) -> bool:
        """Whether the store does not answer: the process that keeps it may be stopped, or its host out of reach."""
        silent_s = self._board.silent_s
        if silent_s > _STORE_ANSWER_S:
            return True
        return silent_s > _STORE_ANSWER_STOPPED_S and bool(self._processes.stopped())

    def _guard(self) -> None:
        """Run the second thread: end this process if it waits in vain.

        It makes no request to the store, which may never be answered.
        """
        while not self._is_over and dist.group.WORLD is self.group:
            time.sleep(_TICK_S)
            self._stay.look()
            waits_in_vain = self._stay.place.waits and self._stay.unchanged_s >= self._timeout_s
            if self.diagnosis is None and waits_in_vain and self._is_cut_off():
                self._diagnose_alone(patience_s=0.0)
            if self._is_stuck():
                self._end_stuck_process()

    def _is_stuck(self) -> bool:
        """Whether this rank waits in vain: there is a diagnosis, and the backend has had time to raise an error."""
        if self.diagnosis is None or self._diagnosed_at_s is None:
            return False
        if self._own_end is not None or not self._stay.place.waits:
            return False
        place = self._stay.place
        is_unnoticed = place.in_store or place.may_compute or bool(self._processes.stopped())
        grace_s = _GRACE_UNNOTICED_S if is_unnoticed else _GRACE_S
        if self.diagnosis.error != GONE:
            grace_s = 0.1  # a rank that made other calls closes no connection
        if self._is_alone:  # perhaps only the store is gone, or a stopped process continues before the timeout
            return self._stay.unchanged_s >= self._timeout_s + grace_s
        return min(time.monotonic() - self._diagnosed_at_s, self._stay.unchanged_s) >= grace_s

    def _end_stuck_process(self) -> None:
        """Print the diagnosis, write it as the last words, and exit."""
        assert self.diagnosis is not None
        sys.stdout.flush()
        text = f"{errors.__name__}.{self.diagnosis.error}: {self.diagnosis.text}"
        print(text, file=sys.stderr, flush=True)
        run_before_forced_exit(text)
        self._announce_end(STOPPED, self.diagnosis.text)
        os._exit(1)

    def _run(self) -> None:
        """Run the first thread: answer and ask until the watch is over."""
        try:
            while not self._is_over:
                self._wake.wait(_TICK_S)
                self._wake.clear()
                if dist.group.WORLD is not self.group:  # the script has destroyed it: this rank has ended
                    self.say_last_words(ENDED, "")
                self._tick()
        except RuntimeError:  # the store is gone
            if self._own_end is None:
                self._diagnose_alone(patience_s=_ANSWER_S)
        finally:
            self._settled.set()

    def _tick(self) -> None:
        """Answer new questions; ask if this rank has waited long, or a rank has failed; write the last words."""
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
        if self._has_lost_peer or any(end.outcome == FAILED for end in self._ends):
            self._inquire()
        elif unchanged_s >= self._present_patience_s(unchanged_s) and self._board.may_ask(self._board.num_asked()):
            # A group that DeepSpeed made has a timeout of its own, half an hour, whatever the job's is.
            self._has_lost_peer = self._stay.place.waits and unchanged_s >= self._timeout_s
            self._patience_s = self._next_patience_s(unchanged_s)
            self._inquire()

    def _present_patience_s(self, unchanged_s: float) -> float:
        """Return the seconds in one place after which this rank asks.

        They are fewer for the first question if a process of this host is gone.
        """
        is_first = unchanged_s >= _TICK_S and self._patience_s == _PATIENCE_S
        return _TICK_S if is_first and self._processes.dead() else self._patience_s

    def _next_patience_s(self, unchanged_s: float) -> float:
        """Return twice the present patience, or less, so that a question is asked when the job's timeout is over.

        Example: after 32 s of a timeout of 40 s, the next question comes at 40 s and not at 64 s.
        """
        doubled_s = min(2 * self._patience_s, _MAX_PATIENCE_S)
        return min(doubled_s, self._timeout_s) if unchanged_s < self._timeout_s else doubled_s

    def _answer(self) -> None:
        """If there is a new question, write this rank's status, and read the ends and the diagnosis."""
        num_asked = self._board.num_asked()
        if num_asked > self._answered:
            self._answered = num_asked
            self._stay.look()
            place = self._stay.place
            history, stay_s = own_calls.history(), self._stay.unchanged_s
            collective, counts = collectives_of_main_thread() if place.waits else (None, {})
            status = Status(
                question_number=num_asked,
                place=place.text,
                waits=place.waits,
                in_script=place.in_script,
                unchanged_s=stay_s,
                history=history,
                collective=collective,
                counts=counts,
                may_compute=place.may_compute,
                posted=posted_calls.latest_collectives(),
                gathers=own_gathers.history(),
            )
            self._board.write_status(self.rank, status)
            self._ends = self._board.ends()
            settled = self._board.diagnosis()
            if settled is not None:
                self._adopt(Diagnosis(*settled))

    def _inquire(self) -> None:
        """Ask all ranks where they are, and write a diagnosis if one follows from the answers.

        The ranks answer one after another, so a rank that seems to wait in vain may have gone on since it answered,
        together with ranks that answered later. So a diagnosis of unlike calls needs a second question.
        """
        diagnosis = self._ask_all()
        if diagnosis is not None and diagnosis.error == STEP:
            diagnosis = self._ask_all()
        if diagnosis is not None and self.diagnosis is None:
            self._adopt(Diagnosis(*self._board.settle(list(diagnosis))))
            self._board.ask()
        if self._has_lost_peer:
            self._settled.set()
            self._has_lost_peer = False

    def _ask_all(self) -> Diagnosis | None:
        """Ask one question; return the diagnosis that follows from the answers, if any."""
        number = self._board.ask()
        deadline = time.monotonic() + _ANSWER_S
        while self.diagnosis is None and self._own_end is None:
            self._answer()
            is_late = time.monotonic() > deadline
            evidence = self._evidence(number, is_late)
            answered = {*evidence.statuses, *(end.rank for end in evidence.ends)}
            is_complete = is_late or len(answered.union(evidence.stopped)) >= self.size
            has_lost_rank = bool(evidence.dead or evidence.ends)  # need not wait for the other answers
            diagnosis = diagnose(evidence) if is_complete or has_lost_rank else None
            if diagnosis is not None or is_complete:
                return diagnosis
            time.sleep(_POLL_S)
        return None

    def _adopt(self, diagnosis: Diagnosis | None) -> None:
        """Take ``diagnosis`` as this rank's diagnosis, unless the rank has one already or ``diagnosis`` is None."""
        if self.diagnosis is None and diagnosis is not None:
            self.diagnosis, self._diagnosed_at_s = diagnosis, time.monotonic()
            self._settled.set()

    def _write_end(self, end: End) -> None:
        """Write the last words; on rank 0, whose process may have the store, wait while the others read them."""
        self._board.write_end(end)
        if end.outcome != ENDED or self.rank == 0:
            self._board.ask()
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline:
            self._ends = self._board.ends()
            ended = {other.rank for other in self._ends}
            without_need_of_store = ended.union(self._processes.dead(), self._processes.stopped())
            is_needed = self.rank == 0 and len(without_need_of_store) < self.size
            if not (is_needed or self._waits_for_rank_0):
                break
            time.sleep(_POLL_S)
        if self.rank == 0 and end.outcome != ENDED:
            time.sleep(3 * _POLL_S)  # for the others to read these words, too
        self._is_over = True

    def _evidence(self, number: int, is_late: bool) -> Evidence:
        """Return the answers to question ``number``, and what is known of the ranks' processes.

        Args:
            is_late: whether the time to answer is over, so that ranks without an answer count as silent.
        """
        statuses = {}
        for rank in range(self.size):
            status = self._board.status(rank)
            if status is not None and status.question_number >= number:
                statuses[rank] = status
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

    def _diagnose_alone(self, patience_s: float) -> None:
        """Make a diagnosis without the store, from the processes of this host.

        Args:
            patience_s: time to wait until a process of this host has ended; its connections may close before.
        """
        deadline = time.monotonic() + patience_s
        diagnosis = diagnose_alone(self._ends, self._processes.dead(), self._processes.stopped())
        while diagnosis is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            diagnosis = diagnose_alone(self._ends, self._processes.dead(), self._processes.stopped())
        ranks_with_end = {end.rank for end in self._ends}
        was_killed = not self._processes.stopped() and not ranks_with_end.issuperset(self._processes.dead())
        if self.diagnosis is None:
            self._is_alone = not was_killed
        self._adopt(diagnosis or STORE_GONE)


_current: Watch | None = None


def current_watch() -> Watch | None:
    """Return the watch of this process; None if it has none."""
    return _current


def start_watch(timeout_s: float, attempt: str = "") -> Watch:
    """Return the watch over the default process group; the first call starts it, with the arguments of `Watch`.

    Caller: every rank.
    """
    global _current
    if _current is None or _current.group is not dist.group.WORLD:
        _current = Watch(default_group(), timeout_s, attempt)
    return _current


def stop_watch() -> None:
    """End the watch of this process and the recording of posted calls. The other ranks see that this rank has ended."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None
    posted_calls.stop()


# Texts of gloo and NCCL for a rank that is gone; they have no class of exceptions for it.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL error|connection refused", re.I
)
_phase: ContextVar[str] = ContextVar("_phase", default="agreeing with the other ranks")


def current_phase() -> str:
    """Return the phase of the innermost `waiting_for_peers` on this rank."""
    return _phase.get()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a backend has raised ``error`` because another rank is gone."""
    if not isinstance(error, RuntimeError) or isinstance(error, PeerError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST_PEER.search(str(error)))


def lost_peer_error(error: BaseException, phase: str) -> PeerError | StepError:
    """Return the error to raise instead of a backend's ``error`` in ``phase`` (see `waiting_for_peers`).

    The text names the rank that is gone or made other calls, if a diagnosis is found.
    """
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
    """Raise an error that names the lost rank if a collective or message inside the context fails because of it.

    Args:
        phase: what the ranks do together, to complete "rank 3 was ..."; the same on all ranks that take part.

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
