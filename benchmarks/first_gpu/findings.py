"""Findings of a review without a GPU, and whether a run confirms the defaults that are based on them.

A finding names today's default, and judges the rows of the parts that measure it: True if they confirm the default,
False if they contradict it, None if nothing was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.first_gpu.parts import Row

CONFIRMS, CONTRADICTS, NOT_MEASURED, REHEARSED = "confirms", "contradicts", "not measured", "rehearsed"


class Measured:
    """The results of a run so far, by section and part."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.rehearsal: bool = result["rehearsal"]
        self._parts = {(entry["section"], entry["part"]): entry for entry in result["parts"]}

    def rows(self, section: str, part: str, key: str = "") -> list[Row]:
        """Return the rows of a part; with ``key`` those that have it; none if the part did not run."""
        entry = self._parts.get((section, part))
        rows: list[Row] = [] if entry is None else entry["rows"]
        return [row for row in rows if not key or key in row]

    def entry(self, section: str, part: str) -> dict[str, Any]:
        """Return the entry of a part; empty if it did not run."""
        return self._parts.get((section, part), {})

    def outcome(self, section: str, part: str) -> str:
        """Return how a part ended."""
        entry = self._parts.get((section, part))
        return "not of this run" if entry is None else entry["outcome"]


class Judgement(NamedTuple):
    """Judgement on a default."""

    holds: bool | None  # None: they do not say
    figure: str = ""


@dataclass(frozen=True)
class Finding:
    """One row of the last page.

    Args:
        default: of the package, and its reason.
        judge: judges rows.
    """

    name: str
    default: str
    judge: Callable[[Measured], Judgement]


def finding(name: str, default: str) -> Callable[[Callable[[Measured], Judgement]], Finding]:
    """Make a finding of the function that judges it."""
    return lambda judge: Finding(name, default, judge)


def finding_of_rows(
    name: str, default: str, section: str, part: str, key: str
) -> Callable[[Callable[[Sequence[Row]], Judgement]], Finding]:
    """Make a finding of a function that judges the rows of one part with ``key``; it gets at least one row."""

    def made(judge_rows: Callable[[Sequence[Row]], Judgement]) -> Finding:
        def judge(measured: Measured) -> Judgement:
            rows = measured.rows(section, part, key)
            return judge_rows(rows) if rows else Judgement(None)

        return Finding(name, default, judge)

    return made


def judged(measured: Measured, findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return a row of the last page for every finding; a rehearsal confirms nothing."""
    return [
        {"name": each.name, "default": each.default, "verdict": verdict, "figure": figure}
        for each, verdict, figure in _verdicts(measured, findings)
    ]


def _verdicts(measured: Measured, findings: Sequence[Finding]) -> Iterator[tuple[Finding, str, str]]:
    for each in findings:
        judgement = each.judge(measured)
        if judgement.holds is None and not (measured.rehearsal and judgement.figure):
            yield each, NOT_MEASURED, judgement.figure
        elif measured.rehearsal:
            yield each, REHEARSED, f"rehearsed, confirms nothing: {judgement.figure}"
        else:
            yield each, CONFIRMS if judgement.holds else CONTRADICTS, judgement.figure
