"""Judge how a job ended: where its fault was detected, by which message, on how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planted.job import Job, Trace, matches

FOUND, START, TOLD = "found at its step", "refused at the start", "told once at its step"
EXACT = "exact: no fault here"
LATER, WRONG_NAME, NOT_FOUND, BAD_END = "found later", "found under a wrong name", "not found", "ended badly"
RIGHT, FALSE_ALARM, WRONG = "left alone", "false alarm", "trains something else"
GOOD = (FOUND, START, TOLD, EXACT, RIGHT)

# Of the change of a parameter in the whole training: rounding of fp32 leaves some 1e-5 of it.
RTOL = 1e-3


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    name: str
    what: str
    begins: int | None
    found: int | None
    message: str
    ended: int  # ranks that ended with the same error
    ranks: int
    verdict: str
    harm: float | None  # largest relative error of a parameter's change, without checks; None where it did not train


def judge(job: type[Job], traces: Sequence[Trace], harm: float | None, off: float | None = None) -> Verdict:
    """Judge a job.

    Args:
        job: with its fault.
        traces: of all ranks, with checks; empty if the ranks hung or died.
        harm: distance of training without checks from one process; None if it did not train.
        off: distance of training with checks from one process.
    """

    def row(verdict: str, found: int | None, message: str, ended: int) -> Verdict:
        return Verdict(job.name, job.what, job.begins, found, message[:240], ended, job.world, verdict, harm)

    if not traces:
        return row(BAD_END, None, "ranks hung or died", 0)
    first = traces[0]
    failed = [trace for trace in traces if trace.error]
    ended = sum((trace.error, trace.message) == (failed[0].error, failed[0].message) for trace in failed)
    is_exact = off is not None and off < RTOL
    if job.begins is None:
        if failed:
            return row(FALSE_ALARM, failed[0].steps, f"{failed[0].error}: {failed[0].message}", ended)
        return row(
            RIGHT if is_exact or job.is_random else WRONG, None, "; ".join(text for _, text in first.warnings), 0
        )
    if not failed:
        if is_exact:
            return row(EXACT, None, "", 0)
        warnings = [(step, text) for step, text in first.warnings if job.says and matches(job.says, text)]
        if warnings:
            step, text = warnings[0]
            return row(TOLD if step <= job.begins else LATER, step, text, 0)
        return row(NOT_FOUND, None, "; ".join(text for _, text in first.warnings), 0)
    message = f"{failed[0].error}: {failed[0].message}"
    found = max(trace.steps for trace in failed)
    if len(failed) < len(traces) or not all(trace.is_ours for trace in failed):
        return row(BAD_END, found, message, ended)
    if not job.says or not any(matches(job.says, trace.message) for trace in failed):
        return row(WRONG_NAME, found, message, ended)
    if found != job.begins:
        return row(LATER if found > job.begins else WRONG_NAME, found, message, ended)
    return row(START if job.begins == 0 else FOUND, found, message, ended)


def distance(ours: Trace, alone: Trace) -> float | None:
    """Return the largest relative difference of a parameter's change.

    None if one of the two did not train to the end.
    """
    if ours.error or alone.error or ours.state.keys() != alone.state.keys():
        return None
    worst = 0.0
    for name, expected in alone.state.items():
        change = np.linalg.norm(expected - alone.start[name])
        error = np.linalg.norm(ours.state[name] - expected)
        # A parameter that has hardly moved is measured against its size.
        worst = max(worst, float(error / max(change, 1e-4 * np.linalg.norm(expected), 1e-12)))
    return worst
