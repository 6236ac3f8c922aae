"""Rendezvous state machine of a job: membership, rank order, restarts. It has no sockets and reads no clock.

A *round* is one world of ranks. Its members are agents; each has a connection to the server. Newcomers wait until the
round is broken, which rank 0 does when a save has been committed.

    phase      event                                              next phase   action
    FORMING    enough agents wait (`_may_begin`)                  RUNNING      assign ranks by node and name, tell them
    FORMING    an agent brings a later round (`_take_over`)       RUNNING      await the other members of that round
    RUNNING    a member's connection is lost                      FORMING      members end their workers and meet
    RUNNING    a member's workers have ended, so it waits here    FORMING      the same
    RUNNING    an awaited member does not attach in time          FORMING      the same
    RUNNING    the round has fewer agents than `demand` asks      FORMING      the same
    RUNNING    another node server has a later epoch              FORMING      the same, then `redirect` them to it
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

_MAX_NODE_SERVERS = 256  # whose addresses are remembered; chosen, more nodes than a job has


class Phase(enum.Enum):
    """Whether a round runs. A closed job stays in the phase in which it ended."""

    FORMING = enum.auto()
    RUNNING = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """Conditions under which a round may begin. The times are chosen, never measured.

    Args:
        needs_majority: a round also needs a majority of the previous round (`Rounds._quorum`), so that only one side
            of a cut network goes on.
        searches: a round may begin without lost members only after `Rounds.note_search`, which says that no other
            server has them.
    """

    min_agents: int = 1  # number of agents that every round needs
    agents_at_start: int | None = None  # for which the first round waits; None: as many as come within ``patience_s``
    needs_majority: bool = True
    searches: bool = False
    patience_s: float = 30.0  # how long the first round waits for more agents than ``min_agents``
    rejoin_s: float = 45.0  # how long a broken round waits for connected members that do not come to the rendezvous
    attach_s: float = 6.0  # how long a server that has taken over waits for members to connect
    wait_s: float = 600.0  # how long too few agents wait for more, before the job ends


@dataclass(kw_only=True)
class _Agent:
    """A connected agent."""

    tell: Tell
    info: AgentInfo
    waits_since_s: float | None  # time at which the agent came to the rendezvous; None while its workers run

    @property
    def is_waiting(self) -> bool:
        """Whether the agent waits for a round."""
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
        self._node_servers: dict[str, Address] = {}  # by node, of this round and earlier ones, oldest first
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
        """Number of the latest round, whether it runs, and its number of connected members.

        If two servers serve one job, the server with the smaller epoch sends its agents to the other server.
        """
        num_connected = sum(name in self._agents for name in self.members)
        return self.number, not self.is_broken, num_connected

    @property
    def absent_node_servers(self) -> dict[str, Address]:
        """Addresses of node servers, by node, of nodes in this or an earlier round that have no connected agent."""
        connected_nodes = {agent.info.get("node") for agent in self._agents.values()}
        return {node: address for node, address in self._node_servers.items() if node not in connected_nodes}

    @property
    def must_search(self) -> bool:
        """Whether no round may begin before `note_search`."""
        return not self._has_searched

    def note_search(self) -> None:
        """Record that no other server has the lost members."""
        self._has_searched = True

    # Messages of agents.

    def join(
        self, name: str, info: AgentInfo, last: LastWords, latest_round: RoundSeen, tell: Tell, now_s: float
    ) -> None:
        """Handle an agent that comes to the rendezvous.

        Args:
            name: of the agent, the same in all rounds.
            last: the reason why its workers ended.
            latest_round: the latest round that it was in.
        """
        if self.closed is not None:
            tell({"closed": self.closed})
            return
        refusal = self._refusal(name, info)
        if refusal is not None:
            tell({"closed": refusal})
            return
        self._take_over(latest_round, now_s)
        was_working = name in self.members and not self.is_broken
        self._awaited_since_s.pop(name, None)
        self._agents[name] = _Agent(tell=tell, info=info, waits_since_s=now_s)
        reason = self._restarts.note_end(last, int(latest_round["number"]))
        if reason is not None:
            self.close(reason)
            return
        if was_working:
            self.break_round(f"the workers of {info.get('node')} ended", now_s)
        self.tick(now_s)

    def attach(self, name: str, info: AgentInfo, latest_round: RoundSeen, tell: Tell, now_s: float) -> None:
        """Handle an agent whose workers run in ``latest_round``, and whose former server is lost."""
        self._take_over(latest_round, now_s)
        self._awaited_since_s.pop(name, None)
        self._agents[name] = _Agent(tell=tell, info=info, waits_since_s=None)
        if self.number > latest_round["number"] or self.is_broken:
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
        """Send all members a message that one of them has sent, such as the address of the round's store."""
        for name in self.members:
            if (agent := self._agents.get(name)) is not None:
                agent.tell(message)

    # Actions of the node server.

    def break_round(self, reason: str, now_s: float) -> None:
        """Tell all members to end their workers and come to the rendezvous."""
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

    def demand(self, min_agents: int, now_s: float) -> None:
        """Require ``min_agents`` agents in every round; break the present one if it has fewer."""
        self.rules = replace(self.rules, min_agents=min_agents)
        if not self.is_broken and len(self.members) < min_agents:
            self.break_round(f"{len(self.members)} agents are fewer than min_ranks {min_agents}", now_s)

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
            self.close(self._too_few_agents_text(waiting))

    # Formation of a round.

    def _waiting(self) -> list[str]:
        """Names of the agents that wait at the rendezvous."""
        return [name for name, agent in self._agents.items() if agent.is_waiting]

    def _working(self) -> list[str]:
        """Names of connected members that have not come to the rendezvous, so that their workers still run."""
        return [name for name in self.members if name in self._agents and not self._agents[name].is_waiting]

    def _take_over(self, latest_round: RoundSeen, now_s: float) -> None:
        """Continue a round of another server, if it is later than this server's."""
        if self.number >= latest_round["number"]:
            return
        self.number = latest_round["number"]
        self.members = list(latest_round["members"])
        self._phase = Phase.RUNNING
        self._awaited_since_s = {name: now_s for name in self.members if name not in self._agents}
        self._node_servers = {**self._node_servers, **latest_round.get("node_servers", {})}
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
        """Close connected members that have not come to the rendezvous within ``rejoin_s``."""
        if now_s - self._broken_s <= self.rules.rejoin_s:
            return
        for name in self._working():
            reason = f"it did not come to the rendezvous within {self.rules.rejoin_s:.0f} s"
            self._agents.pop(name).tell({"closed": reason})

    @property
    def _quorum(self) -> int:
        """Members of the previous round that a round needs.

        If a network is cut, at most one side may go on. After a round of 4, the server that began it needs 2 members
        and any other server 3, so of two halves with 2 each, the first goes on. After a round of 5 all servers need 3.
        """
        if not self.rules.needs_majority or not self.members:
            return 0
        size = len(self.members)
        half_rounded_up, more_than_half = (size + 1) // 2, size // 2 + 1
        return half_rounded_up if self._began_here else more_than_half

    def _may_begin(self, waiting: list[str], waited_s: float) -> bool:
        """Return True if enough agents wait for a round to begin. ``waited_s``: since the first of them came."""
        if len(waiting) < self.rules.min_agents or self._count_previous_members(waiting) < self._quorum:
            return False
        is_first = self.number == 0
        if not is_first or (self.rules.agents_at_start and len(waiting) >= self.rules.agents_at_start):
            return True
        return waited_s > self.rules.patience_s

    def _count_previous_members(self, waiting: list[str]) -> int:
        """Return how many members of the previous round wait."""
        return sum(name in waiting for name in self.members)

    def _too_few_agents_text(self, waiting: list[str]) -> str:
        """Return the reason why a job ends for which too few agents have waited."""
        return (
            f"for {self.rules.wait_s:.0f} s, only {len(waiting)} agents waited for a round, which needs "
            f"{max(self.rules.min_agents, self._quorum)} ({self._count_previous_members(waiting)} were among the "
            f"{len(self.members)} of the previous round). Their state stays in memory: start the same command again on "
            "enough nodes, or with a smaller --min-ranks."
        )

    def _begin(self, waiting: list[str]) -> None:
        """Begin a round with the waiting agents, unless the restart policy ends the job."""
        has_same_agents = self._began_here and set(waiting) == set(self.members)
        reason = self._restarts.note_begin(len(waiting), has_same_agents=has_same_agents)
        if reason is not None:
            self.close(reason)
            return
        self.number += 1
        self.members = sorted(waiting, key=lambda name: (str(self._agents[name].info.get("node")), name))
        self._phase = Phase.RUNNING
        self._began_here = True
        infos = [self._agents[name].info for name in self.members]
        self._remember_node_servers(infos)
        for rank, name in enumerate(self.members):
            begun = RoundBegun(
                number=self.number, members=self.members, infos=infos, node_servers=self._node_servers, rank=rank
            )
            self._agents[name].waits_since_s = None
            self._agents[name].tell({"round": begun})

    def _remember_node_servers(self, infos: list[AgentInfo]) -> None:
        """Append the node servers of a round to those of earlier rounds; forget the oldest ones over the maximum."""
        for info in infos:
            node, node_server = str(info.get("node")), info.get("node_server")
            self._node_servers.pop(node, None)
            if node_server:
                self._node_servers[node] = node_server
        self._node_servers = dict(list(self._node_servers.items())[-_MAX_NODE_SERVERS:])

    def _refusal(self, newcomer: str, info: AgentInfo) -> str | None:
        """Return why a newcomer cannot join: a term in which it differs from a connected agent; None if it can."""
        terms = info.get("terms", {})
        for name, agent in self._agents.items():
            if name == newcomer:
                continue
            agent_terms = agent.info.get("terms", {})
            for key in sorted({*agent_terms, *terms}):
                if agent_terms.get(key) != terms.get(key):
                    return (
                        f"{newcomer} cannot join: its {key} is {terms.get(key)!r}, but that of {name} is "
                        f"{agent_terms.get(key)!r}. Install or set the same on all nodes; the running job goes on "
                        f"without {newcomer}."
                    )
        return None
