"""A step of real code that `python -m benchmarks.fake_gpu.played record` wrote: its file, and its trace on a cluster.

The file is JSON. What ranks do again and again stands once, in ``operations`` and ``calls``, and every rank has a list
of events: the number of an operation, ``[0, call, number]``, ``[1, number]`` for a wait, ``[2]`` where the host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict, JsonObject, expect_object_keys, read_file
from ds_hetero.cost.played import WAIT, Event, Operation, PlayedStep, PostedCall, PostedMessage, Sync, Wait, play
from ds_hetero.errors import PlanError
from ds_hetero.reporting.trace import COMPUTE, NETWORK, Process

VERSION = 1
_KEYS = {"version", "name", "model", "cluster", "host_share", "operations", "calls", "ranks"}
_CALL, _WAIT, _SYNC = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One optimizer step of all ranks."""

    name: str  # of the job, for people
    model: str  # its name
    cluster: str  # the file or preset for which it was planned
    host_share: float = 1.0  # see `ds_hetero.cost.played.play`
    events: tuple[tuple[Event, ...], ...] = field(repr=False)  # of every rank

    def to_dict(self) -> JsonDict:
        """Return the content of the file."""
        operations: dict[Operation, int] = {}
        calls: dict[PostedCall, int] = {}

        def coded(event: Event) -> int | list[int]:
            if isinstance(event, Operation):
                return operations.setdefault(event, len(operations))
            if isinstance(event, PostedCall):
                return [_CALL, calls.setdefault(event._replace(number=0), len(calls)), event.number]
            return [_WAIT, event.number] if isinstance(event, Wait) else [_SYNC]

        ranks = [[coded(event) for event in of_rank] for of_rank in self.events]
        return {
            "version": VERSION,
            "name": self.name,
            "model": self.model,
            "cluster": self.cluster,
            "host_share": self.host_share,
            "operations": [list(operation) for operation in operations],
            "calls": [list(call[1:]) for call in calls],
            "ranks": ranks,
        }

    @classmethod
    def from_dict(cls, content: JsonObject) -> RecordedStep:
        """Return the record of a file's content. Raises `PlanError`: it is not what `to_dict` writes."""
        expect_object_keys("a recorded step", content, _KEYS, set(), PlanError)
        if content["version"] != VERSION:
            raise PlanError(f"the record has version {content['version']}, this release reads {VERSION}. Record again.")
        try:
            operations = [Operation(*each) for each in content["operations"]]
            calls = [
                PostedCall(
                    0,
                    name,
                    communicator,
                    tuple(ranks),
                    size,
                    tuple(sent),
                    tuple(PostedMessage(*each) for each in messages),
                )
                for name, communicator, ranks, size, sent, messages in content["calls"]
            ]

            def event_of(code: int | Sequence[int]) -> Event:
                if isinstance(code, int):
                    return operations[code]
                if code[0] == _CALL:
                    return calls[code[1]]._replace(number=code[2])
                return Wait(code[1]) if code[0] == _WAIT else Sync()

            events = tuple(tuple(map(event_of, of_rank)) for of_rank in content["ranks"])
        except (IndexError, TypeError, ValueError) as error:
            raise PlanError(
                "the record is not one of python -m benchmarks.fake_gpu.played record: "
                f"{type(error).__name__}: {error}. Record again."
            ) from error
        return cls(events=events, **{key: content[key] for key in ("name", "model", "cluster", "host_share")})


def read_recorded_step(path: Path) -> RecordedStep:
    """Read the file of a recorded step. Raises `PlanError`: it cannot be read, or is something else."""
    return RecordedStep.from_dict(read_file(path, "recorded step", PlanError))


def trace_of_record(record: RecordedStep, cluster: Cluster | None = None) -> JsonDict:
    """Return the trace of a recorded step on a cluster; left out, on the one for which it was planned."""
    cluster = load_cluster(record.cluster) if cluster is None else cluster
    played = play(record.events, cluster, record.host_share)
    events = [event for rank in range(cluster.num_ranks) for event in _events(played, cluster, rank)]
    other = {"model": record.model, "job": record.name, "step_s": played.step_s}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(played: PlayedStep, cluster: Cluster, rank: int) -> Iterator[JsonDict]:
    process = Process(rank, f"played: {cluster.rank_name(rank)}", rank)
    names = sorted({span.cause for span in played.spans[rank] if span.stream == "network"})
    yield from process.metadata(("compute", *(f"network, {name}" for name in names)))
    thread = {name: NETWORK + i for i, name in enumerate(names)}
    for span in played.spans[rank]:
        tid = COMPUTE if span.stream == "compute" else thread[span.cause]
        more = {} if span.name == WAIT else {"cause": span.cause}
        yield process.span(tid, span.name, span.start_s, span.stop_s, **more)
