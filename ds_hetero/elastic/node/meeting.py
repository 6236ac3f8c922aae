"""Meeting of the agents of a job: who is there, in which order, and when they have to meet anew. No sockets, no clock.

A *round* is one world: its members keep a connection each. It is broken when a member's connection is gone or a member
comes to meet again, because its workers have ended. All members are told, end their workers and come; the next round
begins as soon as all that are left are there. Newcomers wait for that moment, which rank 0 brings about at a commit.

What a meeting knows lies with the members as well: another server can take over with what they bring (`attach`). Two
servers that do not know of each other, such as on both sides of a cut link, find together by their `standing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_hetero.elastic.node.wire import Message

_MAX_KEEPERS = 256  # remembered, those of the present round included
_MOST_IN_VAIN = 10  # rounds of the same members in a row that end before a step


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingRules:
    """When a round may begin.

    Args:
        majority: a round needs more than half of the round before as well, or half if this server began that one, so
            that the two halves of a network that is cut do not both go on.
        looks: whether the server says by `looked` that lost members are not elsewhere, before a round begins without.
    """

    least: int = 1  # agents that a round needs
    start: int | None = None  # agents that the first round waits for; None for as many as come within ``patience_s``
    majority: bool = True
    looks: bool = False
    patience_s: float = 30.0  # that the first round waits for more than the least
    rejoin_s: float = 45.0  # that a broken round waits for members who are connected and do not come
    attach_s: float = 6.0  # that a server which has taken over waits for members who have not come to it yet
    wait_s: float = 600.0  # that too few wait for more, before the job ends


@dataclass(kw_only=True)
class _Member:
    """An agent that is connected."""

    tell: Callable[[Message], None]
    info: Message  # what it says of itself; equal ``terms`` are a condition
    joined_s: float | None  # since when it waits for a round; None while its workers run


class AgentMeeting:
    """The agents of one job.

    Args:
        rules: when a round may begin.
    """

    def __init__(self, rules: MeetingRules) -> None:
        self.rules = rules
        self.number = 0  # of the latest round
        self.members: list[str] = []  # of the latest round, in order of ranks
        self.closed: str | None = None
        self.is_broken = True
        self._here: dict[str, _Member] = {}
        self._awaited_s: dict[str, float] = {}  # members of a round that was taken over, until they attach
        self._broken_s = 0.0
        self._has_begun = False  # the latest round, and not taken it over
        self._has_looked = True
        self._keepers: dict[str, list[object]] = {}  # addresses, by node of this round or an earlier one
        self._num_in_vain = 0  # rounds of these members in a row, the latest one included, unless it has stepped
        self._has_stepped = False  # a worker of the latest round
        self._latest_error = ""
        self._failures: dict[str, tuple[int, int]] = {}  # round and step of the latest failure of each text

    def join(
        self, agent: str, info: Message, last: Message, round_: Message, tell: Callable[[Message], None], now_s: float
    ) -> None:
        """An agent comes to meet.

        Args:
            agent: its name, the same over all rounds.
            info: node, address, and ``terms`` that all have to share.
            last: what ended its workers: ``error``, ``step``, ``is_refusal``, ``is_of_peer`` where it was the end of
                others, ``has_stepped`` whether they have done a step in the round.
            round_: the round that it was in: ``number``, ``members``; number 0 for a newcomer.
        """
        if self.closed is not None:
            tell({"closed": self.closed})
            return
        if (difference := self._difference(agent, info)) is not None:
            tell({"closed": difference})
            return
        self._take_over(round_, now_s)
        was_running = agent in self.members and not self.is_broken
        self._awaited_s.pop(agent, None)
        self._here[agent] = _Member(tell=tell, info=info, joined_s=now_s)
        self._has_stepped |= bool(last.get("has_stepped"))
        self._latest_error = last.get("error", self._latest_error)
        if not self._may_go_on(last, int(round_["number"])):
            return
        if was_running:
            self.break_round(f"the workers of {info.get('node')} ended", now_s)
        self.tick(now_s)

    def attach(self, agent: str, info: Message, round_: Message, tell: Callable[[Message], None], now_s: float) -> None:
        """An agent whose workers run has lost its server and comes to this one, with the round that it is in."""
        self._take_over(round_, now_s)
        self._awaited_s.pop(agent, None)
        self._here[agent] = _Member(tell=tell, info=info, joined_s=None)
        if self.number > round_["number"] or self.is_broken:
            tell({"broken": "the round is over"})

    def _take_over(self, round_: Message, now_s: float) -> None:
        """Go on with a round that this server has not begun."""
        if self.number < round_["number"]:
            self.number, self.members, self.is_broken = round_["number"], list(round_["members"]), False
            self._awaited_s = {name: now_s for name in self.members if name not in self._here}
            self._keepers = {**self._keepers, **round_.get("keepers", {})}
            self._has_begun, self._has_looked = False, not self.rules.looks

    def drop(self, agent: str, tell: Callable[[Message], None], now_s: float, *, is_done: bool = False) -> None:
        """The connection of an agent is gone, or it has said good-bye; one that has come back on another stays."""
        member = self._here.get(agent)
        if member is None or member.tell is not tell:
            return
        del self._here[agent]
        if agent in self.members:
            self._has_looked = not self.rules.looks
        if is_done:
            self.closed = "the job has ended well"
            for other in list(self._here.values()):
                if other.joined_s is not None:
                    other.tell({"closed": self.closed})
        elif agent in self.members and not self.is_broken:
            self.break_round(f"{agent} is gone", now_s)
        self.tick(now_s)

    def break_round(self, reason: str, now_s: float) -> None:
        """Let all members end their workers and come to meet."""
        self.is_broken, self._broken_s = True, now_s
        for agent in self.members:
            member = self._here.get(agent)
            if member is not None and member.joined_s is None:
                member.tell({"broken": reason})

    def leave_for(self, reason: str, now_s: float) -> None:
        """Let all members end their workers, to go where `redirect` sends them."""
        self._has_looked = False
        self.break_round(reason, now_s)

    def demand(self, least: int, now_s: float) -> None:
        """Let rounds of fewer than ``least`` agents wait for more, the one that runs too."""
        self.rules = replace(self.rules, least=least)
        if not self.is_broken and len(self.members) < least:
            self.break_round(f"{len(self.members)} agents are fewer than min_ranks {least}", now_s)

    def close(self, reason: str) -> None:
        """End the job with a reason."""
        self.closed = reason
        for member in list(self._here.values()):
            member.tell({"closed": reason})

    @property
    def is_waited_for(self) -> bool:
        """Whether agents wait for a round."""
        return any(one.joined_s is not None for one in self._here.values())

    def redirect(self, address: list[object]) -> None:
        """Send all who wait to another server."""
        for name, one in list(self._here.items()):
            if one.joined_s is not None:
                self._here.pop(name).tell({"redirect": address})

    @property
    def standing(self) -> tuple[int, bool, int]:
        """Round, whether it runs, and members who are here: of two servers of a job, who has less sends all on."""
        return self.number, not self.is_broken, sum(name in self._here for name in self.members)

    @property
    def keepers_elsewhere(self) -> dict[str, list[object]]:
        """Addresses of the keepers of nodes that were in this round or an earlier one and are not here, by node."""
        here = {one.info.get("node") for one in self._here.values()}
        return {node: address for node, address in self._keepers.items() if node not in here}

    @property
    def must_look(self) -> bool:
        """Whether a round waits until it is known that nobody meets elsewhere."""
        return not self._has_looked

    def looked(self) -> None:
        """Nobody who is missing meets elsewhere."""
        self._has_looked = True

    @property
    def newcomers(self) -> list[str]:
        """Agents that wait while a round runs."""
        return [] if self.is_broken else [name for name, one in self._here.items() if one.joined_s is not None]

    @property
    def newcomer_cards(self) -> dict[str, list[str | None]]:
        """Cards of the agents that wait while a round runs, by node."""
        cards: dict[str, list[str | None]] = {}
        for name in self.newcomers:
            info = self._here[name].info
            cards.setdefault(str(info.get("node")), []).append(info.get("card"))
        return cards

    def tick(self, now_s: float) -> None:
        """Begin a round if it is time; give up on those who do not come."""
        for agent, since_s in list(self._awaited_s.items()):
            if now_s - since_s > self.rules.attach_s:
                del self._awaited_s[agent]
                if not self.is_broken:
                    self.break_round(f"{agent} has not come back", now_s)
        if self.closed is not None or not self.is_broken:
            return
        running = [name for name in self.members if (one := self._here.get(name)) and one.joined_s is None]
        if running and now_s - self._broken_s > self.rules.rejoin_s:
            for name in running:
                self._here.pop(name).tell({"closed": f"it did not come to meet within {self.rules.rejoin_s:.0f} s"})
            running = []
        waiting = [name for name, one in self._here.items() if one.joined_s is not None]
        if running or not waiting or self._awaited_s or not self._has_looked:
            return
        first_s = min(one.joined_s for one in self._here.values() if one.joined_s is not None)
        if self._may_begin(waiting, now_s - first_s):
            self._begin(waiting)
        elif now_s - first_s > self.rules.wait_s:
            left = sum(name in waiting for name in self.members)
            self.close(
                f"{len(waiting)} of at least {max(self.rules.least, self._quorum)} agents were there for "
                f"{self.rules.wait_s:.0f} s ({left} of the {len(self.members)} of the round before). Their state stays "
                "in memory: start the same command again on enough nodes, or with a smaller --min-ranks."
            )

    @property
    def _quorum(self) -> int:
        """How many of the round before a round needs."""
        if not self.rules.majority or not self.members:
            return 0
        return (len(self.members) + 1) // 2 if self._has_begun else len(self.members) // 2 + 1

    def _may_begin(self, waiting: list[str], waited_s: float) -> bool:
        if len(waiting) < self.rules.least or sum(name in waiting for name in self.members) < self._quorum:
            return False
        if self.number or len(waiting) >= (self.rules.start or 10**9):
            return True
        return waited_s > self.rules.patience_s

    def _begin(self, waiting: list[str]) -> None:
        is_again = self._has_begun and set(waiting) == set(self.members) and not self._has_stepped
        self._num_in_vain = self._num_in_vain + 1 if is_again else 0
        if self._num_in_vain == _MOST_IN_VAIN:
            self.close(
                f"{_MOST_IN_VAIN} rounds of the same {len(waiting)} agents ended before a step; the latest error was: "
                f"{self._latest_error or 'none, the workers were killed'}. Their state stays in memory: start the same "
                "command again when the cause is gone."
            )
            return
        self.number += 1
        self._has_begun, self._has_stepped = True, False
        self.members = sorted(waiting, key=lambda name: (str(self._here[name].info.get("node")), name))
        self.is_broken = False
        infos = [self._here[m].info for m in self.members]
        for info in infos:
            self._keepers.pop(str(info.get("node")), None)
            if info.get("keeper"):
                self._keepers[str(info.get("node"))] = info["keeper"]
        self._keepers = dict(list(self._keepers.items())[-_MAX_KEEPERS:])
        listed = {"number": self.number, "members": self.members, "infos": infos, "keepers": self._keepers}
        for rank, name in enumerate(self.members):
            self._here[name].joined_s = None
            self._here[name].tell({"round": {**listed, "rank": rank}})

    def pass_on(self, message: Message) -> None:
        """Tell all members something that one of them has said, such as where the store of the round is."""
        for name in self.members:
            if (member := self._here.get(name)) is not None:
                member.tell(message)

    def _difference(self, agent: str, info: Message) -> str | None:
        """Why a newcomer does not fit those who are there."""
        for name, member in self._here.items():
            theirs, own = member.info.get("terms", {}), info.get("terms", {})
            if name != agent and (differing := [key for key in {**theirs, **own} if theirs.get(key) != own.get(key)]):
                key = sorted(differing)[0]
                return (
                    f"{agent} cannot join: its {key} is {own.get(key)!r}, and that of {name} is {theirs.get(key)!r}. "
                    "All agents need the same; the job that runs goes on without it."
                )
        return None

    def _may_go_on(self, last: Message, number: int) -> bool:
        """End the job where workers refuse, or fail in the same way without a step in between."""
        error, step = last.get("error"), int(last.get("step", -1))
        if not error or last.get("is_of_peer"):
            return True
        before, step_before = self._failures.get(error, (number, -1))
        if last.get("is_refusal"):
            self.close(error)
            return False
        if before < number and step <= step_before:
            self.close(f"the same error ended the workers twice at step {max(step, 0)}: {error}")
            return False
        self._failures[error] = number, step
        return True
