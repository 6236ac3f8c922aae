"""Kinds of jobs that the search compares, and what a search may choose."""

from __future__ import annotations

from dataclasses import dataclass

SEQUENCE, BATCH, PIPELINES, ONE = "sequence", "batch", "pipelines", "one"

KINDS = {
    SEQUENCE: "sequence parallelism",
    BATCH: "a batch for each GPU",
    PIPELINES: "pipelines",
    ONE: "one GPU alone",
}
"""Kinds of jobs, as ``--parallel`` takes them, with their names for people."""

SIMPLEST_FIRST = (ONE, SEQUENCE, BATCH, PIPELINES)
"""Kinds of jobs by what they ask of a script and of the network; ties go to the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Freedom:
    """Choices that a search over jobs may make. It never chooses the batch, the trained weights or the optimizer."""

    kinds: tuple[str, ...] = tuple(KINDS)  # kinds of jobs that are compared
    divides_experts: bool = False  # experts may be divided among ranks, where that is faster
    fixed: frozenset[str] = frozenset()  # fields of `Workload` that the user set; the search keeps their values

    def may_choose(self, *fields: str) -> bool:
        """Whether the search may change these fields of the workload."""
        return self.fixed.isdisjoint(fields)
