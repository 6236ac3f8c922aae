"""Verdicts: what a check says of one rank, and the same put together over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Line", "RankLine", "merge"]

Status = Literal["pass", "fail", "skip", "info"]


@dataclass(frozen=True, slots=True)
class RankLine:
    """What a check says of one rank.

    Args:
        name: what was tried.
        status: ``"info"`` takes no part in the verdict.
        detail: the reason, or what was measured.
    """

    name: str
    status: Status
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Line:
    """What a check says of some ranks alike.

    Args:
        name: what was tried.
        status: see `RankLine`.
        detail: see `RankLine`.
        ranks: of which it is said; empty for all.
    """

    name: str
    status: Status
    detail: str
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def merge(lines_of_ranks: Sequence[Sequence[RankLine]]) -> list[Line]:
    """Put the lines of all ranks together: one for each name and verdict, in the order in which names appear."""
    ranks: dict[str, dict[RankLine, list[int]]] = {}
    for rank, lines in enumerate(lines_of_ranks):
        for line in lines:
            ranks.setdefault(line.name, {}).setdefault(line, []).append(rank)
    merged = []
    for said in ranks.values():
        for line, of_ranks in said.items():
            is_all = len(of_ranks) == len(lines_of_ranks)
            merged.append(Line(line.name, line.status, line.detail, () if is_all else tuple(of_ranks)))
    return merged
