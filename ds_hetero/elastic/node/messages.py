"""Messages between the agents of a job and the keeper that serves their rendezvous, as types of their JSON objects.

agent -> keeper     {"do": "meet" | "attach", "agent", "info": AgentInfo, "last": LastWords, "round": RoundSeen}
{"do": "store", "store": [host, port], "number"}      where the store of a round is
{"do": "alive"}, {"do": "leave", "is_done"}
keeper -> agent     {"round": RoundBegun}          it begins
{"broken": reason}        end the workers and come to meet
{"closed": reason}        the job has ended
{"redirect": [host, port]}    meet at that keeper
{"store", "number"}, {"alive": true}
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
    """What an agent says of itself."""

    node: str
    address: str  # under which other nodes reach it
    keeper: Address | None  # of its node
    card: str | None  # what the driver calls its device
    terms: dict[str, object]  # equal on all agents: releases, the number of workers


class LastWords(TypedDict, total=False):
    """What ended the workers of an agent; without an error, they ended well or were killed."""

    error: str
    step: int  # the latest optimizer step, -1 before the first
    is_refusal: bool  # trying again would not help
    is_of_peer: bool  # the error is that other workers have ended
    has_stepped: bool  # a worker has done an optimizer step in the round


class _Membership(TypedDict):
    number: int  # 0 for an agent that has been in no round
    members: list[str]  # agents, in order of ranks


class RoundSeen(_Membership, total=False):
    """The latest round that an agent was in."""

    keepers: dict[str, Address]


class RoundBegun(RoundSeen, total=False):
    """A round that begins, as one member is told it."""

    infos: list[AgentInfo]  # of the members
    rank: int
