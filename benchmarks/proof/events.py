"""Calls and waits of a rank, in order: recorded from torch.distributed, or computed from tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """A send or a receive.

    Args:
        sends: whether this rank sends.
        peer: rank in the group.
        num_bytes: size of the tensor.
        dtype: of the tensor, by name.
        tag: of the code, which NCCL ignores.
    """

    sends: bool
    peer: int
    num_bytes: int
    dtype: str
    tag: int = 0

    def __str__(self) -> str:
        direction = "send to" if self.sends else "receive from"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{direction} {self.peer} of {self.num_bytes} bytes of {self.dtype}{tag}"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, a message, or a group of messages that are posted together.

    Args:
        work: number of the call on this rank, by which `Wait` names it.
        communicator: process group; messages that are posted alone have one for each pair of ranks.
        rank: this rank's rank in the group.
        size: ranks in the group.
        name: of the collective; empty for messages.
        shape: properties that must be equal on all ranks of a collective.
        splits: (elements sent to each rank, elements received from each rank) of an uneven all-to-all.
        messages: posted together.
        site: file and line of the code that made the call.
        ranks: of the job, in the group's order; empty for calls from tables.
    """

    work: int
    communicator: str
    rank: int
    size: int
    name: str
    shape: tuple[object, ...]
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    messages: tuple[Message, ...]
    site: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"{self.name}{self.shape}" if self.name else "; ".join(map(str, self.messages))
        return f"{what} on {self.communicator} at {self.site}"


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waited for a call: its later calls run after that call."""

    work: int


Event = Call | Wait
