"""What happens to the ranks in the course of the run: resumes under other schedules, faults, and changes of speed.

Steps are thousandths of the run, so that a quick run has the same course.

    0          planned schedule, documents placed, ZeRO shares by speed
    133        speeds change: one node falls to half
    233        a worker is killed
    333        resume under a schedule file: two all-to-all groups of two ranks in a ring, other ZeRO shares
    433        a node leaves with notice; three ranks go on under a planned schedule
    533        the node is back
    667        resume under a planned schedule for the new speeds, rows split by length, so that re-planning changes it
    767        speeds change: the slowest node becomes the fastest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.long_run.job import Job
from benchmarks.long_run.start import cluster_of

NODES = ("n0", "n1", "n2", "n3")  # of one rank each
_WHOLE = 1000


@dataclass(frozen=True)
class Segment:
    """Steps between two starts of the job; each but the first begins with the checkpoint of the one before.

    Args:
        until: thousandths of the run.
        placement: of the section.
        groups: of the schedule file for all ranks, as (ranks, tokens, heads); empty for a planned schedule.
        zero_shares: of the optimizer state, by node; by speed if left out.
    """

    until: int
    placement: str
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = ()
    zero_shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Strike:
    """A fault or its end.

    Args:
        at: thousandths of the run.
        kind: of `benchmarks.elastic.faults`.
    """

    at: int
    kind: str
    node: str


SEGMENTS = (
    Segment(until=333, placement="documents"),
    Segment(
        until=667,
        placement="documents",
        groups=(((0, 1), (3, 2), (6, 4)), ((2, 3), (2, 1), (4, 6))),
        zero_shares=(1, 2, 3, 4),
    ),
    Segment(until=_WHOLE, placement="stream"),
)
STRIKES = (
    Strike(at=233, kind="worker", node="n1"),
    Strike(at=433, kind="notice", node="n2"),
    Strike(at=533, kind="join", node="n2"),
)
# Shares of a core, by node, from a thousandth of the run on; emulated.
SPEEDS = (
    (0, {"n0": 0.6, "n1": 0.45, "n2": 0.3, "n3": 0.3}),
    (133, {"n0": 0.3, "n1": 0.45, "n2": 0.3, "n3": 0.3}),
    (767, {"n0": 0.3, "n1": 0.45, "n2": 0.3, "n3": 0.6}),
)


def step_of(job: Job, thousandths: int) -> int:
    """Return the optimizer step of a moment of the run."""
    return job.steps * thousandths // _WHOLE


def cores_at(job: Job, step: int) -> Mapping[str, float]:
    """Return the emulated speed of every node at a step."""
    reached = [cores for at, cores in SPEEDS if step_of(job, at) <= step]
    return reached[-1]


def section(job: Job, segment: Segment, nodes: Sequence[str], step: int, save_every: int) -> dict[str, Any]:
    """Return the "heterogeneity" section.

    Args:
        nodes: of the ranks, in their order.
        step: at which the ranks start; their speeds at that step are those of the cluster file.
    """
    is_complete = tuple(nodes) == NODES
    shares = segment.zero_shares if segment.zero_shares and is_complete else None
    cores = [cores_at(job, step)[node] for node in nodes]
    placement: dict[str, Any] = {"mode": segment.placement}
    if segment.placement == "documents":
        placement["min_cut_tokens"] = 32
    return {
        "cluster": cluster_of(nodes, cores),
        "schedule": _schedule(job, segment) if segment.groups and is_complete else "plan",
        "seq_len": job.longest,
        "placement": placement,
        "zero_partition": list(shares or cores),
        "replan": {"enabled": True, "interval_steps": 5, "min_gain": 0.05},
        "elastic": {"every_steps": save_every},
    }


def _schedule(job: Job, segment: Segment) -> dict[str, Any]:
    groups = [
        {"ranks": list(ranks), "tokens": list(tokens), "heads": list(heads)} for ranks, tokens, heads in segment.groups
    ]
    return {
        "version": 1,
        "num_heads": job.heads,
        "num_kv_heads": job.kv_heads,
        "layout": "zigzag",
        "groups": groups,
    }
