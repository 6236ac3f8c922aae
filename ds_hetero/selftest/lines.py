"""A line of the report: the result of a check on one rank, or of equal results on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["pass", "fail", "skip", "info"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report: the result of a check on one rank, or on several ranks with the same result."""

    name: str
    status: Status  # ``"info"`` takes no part in the verdict
    detail: str = ""  # the reason, or the measurement
    per_s: float | None = None  # the rate measured, in FLOPs or bytes per second
    ranks: tuple[int, ...] = ()  # with this result; set by `merge`, and empty for all ranks


def merge(lines_of_ranks: Sequence[Sequence[Line]]) -> list[Line]:
    """Merge equal lines of different ranks into one that lists these ranks, in the order in which names appear.

    Example: rank 1 has ``Line("a", "fail")``, ranks 0 and 2 have ``Line("a", "pass")``. The result is
    ``[Line("a", "pass", ranks=(0, 2)), Line("a", "fail", ranks=(1,))]``.
    """
    ranks_by_line: dict[str, dict[Line, list[int]]] = {}  # by name, and there by line
    for rank, lines in enumerate(lines_of_ranks):
        for line in lines:
            ranks_by_line.setdefault(line.name, {}).setdefault(line, []).append(rank)
    merged_lines = []
    for lines_of_name in ranks_by_line.values():
        for line, ranks in lines_of_name.items():
            is_on_all = len(ranks) == len(lines_of_ranks)
            merged_lines.append(line if is_on_all else replace(line, ranks=tuple(ranks)))
    return merged_lines
