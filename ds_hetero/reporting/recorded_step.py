"""Read and write the file of a recorded step, and make its trace on a cluster.

`python -m benchmarks.fake_gpu.played record` writes such a file.

The file is JSON. Operations and calls that ranks repeat are written once, in ``operations`` and ``calls``. Every rank
has a list of events that refer to them by index:

    7             the rank computes operation 7
    [0, 3, 12]    it posts call 3, as its request number 12
    [1, 12]       its device waits for request 12
    [2]           its host waits for its device
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict, JsonObject, expect_object_keys, read_file
from ds_hetero.cost.replay import WAIT, Event, Operation, PostedCall, PostedMessage, ReplayedStep, Sync, Wait, replay
from ds_hetero.errors import PlanError
from ds_hetero.reporting.trace import COMPUTE, NETWORK, Process

VERSION = 1
_KEYS = {"version", "name", "model", "cluster", "host_share", "operations", "calls", "ranks"}
_CALL, _WAIT, _SYNC = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """What all ranks compute, post and wait for in one optimizer step, in order."""

    name: str  # name of the job
    model: str  # name of the model
    cluster: str  # file or preset for which the job was planned
    host_share: float = 1.0  # see `ds_hetero.cost.replay.replay`
    events: tuple[tuple[Event, ...], ...] = field(repr=False)  # by rank

    def to_dict(self) -> JsonDict:
        """Return the content of the file."""
        # Index of every operation and call, in order of first use.
        operations: dict[Operation, int] = {}
        calls: dict[PostedCall, int] = {}

        def encoded(event: Event) -> int | list[int]:
            """Return the entry of an event in the file, see the module."""
            if isinstance(event, Operation):
                return operations.setdefault(event, len(operations))
            if isinstance(event, PostedCall):
                call = event._replace(number=0)  # calls that differ in their request number are the same call
                return [_CALL, calls.setdefault(call, len(calls)), event.number]
            return [_WAIT, event.number] if isinstance(event, Wait) else [_SYNC]

        ranks = [list(map(encoded, rank_events)) for rank_events in self.events]
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
        """Read a file's content. Raises `PlanError`: `to_dict` did not write it."""
        expect_object_keys("a recorded step", content, _KEYS, set(), PlanError)
        if content["version"] != VERSION:
            raise PlanError(f"the record has version {content['version']}, this release reads {VERSION}. Record again.")
        try:
            events = _read_events(content)
        except (IndexError, TypeError, ValueError) as error:
            raise PlanError(
                "the record is not one of python -m benchmarks.fake_gpu.played record: "
                f"{type(error).__name__}: {error}. Record again."
            ) from error
        return cls(events=events, **{key: content[key] for key in ("name", "model", "cluster", "host_share")})


def _read_events(content: JsonObject) -> tuple[tuple[Event, ...], ...]:
    """Return the events of every rank that a file's content describes."""
    operations = [Operation(*fields) for fields in content["operations"]]
    calls = []
    for name, communicator, ranks, size, sent, messages in content["calls"]:
        posted = tuple(PostedMessage(*fields) for fields in messages)
        calls.append(PostedCall(0, name, communicator, tuple(ranks), size, tuple(sent), posted))

    def decoded(code: int | Sequence[int]) -> Event:
        """Return the event that an entry of the file stands for."""
        if isinstance(code, int):
            return operations[code]
        if code[0] == _CALL:
            return calls[code[1]]._replace(number=code[2])
        return Wait(code[1]) if code[0] == _WAIT else Sync()

    return tuple(tuple(map(decoded, codes)) for codes in content["ranks"])


def read_recorded_step(path: Path) -> RecordedStep:
    """Read the file of a recorded step. Raises `PlanError`: it cannot be read, or has another content."""
    return RecordedStep.from_dict(read_file(path, "recorded step", PlanError))


def trace_of_record(record: RecordedStep, cluster: Cluster | None = None) -> JsonDict:
    """Replay a recorded step on a cluster, and return its trace.

    Args:
        cluster: cluster to replay on; None: the one for which the job was planned.
    """
    cluster = load_cluster(record.cluster) if cluster is None else cluster
    replayed = replay(record.events, cluster, record.host_share)
    events: list[JsonDict] = []
    for rank in range(cluster.num_ranks):
        events += _trace_events(replayed, cluster, rank)
    other = {"model": record.model, "job": record.name, "step_s": replayed.step_s}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _trace_events(replayed: ReplayedStep, cluster: Cluster, rank: int) -> Iterator[JsonDict]:
    """Yield a rank's trace events, in a thread for computing and a thread for each cause of transfers."""
    process = Process(rank, f"played: {cluster.rank_name(rank)}", rank)
    causes = sorted({span.cause for span in replayed.spans[rank] if span.stream == "network"})
    yield from process.metadata(("compute", *(f"network, {cause}" for cause in causes)))
    thread_of_cause = {cause: NETWORK + i for i, cause in enumerate(causes)}
    for span in replayed.spans[rank]:
        tid = COMPUTE if span.stream == "compute" else thread_of_cause[span.cause]
        args = {} if span.name == WAIT else {"cause": span.cause}
        yield process.span(tid, span.name, span.start_s, span.stop_s, **args)
