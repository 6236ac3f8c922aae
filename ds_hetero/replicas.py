"""Replicas that differ: which samples of an optimizer step each of them trains on, and in which micro-batches.

    {"version": 1, "replicas": [{"schedule": {...}, "micro_batch_size": 2, "micro_batches": 3}, ...]}

A step uses the next G samples of the order in which one process would read them, G being the sum over the replicas of
micro_batch_size x micro_batches. They are cut into one run of samples per replica, in order, and each run into that
replica's micro-batches. The last step of an epoch may have fewer; they are shared in the same proportions, so that no
replica gets more than its place allows.

Plain integers; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_hetero.errors import ScheduleError
from ds_hetero.plan import BatchSplit
from ds_hetero.schedule import VERSION, Schedule

__all__ = ["BatchSplit", "holds_replicas", "read_replicas", "replicas_to_dict"]

_BATCH_KEYS = ("micro_batch_size", "micro_batches")


def holds_replicas(data: Any) -> bool:
    """Whether the content of a schedule file lists replicas."""
    return isinstance(data, Mapping) and "replicas" in data


def read_replicas(data: Mapping[str, Any]) -> tuple[tuple[Schedule, ...], BatchSplit | None]:
    """The schedules of a file that lists replicas, and their batches; None where the file gives none.

    Raises:
        ScheduleError: unknown or missing keys, wrong values, batches for some replicas only.
    """
    if set(data) != {"version", "replicas"} or data["version"] != VERSION or not _is_list(data["replicas"]):
        raise ScheduleError(
            f'a file of several replicas takes "version": {VERSION} and "replicas": [...], got {sorted(data, key=str)}.'
        )
    known = {"schedule", *_BATCH_KEYS}
    for i, replica in enumerate(data["replicas"]):
        if not isinstance(replica, Mapping) or "schedule" not in replica or set(replica) - known:
            raise ScheduleError(f"replicas[{i}] takes schedule, micro_batch_size and micro_batches, got {replica!r}.")
    schedules = tuple(Schedule.from_dict(replica["schedule"]) for replica in data["replicas"])
    given = [key in replica for replica in data["replicas"] for key in _BATCH_KEYS]
    if not any(given):
        if len({schedule.sp_size for schedule in schedules}) > 1:
            raise ScheduleError(
                f"replicas of {[schedule.sp_size for schedule in schedules]} ranks must say what each is to train on: "
                "give micro_batch_size and micro_batches for every replica."
            )
        return schedules, None
    if not all(given):
        raise ScheduleError("micro_batch_size and micro_batches must be given for every replica, or for none.")
    sizes, counts = (tuple(replica[key] for replica in data["replicas"]) for key in _BATCH_KEYS)
    return schedules, BatchSplit(micro_batch_sizes=sizes, micro_batches=counts)


def replicas_to_dict(schedules: Sequence[Schedule], batch_split: BatchSplit) -> dict[str, Any]:
    """The file that `read_replicas` reads."""
    shares = zip(schedules, batch_split.micro_batch_sizes, batch_split.micro_batches, strict=True)
    return {
        "version": VERSION,
        "replicas": [
            {"schedule": schedule.to_dict(), "micro_batch_size": size, "micro_batches": count}
            for schedule, size, count in shares
        ],
    }


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
