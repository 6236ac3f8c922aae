"""Compare two runs of the job step by step, and measure each event of the run on unequal ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.elastic.faults import phases_of
from benchmarks.long_run.records import Record, by_step

GOAL = 1e-4  # relative difference of losses in fp32
EVALUATION_GOAL = 1e-3
_EXACT = ("lr", "tokens", "checksum")


def relative(value: float, reference: float) -> float:
    """Return the relative difference."""
    return abs(value - reference) / max(abs(reference), 1e-12)


def differences(records: list[Record], reference: list[Record], event: str = "step") -> dict[int, float]:
    """Return the relative difference of the losses of two runs, by step."""
    losses, expected = by_step(records, event), by_step(reference, event)
    return {
        step: relative(losses[step]["loss"], expected[step]["loss"]) for step in sorted(losses.keys() & expected.keys())
    }


def compare_losses(records: list[Record], reference: list[Record]) -> dict[str, Any]:
    """Return the largest differences of losses and evaluations, and the step from which the goal is missed."""
    of_steps = differences(records, reference)
    of_evaluations = differences(records, reference, "evaluation")
    worst_step = max(of_steps, key=lambda step: of_steps[step])
    return {
        "steps": len(of_steps),
        "largest": of_steps[worst_step],
        "largest_at_step": worst_step,
        "first_step_above_goal": next((step for step, value in of_steps.items() if value > GOAL), None),
        "evaluations": len(of_evaluations),
        "evaluation_largest": max(of_evaluations.values()),
    }


def compare_samples(records: list[Record], reference: list[Record], steps: int) -> dict[str, Any]:
    """Return how many samples were lost or trained on twice, and whether tokens and learning rates are equal.

    The state of a step that was repeated was thrown away, so that only its last repetition counts. A row is known by
    its checksum. Each step takes one row.
    """
    latest, expected = by_step(records, "step"), by_step(reference, "step")
    wrong = [step for step in range(1, steps + 1) if step not in latest]
    row_differs = [step for step in latest if latest[step]["checksum"] != expected[step]["checksum"]]
    return {
        "steps_missing": len(wrong),
        "rows_other_than_alone": len(row_differs),
        "samples_lost": _surplus(expected, latest),
        "samples_doubled": _surplus(latest, expected),
        "tokens": sum(record["tokens"] for record in latest.values()),
        "tokens_alone": sum(record["tokens"] for record in expected.values()),
        "learning_rate_largest": max(
            (relative(latest[step]["lr"], expected[step]["lr"]) for step in latest), default=0.0
        ),
    }


def _surplus(ours: dict[int, Record], theirs: dict[int, Record]) -> int:
    """Return how many rows one run has trained on more often than another, counted as often."""
    from collections import Counter

    counts = Counter(record["checksum"] for record in ours.values())
    counts.subtract(Counter(record["checksum"] for record in theirs.values()))
    return sum(count for count in counts.values() if count > 0)


def repeated_differences(records: list[Record]) -> dict[str, Any]:
    """Return how many steps were repeated, and the largest difference of their losses from the first time."""
    first: dict[int, float] = {}
    repeated = []
    for record in records:
        if record["event"] == "step":
            if record["step"] in first:
                repeated.append(relative(record["loss"], first[record["step"]]))
            first.setdefault(record["step"], record["loss"])
    return {"steps": len(repeated), "largest": max(repeated, default=0.0)}


def describe_events(records: list[Record]) -> list[dict[str, Any]]:
    """Return one entry per event: its step, the steps lost, and the seconds until the next step of all ranks.

    Seconds begin when a process is killed, told to leave or started; for a resume, when the last segment made its last
    step.
    """
    events = []
    for record in records:
        if record["event"] == "strike":
            events.append(_restart(records, record["kind"], record["began"], record["ranks"], node=record["node"]))
        elif record["event"] == "resume":
            before = [r["time"] for r in records if r["event"] == "checkpoint" and r["time"] < record["time"]]
            following = [r for r in records if r["event"] == "ready" and r["time"] > record["time"]]
            if before and following:
                events.append(_restart(records, "resume", max(before), following[0]["world_size"]))
    return events


def _restart(records: list[Record], kind: str, began_s: float, ranks: int, node: str = "") -> dict[str, Any]:
    """Return the entry of an event that ends with a new world of ``ranks`` ranks."""
    ready = next(r for r in records if r["event"] == "ready" and r["time"] > began_s and r["world_size"] == ranks)
    before = max((r["step"] for r in records if r["event"] == "step" and r["time"] < ready["time"]), default=0)
    next_step = next(r for r in records if r["event"] == "step" and r["time"] > ready["time"])
    until_next = [record for record in records if record["time"] <= next_step["time"]]
    return {
        "kind": kind,
        "node": node,
        "step": ready["step"],
        "ranks": ranks,
        "lost_steps": max(0, before - ready["step"]),
        "seconds": round(next_step["time"] - began_s, 2),
        "phases": phases_of(until_next, began_s),
    }


def adaptations(records: list[Record], changed_at: Sequence[int], window: int = 10) -> list[dict[str, Any]]:
    """Return, for each change of speed, the shares of tokens before it and after the job has adapted.

    ``replanned_after`` is the number of steps until the next change of the schedule, None if there was none. With
    documents the schedule stays, and only shares tell. They are empty where the job has ended before, as a short one
    does.

    Args:
        changed_at: steps.
        window: steps over which shares are averaged.
    """
    steps = by_step(records, "step")
    nodes = sorted({node for record in steps.values() for node in record["tokens_by_node"]})

    def shares(first: int) -> dict[str, float]:
        rows = [steps[step] for step in range(first, first + window) if step in steps]
        if not rows:
            return {}
        total = sum(row["tokens"] for row in rows)
        return {node: round(sum(row["tokens_by_node"].get(node, 0) for row in rows) / total, 3) for node in nodes}

    def replanned_after(at: int) -> int | None:
        later = [step for step in steps if step > at and step - 1 in steps]
        changes = (step - at for step in later if steps[step]["changes"] > steps[step - 1]["changes"])
        return next(changes, None)

    return [
        {
            "step": at,
            "before": shares(at - window),
            "after": shares(at + 4 * window),
            "replanned_after": replanned_after(at),
        }
        for at in changed_at
    ]
