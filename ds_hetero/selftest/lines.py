"""Lines of a check: what it says of one rank, and the same put together over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["pass", "fail", "skip", "info"]


@dataclass(frozen=True, slots=True)
class Line:
    """Result of a check, on one rank or on ranks that agree."""

    name: str
    status: Status  # ``"info"`` takes no part in the verdict
    detail: str = ""  # the reason, or what was measured
    per_s: float | None = None  # rate that was measured: operations, or bytes, per second
    ranks: tuple[int, ...] = ()  # of which it is said, once those of all ranks have been put together; empty for all


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
