"""Verdicts: what a check says of one rank, and the same put together over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["pass", "fail", "skip", "info"]


@dataclass(frozen=True, slots=True)
class Line:
    """Result of a check, on one rank or on ranks that agree.

    Args:
        name: what was tried.
        status: ``"info"`` takes no part in the verdict.
        detail: the reason, or what was measured.
        ranks: of which it is said, once those of all ranks have been put together; empty for all.
    """

    name: str
    status: Status
    detail: str = ""
    ranks: tuple[int, ...] = ()


def merge(lines_of_ranks: Sequence[Sequence[Line]]) -> list[Line]:
    """Put the lines of all ranks together: one for each name and verdict, in the order in which names appear."""
    ranks: dict[str, dict[Line, list[int]]] = {}
    for rank, lines in enumerate(lines_of_ranks):
        for line in lines:
            ranks.setdefault(line.name, {}).setdefault(line, []).append(rank)
    merged = []
    for said in ranks.values():
        for line, of_ranks in said.items():
            is_all = len(of_ranks) == len(lines_of_ranks)
            merged.append(line if is_all else replace(line, ranks=tuple(of_ranks)))
    return merged
