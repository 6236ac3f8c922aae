"""Rendezvous state machine of a job: membership, rank order, restarts. It has no sockets and reads no clock.

A *round* is one world of ranks. Each member (an agent) has a connection to the server. Newcomers wait until the round
is broken, which rank 0 does at a commit.

    phase      event                                              next phase   action
    FORMING    enough agents wait (`_may_begin`)                  RUNNING      assign ranks by node and name, tell them
    FORMING    an agent brings a later round (`_take_over`)       RUNNING      await the other members of that round
    RUNNING    a member's connection is lost                      FORMING      members end their workers and come
    RUNNING    a member comes to meet: its workers have ended     FORMING      the same
    RUNNING    an awaited member does not attach in time          FORMING      the same
    RUNNING    the round has fewer agents than `demand` asks      FORMING      the same
    RUNNING    another keeper has a later epoch                   FORMING      the same, then `redirect` them to it
    either     a good end, a refusal, a repeated failure, or      closed       tell all agents the reason
               too few agents for too long

    state of an agent    awaited    member of a round that another server began; not connected to this one yet
                         working    connected; its workers run
                         waiting    connected; waits for a round to begin

A new round begins when no agent is awaited or working, and no other server has the lost members (`must_search`).

Members know the state of their round, too, so another server can take over with the state that they bring (`attach`).
Two servers that do not know of each other, such as on both sides of a cut link, compare their `epoch`
(`ds_hetero.elastic.node.split_brain`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from ds_hetero.elastic.node.messages import Address, AgentInfo, LastWords, RoundBegun, RoundSeen, Tell
from ds_hetero.elastic.node.restart_policy import RestartPolicy
from ds_hetero.elastic.node.wire import Message

_MAX_KEEPERS = 256  # whose addresses are remembered; chosen, more nodes than a job has


class Phase(enum.Enum):
    """Whether a round runs. A closed job stays in the phase in which it ended."""

    FORMING = enum.auto()
    RUNNING = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """Conditions under which a round may begin. The times are chosen, never measured.

    Args:
        majority: a round also needs a majority of the previous round (`Rounds._quorum`), so that only one side of a
            cut network goes on.
        searches: a round may begin without lost members only after `Rounds.note_search`, which says that no other
            server has them.
    """

    least: int = 1  # agents that every round needs
    start: int | None = None  # agents that the first round waits for; None: as many as come within ``patience_s``
    majority: bool = True
    searches: bool = False
    patience_s: float = 30.0  # how long the first round waits for more agents than ``least``
    rejoin_s: float = 45.0  # how long a broken round waits for connected members that do not come to meet
    attach_s: float = 6.0  # how long a server that has taken over waits for members to connect
    wait_s: float = 600.0  # how long too few agents wait for more, before the job ends


@dataclass(kw_only=True)
class _Agent:
    """A connected agent."""

    tell: Tell
    info: AgentInfo
    waits_since_s: float | None  # time at which it came to meet; None while its workers run

    @property
    def is_waiting(self) -> bool:
        return self.waits_since_s is not None


class Rounds:
    """The rounds of one job, and the agents that are connected to this server.

    Args:
        rules: conditions under which a round may begin.
    """

    def __init__(self, rules: RoundRules) -> None:
        self.rules = rules
        self.number = 0  # of the latest round
        self.members: list[str] = []  # of the latest round, in order of ranks
        self.closed: str | None = None  # why the job has ended
        self._phase = Phase.FORMING
        self._broken_s = 0.0  # time at which the latest round was broken
        self._agents: dict[str, _Agent] = {}  # connected ones, by name
        self._awaited_since_s: dict[str, float] = {}  # awaited ones, by name
        self._began_here = False  # whether this server began the latest round; else it took it over
        self._has_searched = True  # whether no other server has the lost members
        self._keepers: dict[str, Address] = {}  # by node, of this round and earlier ones, oldest first
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
        """Round number, whether it runs, and number of connected members.

        Of two servers of a job, the one with the smaller epoch sends its agents to the other.
        """
        num_connected = sum(name in self._agents for name in self.members)
        return self.number, not self.is_broken, num_connected

    @property
    def absent_keepers(self) -> dict[str, Address]:
        """Addresses of keepers, by node, of nodes in this or an earlier round that have no connected agent."""
        connected_nodes = {agent.info.get("node") for agent in self._agents.values()}
        return {node: address for node, address in self._keepers.items() if node not in connected_nodes}

    @property
    def must_search(self) -> bool:
        """Whether no round may begin before `note_search`."""
        return not self._has_searched

    def note_search(self) -> None:
        """Record that no other server has the lost members."""
        self._has_searched = True

    # Messages of agents.

    def join(self, name: str, info: AgentInfo, last: LastWords, seen: RoundSeen, tell: Tell, now_s: float) -> None:
        """Handle an agent that comes to meet.

        Args:
            name: of the agent, the same in all rounds.
            last: the reason why its workers ended.
            seen: the latest round that it was in.
        """
        if self.closed is not None:
            tell({"closed": self.closed})
            return
        difference = self._difference(name, info)
        if difference is not None:
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
        """Handle an agent whose workers run, and whose former server is lost. ``seen``: the round that it is in."""
        self._take_over(seen, now_s)
        self._awaited_since_s.pop(name, None)
        self._agents[name] = _Agent(tell=tell, info=info, waits_since_s=None)
        if self.number > seen["number"] or self.is_broken:
            tell({"broken": "the round is over"})

    def drop(self, name: str, tell: Tell, now_s: float, *, is_done: bool = False) -> None:
        """Remove an agent whose connection is lost, or that has left.

        Args:
            tell: of the lost connection; an agent that has connected again since then stays.
            is_done: the agent's script has finished.
        """
        agent = self._agents.get(name)
        if agent is None or agent.tell is not tell:
            return
        del self._agents[name]
        is_member = name in self.members
        if is_member:
            self._has_searched = not self.rules.searches
        if is_done:
            # The workers of the other members are at the end of the script, too, and end by themselves.
            self.closed = "the job has ended well"
            for other in self._waiting():
                self._agents[other].tell({"closed": self.closed})
        elif is_member and not self.is_broken:
            self.break_round(f"{name} is gone", now_s)
        self.tick(now_s)

    def pass_on(self, message: Message) -> None:
        """Send all members a message of one of them, such as the address of the round's store."""
        for name in self.members:
            if (agent := self._agents.get(name)) is not None:
                agent.tell(message)

    # Actions of the keeper.

    def break_round(self, reason: str, now_s: float) -> None:
        """Tell all members to end their workers and come to meet."""
        self._phase = Phase.FORMING
        self._broken_s = now_s
        for name in self._working():
            self._agents[name].tell({"broken": reason})

    def break_for_redirect(self, reason: str, now_s: float) -> None:
        """Break the round before a `redirect`. Until then no round may begin here."""
        self._has_searched = False
        self.break_round(reason, now_s)

    def redirect(self, address: Address) -> None:
        """Send all waiting agents to another server."""
        for name in self._waiting():
            self._agents.pop(name).tell({"redirect": address})

    def demand(self, least: int, now_s: float) -> None:
        """Require ``least`` agents in every round; break the present one if it has fewer."""
        self.rules = replace(self.rules, least=least)
        if not self.is_broken and len(self.members) < least:
            self.break_round(f"{len(self.members)} agents are fewer than min_ranks {least}", now_s)

    def close(self, reason: str) -> None:
        """End the job, and tell all agents the reason."""
        self.closed = reason
        for agent in list(self._agents.values()):
            agent.tell({"closed": reason})

    def tick(self, now_s: float) -> None:
        """Begin a round if all conditions hold; stop waiting for agents whose time is over."""
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

    # Formation of a round.

    def _waiting(self) -> list[str]:
        """Agents that have come to meet."""
        return [name for name, agent in self._agents.items() if agent.is_waiting]

    def _working(self) -> list[str]:
        """Connected members that have not come to meet."""
        return [name for name in self.members if name in self._agents and not self._agents[name].is_waiting]

    def _take_over(self, seen: RoundSeen, now_s: float) -> None:
        """Continue a round of another server, if it is later than this server's."""
        if self.number >= seen["number"]:
            return
        self.number = seen["number"]
        self.members = list(seen["members"])
        self._phase = Phase.RUNNING
        self._awaited_since_s = {name: now_s for name in self.members if name not in self._agents}
        self._keepers = {**self._keepers, **seen.get("keepers", {})}
        self._began_here = False
        self._has_searched = not self.rules.searches

    def _give_up_awaited(self, now_s: float) -> None:
        """Break the round if a member has not attached within ``attach_s``."""
        late = [name for name, since_s in self._awaited_since_s.items() if now_s - since_s > self.rules.attach_s]
        for name in late:
            del self._awaited_since_s[name]
            if not self.is_broken:
                self.break_round(f"{name} has not come back", now_s)

    def _give_up_working(self, now_s: float) -> None:
        """Close connected members that have not come to meet within ``rejoin_s``."""
        if now_s - self._broken_s <= self.rules.rejoin_s:
            return
        for name in self._working():
            self._agents.pop(name).tell({"closed": f"it did not come to meet within {self.rules.rejoin_s:.0f} s"})

    @property
    def _quorum(self) -> int:
        """Members of the previous round that a round needs.

        If a network is cut, at most one side may go on. After a round of 4, the server that began it needs 2 members
        and any other server 3, so of two halves with 2 each, the first goes on. After a round of 5 all servers need 3.
        """
        if not self.rules.majority or not self.members:
            return 0
        size = len(self.members)
        half_rounded_up, more_than_half = (size + 1) // 2, size // 2 + 1
        return half_rounded_up if self._began_here else more_than_half

    def _may_begin(self, waiting: list[str], waited_s: float) -> bool:
        """Return True if the waiting agents are enough. ``waited_s``: how long the first of them has waited."""
        if len(waiting) < self.rules.least or self._num_of_previous_round(waiting) < self._quorum:
            return False
        is_first = self.number == 0
        if not is_first or (self.rules.start and len(waiting) >= self.rules.start):
            return True
        return waited_s > self.rules.patience_s

    def _num_of_previous_round(self, waiting: list[str]) -> int:
        return sum(name in waiting for name in self.members)

    def _too_few(self, waiting: list[str]) -> str:
        return (
            f"for {self.rules.wait_s:.0f} s, only {len(waiting)} agents waited for a round, which needs "
            f"{max(self.rules.least, self._quorum)} ({self._num_of_previous_round(waiting)} were among the "
            f"{len(self.members)} of the previous round). Their state stays in memory: start the same command again on "
            "enough nodes, or with a smaller --min-ranks."
        )

    def _begin(self, waiting: list[str]) -> None:
        """Begin a round with the waiting agents, unless the restart policy ends the job."""
        of_same_agents = self._began_here and set(waiting) == set(self.members)
        reason = self._restarts.note_begin(len(waiting), of_same_agents=of_same_agents)
        if reason is not None:
            self.close(reason)
            return
        self.number += 1
        self.members = sorted(waiting, key=lambda name: (str(self._agents[name].info.get("node")), name))
        self._phase = Phase.RUNNING
        self._began_here = True
        infos = [self._agents[name].info for name in self.members]
        self._remember_keepers(infos)
        for rank, name in enumerate(self.members):
            begun = RoundBegun(number=self.number, members=self.members, infos=infos, keepers=self._keepers, rank=rank)
            self._agents[name].waits_since_s = None
            self._agents[name].tell({"round": begun})

    def _remember_keepers(self, infos: list[AgentInfo]) -> None:
        """Append the keepers of a round to those of earlier rounds, and drop the oldest beyond `_MAX_KEEPERS`."""
        for info in infos:
            node, keeper = str(info.get("node")), info.get("keeper")
            self._keepers.pop(node, None)
            if keeper:
                self._keepers[node] = keeper
        self._keepers = dict(list(self._keepers.items())[-_MAX_KEEPERS:])

    def _difference(self, newcomer: str, info: AgentInfo) -> str | None:
        """Return the first term in which a newcomer differs from a connected agent, as a message; None if equal."""
        terms = info.get("terms", {})
        for name, agent in self._agents.items():
            if name == newcomer:
                continue
            agent_terms = agent.info.get("terms", {})
            for key in sorted({*agent_terms, *terms}):
                if agent_terms.get(key) != terms.get(key):
                    return (
                        f"{newcomer} cannot join: its {key} is {terms.get(key)!r}, but that of {name} is "
                        f"{agent_terms.get(key)!r}. All agents need the same; the running job goes on without "
                        f"{newcomer}."
                    )
        return None
