"""Transfers between the members of a lane, and the rounds in which they are posted: values, plain integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class ProxyPart(NamedTuple):
    """Some of the tokens that travel of one source, on their way over proxies.

    Args:
        start: index of the first one.
        stop: index after the last one.
        is_first_hop: the sender takes it from its block, and not from what it holds as a proxy.
        is_last_hop: the receiver puts it into its block, and does not hold it as a proxy.
    """

    start: int
    stop: int
    is_first_hop: bool
    is_last_hop: bool


class Transfer(NamedTuple):
    """One member's KV (or its gradient), or a part of it, moves from one member to another.

    Args:
        source: position whose tokens these are.
        sender: position.
        receiver: position.
        due: the receiver needs it before this step.
        part: None for the whole.
    """

    source: int
    sender: int
    receiver: int
    due: int
    part: ProxyPart | None = None


class Round(NamedTuple):
    """Messages of one member while it computes one step; what it receives is there at the end of step ``due - 1``."""

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


class RoundsOf:
    """The rounds of one position as they are put together.

    Args:
        steps: number of rounds.
        position: of the member whose rounds they are.
    """

    def __init__(self, steps: int, position: int) -> None:
        self._position = position
        self._receives: list[list[Transfer]] = [[] for _ in range(steps)]
        self._sends: list[list[Transfer]] = [[] for _ in range(steps)]

    def add(self, number: int, transfer: Transfer) -> None:
        """Add a transfer that the member receives or sends."""
        if transfer.receiver == self._position:
            self._receives[number].append(transfer)
        else:
            self._sends[number].append(transfer)

    def cross(self, hops: Iterator[tuple[int, Transfer]]) -> None:
        """Add those transfers, with the numbers of their rounds, in which the member has part."""
        for number, transfer in hops:
            if self._position in (transfer.sender, transfer.receiver):
                self.add(number, transfer)

    def made(self) -> tuple[Round, ...]:
        """Sender and receiver have the transfers of a round in the same order, by which some backends pair them."""
        return tuple(map(Round, map(_ordered, self._receives), map(_ordered, self._sends)))


def _ordered(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=_order) if len(transfers) > 1 else transfers)


def _order(transfer: Transfer) -> tuple[int, int]:
    return transfer.source, transfer.part.start if transfer.part else 0
