"""Rendezvous of the agents of a job, as a state machine: membership, order of ranks, restarts. No sockets, no clock.

A *round* is one world: its members keep a connection each. Newcomers wait until it is broken, which rank 0 brings about
at a commit.

    phase      event                                              next phase   done
    FORMING    enough agents wait (`_may_begin`)                  RUNNING      ranks by node and name; members are told
    FORMING    an agent brings a later round (`_take_over`)       RUNNING      its other members are awaited
    RUNNING    a member's connection is gone                      FORMING      members are told, end their workers, come
    RUNNING    a member comes to meet: its workers have ended     FORMING      likewise
    RUNNING    an awaited member does not attach in time          FORMING      likewise
    RUNNING    it has fewer agents than are demanded              FORMING      likewise
    RUNNING    another keeper has a later epoch                   FORMING      likewise, and `redirect` sends them there
    either     a good end, a refusal, a failure that repeats,     closed       all agents are told why
               too few agents for too long

    agent      awaited      member of a round that another server began, and not here yet
               working      here, its workers run
               waiting      here, for a round to begin

A round is formed when nobody is awaited or still working, and it is known that no other server has the lost ones
(`must_search`). What is known lies with the members as well: another server can take over with what they bring
(`attach`). Two servers that do not know of each other, such as on both sides of a cut link, find together by their
`epoch` (`ds_hetero.elastic.node.split_brain`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from ds_hetero.elastic.node.messages import Address, AgentInfo, LastWords, RoundBegun, RoundSeen, Tell
from ds_hetero.elastic.node.restart_policy import RestartPolicy
from ds_hetero.elastic.node.wire import Message

_MAX_KEEPERS = 256  # remembered, those of the present round included


class Phase(enum.Enum):
    """Whether a round runs; a job that is closed keeps the phase in which it ended."""

    FORMING = enum.auto()
    RUNNING = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """When a round may begin.

    Args:
        majority: a round needs more than half of the round before as well, or half if this server began that one, so
            that the two halves of a network that is cut do not both go on.
        searches: whether the server says by `note_search` that lost members are at no other server, before a round
            begins without them.
    """

    least: int = 1  # agents that a round needs
    start: int | None = None  # agents that the first round waits for; None for as many as come within ``patience_s``
    majority: bool = True
    searches: bool = False
    patience_s: float = 30.0  # that the first round waits for more than the least
    rejoin_s: float = 45.0  # that a broken round waits for members who are connected and do not come
    attach_s: float = 6.0  # that a server which has taken over waits for members who have not come to it yet
    wait_s: float = 600.0  # that too few wait for more, before the job ends


@dataclass(kw_only=True)
class _Agent:
    """An agent that is connected."""

    tell: Tell
    info: AgentInfo
    waits_since_s: float | None  # for a round; None while its workers run

    @property
    def is_waiting(self) -> bool:
        return self.waits_since_s is not None


class Rounds:
    """The rounds of one job, and the agents that are connected.

    Args:
        rules: when a round may begin.
    """

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.number = 0  # of the latest round
        self.members: list[str] = []  # of the latest round, in order of ranks
        self.closed: str | None = None  # why the job has ended
        self._phase = Phase.FORMING
        self._broken_s = 0.0  # when the latest round was broken
        self._agents: dict[str, _Agent] = {}  # by name
        self._awaited_since_s: dict[str, float] = {}  # by name
        self._began_here = False  # the latest round; else it was taken over
        self._has_searched = True  # lost members are at no other server
        self._keepers: dict[str, Address] = {}  # by node of this round or an earlier one
        self._restarts = RestartPolicy()

    @property
    def is_broken(self) -> bool:
        """Whether no round runs."""
        return self._phase is Phase.FORMING

    @property
    def is_waited_for(self) -> bool:
        """Whether agents wait for a round."""
        return any(agent.is_waiting for agent in self._agents.values())

    @property
    def newcomers(self) -> list[str]:
        """Agents that wait while a round runs."""
        return [] if self.is_broken else self._waiting()

    @property
    def newcomer_cards(self) -> dict[str, list[str | None]]:
        """Cards of the agents that wait while a round runs, by node."""
        cards: dict[str, list[str | None]] = {}
        for name in self.newcomers:
            info = self._agents[name].info
            cards.setdefault(str(info.get("node")), []).append(info.get("card"))
        return cards

    @property
    def epoch(self) -> tuple[int, bool, int]:
        """Round, whether it runs, and members who are here: of two servers of a job, who has less sends all on."""
        return self.number, not self.is_broken, sum(name in self._agents for name in self.members)

    @property
    def absent_keepers(self) -> dict[str, Address]:
        """Addresses of the keepers of nodes that were in this round or an earlier one and are not here, by node."""
        here = {agent.info.get("node") for agent in self._agents.values()}
        return {node: address for node, address in self._keepers.items() if node not in here}

    @property
    def must_search(self) -> bool:
        """Whether a round waits until it is known that no other server has its lost members."""
        return not self._has_searched

    def note_search(self) -> None:
        """No other server has the lost members."""
        self._has_searched = True

    # What agents say.

    def join(self, name: str, info: AgentInfo, last: LastWords, seen: RoundSeen, tell: Tell, now_s: float) -> None:
        """An agent comes to meet.

        Args:
            name: of the agent, the same over all rounds.
            last: what ended its workers.
            seen: the round that it was in.
        """
        if self.closed is not None:
            tell({"closed": self.closed})
            return
        if (difference := self._difference(name, info)) is not None:
            tell({"closed": difference})
            return
        self._take_over(seen, now_s)
        was_working = name in self.members and not self.is_broken
        self._awaited_since_s.pop(name, None)
        self._agents[name] = _Agent(tell=tell, info=info, waits_since_s=now_s)
        reason = self._restarts.note_end(last, int(seen["number"]))
        if reason is not None:
            self.close(reason)
            return
        if was_working:
            self.break_round(f"the workers of {info.get('node')} ended", now_s)
        self.tick(now_s)

    def attach(self, name: str, info: AgentInfo, seen: RoundSeen, tell: Tell, now_s: float) -> None:
        """An agent whose workers run has lost its server and comes to this one, with the round that it is in."""
        self._take_over(seen, now_s)
        self._awaited_since_s.pop(name, None)
        self._agents[name] = _Agent(tell=tell, info=info, waits_since_s=None)
        if self.number > seen["number"] or self.is_broken:
            tell({"broken": "the round is over"})

    def drop(self, name: str, tell: Tell, now_s: float, *, is_done: bool = False) -> None:
        """The connection of an agent is gone, or it has said good-bye; one that has come back on another stays."""
        agent = self._agents.get(name)
        if agent is None or agent.tell is not tell:
            return
        del self._agents[name]
        is_member = name in self.members
        if is_member:
            self._has_searched = not self.rules.searches
        if is_done:
            # Workers of the others end by themselves: they are at the same end.
            self.closed = "the job has ended well"
            for other in self._waiting():
                self._agents[other].tell({"closed": self.closed})
        elif is_member and not self.is_broken:
            self.break_round(f"{name} is gone", now_s)
        self.tick(now_s)

    def pass_on(self, message: Message) -> None:
        """Tell all members something that one of them has said, such as where the store of the round is."""
        for name in self.members:
            if (agent := self._agents.get(name)) is not None:
                agent.tell(message)

    # What the keeper brings about.

    def break_round(self, reason: str, now_s: float) -> None:
        """Let all members end their workers and come to meet."""
        self._phase, self._broken_s = Phase.FORMING, now_s
        for name in self._working():
            self._agents[name].tell({"broken": reason})

    def break_for_redirect(self, reason: str, now_s: float) -> None:
        """Let all members end their workers, to go where `redirect` sends them."""
        self._has_searched = False
        self.break_round(reason, now_s)

    def redirect(self, address: Address) -> None:
        """Send all who wait to another server."""
        for name in self._waiting():
            self._agents.pop(name).tell({"redirect": address})

    def demand(self, least: int, now_s: float) -> None:
        """Let rounds of fewer than ``least`` agents wait for more, the one that runs too."""
        self.rules = replace(self.rules, least=least)
        if not self.is_broken and len(self.members) < least:
            self.break_round(f"{len(self.members)} agents are fewer than min_ranks {least}", now_s)

    def close(self, reason: str) -> None:
        """End the job with a reason."""
        self.closed = reason
        for agent in list(self._agents.values()):
            agent.tell({"closed": reason})

    def tick(self, now_s: float) -> None:
        """Begin a round if it is time; give up on those who do not come."""
        self._give_up_awaited(now_s)
        if self.closed is not None or not self.is_broken:
            return
        self._give_up_working(now_s)
        waiting = self._waiting()
        if not waiting or self._working() or self._awaited_since_s or self.must_search:
            return
        first_s = min(agent.waits_since_s for agent in self._agents.values() if agent.waits_since_s is not None)
        waited_s = now_s - first_s
        if self._may_begin(waiting, waited_s):
            self._begin(waiting)
        elif waited_s > self.rules.wait_s:
            self.close(self._too_few(waiting))

    # How a round is formed.

    def _waiting(self) -> list[str]:
        return [name for name, agent in self._agents.items() if agent.is_waiting]

    def _working(self) -> list[str]:
        """Members who are here and have not come to meet."""
        return [name for name in self.members if name in self._agents and not self._agents[name].is_waiting]

    def _take_over(self, seen: RoundSeen, now_s: float) -> None:
        """Go on with a round that this server has not begun."""
        if self.number >= seen["number"]:
            return
        self.number, self.members, self._phase = seen["number"], list(seen["members"]), Phase.RUNNING
        self._awaited_since_s = {name: now_s for name in self.members if name not in self._agents}
        self._keepers = {**self._keepers, **seen.get("keepers", {})}
        self._began_here, self._has_searched = False, not self.rules.searches

    def _give_up_awaited(self, now_s: float) -> None:
        late = [name for name, since_s in self._awaited_since_s.items() if now_s - since_s > self.rules.attach_s]
        for name in late:
            del self._awaited_since_s[name]
            if not self.is_broken:
                self.break_round(f"{name} has not come back", now_s)

    def _give_up_working(self, now_s: float) -> None:
        if now_s - self._broken_s <= self.rules.rejoin_s:
            return
        for name in self._working():
            self._agents.pop(name).tell({"closed": f"it did not come to meet within {self.rules.rejoin_s:.0f} s"})

    @property
    def _quorum(self) -> int:
        """How many of the round before a round needs.

        Of a round of 4, 2 are enough at the server that began it, and 3 at another one: of the halves of a network that
        is cut, one goes on. Of a round of 5 both need 3.
        """
        if not self.rules.majority or not self.members:
            return 0
        size = len(self.members)
        half_rounded_up, more_than_half = (size + 1) // 2, size // 2 + 1
        return half_rounded_up if self._began_here else more_than_half

    def _may_begin(self, waiting: list[str], waited_s: float) -> bool:
        of_round_before = sum(name in waiting for name in self.members)
        if len(waiting) < self.rules.least or of_round_before < self._quorum:
            return False
        is_first = self.number == 0
        if not is_first or (self.rules.start and len(waiting) >= self.rules.start):
            return True
        return waited_s > self.rules.patience_s

    def _too_few(self, waiting: list[str]) -> str:
        of_round_before = sum(name in waiting for name in self.members)
        return (
            f"{len(waiting)} of at least {max(self.rules.least, self._quorum)} agents were there for "
            f"{self.rules.wait_s:.0f} s ({of_round_before} of the {len(self.members)} of the round before). Their "
            "state stays in memory: start the same command again on enough nodes, or with a smaller --min-ranks."
        )

    def _begin(self, waiting: list[str]) -> None:
        of_same_agents = self._began_here and set(waiting) == set(self.members)
        reason = self._restarts.note_begin(len(waiting), of_same_agents=of_same_agents)
        if reason is not None:
            self.close(reason)
            return
        self.number += 1
        self.members = sorted(waiting, key=lambda name: (str(self._agents[name].info.get("node")), name))
        self._phase, self._began_here = Phase.RUNNING, True
        infos = [self._agents[name].info for name in self.members]
        self._remember_keepers(infos)
        for rank, name in enumerate(self.members):
            begun = RoundBegun(number=self.number, members=self.members, infos=infos, keepers=self._keepers, rank=rank)
            self._agents[name].waits_since_s = None
            self._agents[name].tell({"round": begun})

    def _remember_keepers(self, infos: list[AgentInfo]) -> None:
        """Put the keepers of a round behind those of earlier ones, and forget the oldest of too many."""
        for info in infos:
            node, keeper = str(info.get("node")), info.get("keeper")
            self._keepers.pop(node, None)
            if keeper:
                self._keepers[node] = keeper
        self._keepers = dict(list(self._keepers.items())[-_MAX_KEEPERS:])

    def _difference(self, newcomer: str, info: AgentInfo) -> str | None:
        """Why a newcomer does not fit those who are there."""
        terms = info.get("terms", {})
        for name, agent in self._agents.items():
            if name == newcomer:
                continue
            theirs = agent.info.get("terms", {})
            differing = sorted(key for key in {**theirs, **terms} if theirs.get(key) != terms.get(key))
            if differing:
                key = differing[0]
                return (
                    f"{newcomer} cannot join: its {key} is {terms.get(key)!r}, and that of {name} is "
                    f"{theirs.get(key)!r}. All agents need the same; the job that runs goes on without it."
                )
        return None
