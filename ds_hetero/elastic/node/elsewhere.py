"""Keepers of one job that serve meetings without one another find together.

It happens when a link is cut, a stopped machine goes on, or a node comes back by the command that once began the job.
Each asks the keepers of nodes that are missing. Who has the lower `AgentMeeting.standing` sends its agents to the
other; no step is lost by it that was committed, as both sides trained on the same batches.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from ds_hetero.elastic.node.meeting import AgentMeeting
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.node.wire import Message

_PROBE_TIMEOUT_S = 1.0
_PROBE_PERIOD_S = 0.1
_LOOKS_APART = 10  # while nothing is waited for, and five times as many while a round runs
_MOST_AT_ONCE = 32

Ask = Callable[[tuple[str, int], Message, float], Message]
_Standing = tuple[int, bool, int, str]


class Elsewhere:
    """Looks for other meetings of the job.

    Args:
        lock: of the meeting.
        ask: asks a keeper, with a timeout in seconds.
    """

    def __init__(self, place: NodePlace, meeting: AgentMeeting, lock: AbstractContextManager[object], ask: Ask) -> None:
        self._place, self._meeting, self._lock, self._ask = place, meeting, lock, ask

    def run(self, has_ended: threading.Event) -> None:
        """Look for as long as the keeper lives: at once where a round has to wait for it."""
        count = 0
        while not has_ended.wait(_PROBE_PERIOD_S):
            count += 1
            with self._lock:
                is_urgent, runs = self._meeting.must_look, not self._meeting.is_broken
            if is_urgent or count % (_LOOKS_APART * (5 if runs else 1)) == 0:
                self.look()

    def look(self) -> None:
        """Ask once, and act on the answers."""
        with self._lock:
            addresses = self._addresses()
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(addresses)) or 1) as pool:
            answers = list(pool.map(self._status_of, addresses))
        with self._lock:
            own = self._own_standing()
            known = [(standing_of(answer), at) for answer, at in zip(answers, addresses, strict=True) if answer]
            best = max(known, default=None)
            if best is not None and best[0] > own:
                self._send_on(best[1])
                return
            self._meeting.looked()
        if own[1]:  # a round runs here
            for answer, at in zip(answers, addresses, strict=True):
                if answer and answer["is_waited_for"] and not answer["round"]:
                    with contextlib.suppress(OSError):
                        self._ask(at, {"do": "come", "to": self._place.address()}, _PROBE_TIMEOUT_S)

    def _addresses(self) -> list[tuple[str, int]]:
        """Keepers that may serve another meeting."""
        meeting, found = self._meeting, []
        if meeting.number:
            found = [(str(host), int(str(port))) for host, port in meeting.keepers_elsewhere.values()]
        elif meeting.is_waited_for:  # newcomers have come to a keeper whose own agents meet elsewhere
            of_agents = [self._place.read(path.name) for path in self._place.folder.glob("meeting-*.json")]
            found = [(at["host"], at["port"]) for at in of_agents if at is not None]
        return [at for at in dict.fromkeys(found) if at != self._place.address()]

    def _status_of(self, at: tuple[str, int]) -> Message | None:
        try:
            answer = self._ask(at, {"do": "status"}, _PROBE_TIMEOUT_S)
        except OSError:
            return None
        return None if answer["closed"] or not answer["keeper"] else answer

    def _own_standing(self) -> _Standing:
        return (*self._meeting.standing, str(self._place.address()))

    def _send_on(self, at: tuple[str, int]) -> None:
        if not self._meeting.is_broken:
            self._meeting.leave_for(f"the job goes on at {at[0]}:{at[1]}", time.monotonic())
        self._meeting.redirect(list(at))


def standing_of(answer: Message) -> _Standing:
    """The standing of a meeting, by its keeper's answer."""
    return (answer["round"], not answer["is_broken"], answer["num_here"], str(tuple(answer["keeper"])))
