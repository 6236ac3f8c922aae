"""Messages between the agents of a job and the node server of their rendezvous, as types of their JSON objects.

Agent to node server:

    {"do": "meet", "agent", "info": AgentInfo, "last": LastWords, "round": RoundSeen}    wait for a round
    {"do": "attach", the same keys}                          the workers run; the former node server is lost
    {"do": "store", "store": [host, port], "number"}         address of the store of round ``number``
    {"do": "alive"}                                          heartbeat
    {"do": "leave", "is_done"}                               the agent ends

Node server to agent:

    {"round": RoundBegun}                                    a round begins
    {"store": [host, port], "number"}                        passed on from the agent of rank 0
    {"broken": reason}                                       end the workers and come to the rendezvous
    {"closed": reason}                                       the job has ended
    {"redirect": [host, port]}                               meet at that node server
    {"alive": true}                                          answer to a heartbeat
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from ds_hetero.elastic.node.wire import Message

Address = list[object]
"""Host and port, as JSON has them."""
Tell = Callable[[Message], None]
"""Sends an agent a message over its connection."""


class AgentInfo(TypedDict, total=False):
    """Description of an agent."""

    node: str
    address: str  # at which other nodes reach it
    node_server: Address | None  # of its node
    card: str | None  # the driver's name of its GPU
    terms: dict[str, object]  # have to be equal on all agents: releases, the number of workers


class LastWords(TypedDict, total=False):
    """Reason why the workers of an agent ended. Without ``error``, they finished or were killed."""

    error: str
    step: int  # number of the latest optimizer step, -1 before the first
    is_refusal: bool  # the error is about a setting, so a restart would end with it again
    is_of_peer: bool  # the error says that other workers have ended
    has_stepped: bool  # a worker has done an optimizer step in the round


class _Membership(TypedDict):
    """Number and members of a round."""

    number: int  # 0 for an agent that was in no round yet
    members: list[str]  # agents, in order of ranks


class RoundSeen(_Membership, total=False):
    """The latest round that an agent was in."""

    node_servers: dict[str, Address]  # by node, of this round and earlier ones


class RoundBegun(RoundSeen, total=False):
    """A round that begins, as it is sent to one member."""

    infos: list[AgentInfo]  # of the members
    rank: int
