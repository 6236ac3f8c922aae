"""Run the job on four unequal ranks: start its segments, strike it, and record when each event ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.elastic.faults import has_continued
from benchmarks.elastic.nodes import Cluster, warm_server
from benchmarks.long_run.course import NODES, SEGMENTS, STRIKES, Strike, step_of
from benchmarks.long_run.job import Job
from benchmarks.long_run.ranks import AWAITS_EVENT
from benchmarks.long_run.records import Records
from benchmarks.long_run.start import SILENCE_S

_SCRIPT = Path(__file__).with_name("ranks.py")
RECORDS = "events.jsonl"  # as `Cluster` names it
_LIMIT_S = 900.0  # of a start, or of an event
_QUIET_S = 1800.0  # without a step


class LongRunError(RuntimeError):
    """The job does not go on."""


def run(job: Job, folder: Path, save_every: int, on_step: Callable[[int], None]) -> None:
    """Run the job from where it was stopped.

    Args:
        folder: of the job; keeps records, checkpoints and logs.
        save_every: steps between two saves in memory.
        on_step: called now and then with the latest step.

    Raises:
        LongRunError: the job does not go on.
    """
    records = Records(folder / RECORDS)
    records.drop_half_line()
    (folder / AWAITS_EVENT).unlink(missing_ok=True)
    with warm_server(folder) as socket:
        while (done := _checkpointed_step(records)) < job.steps:
            number = next(i for i, segment in enumerate(SEGMENTS) if done < step_of(job, segment.until))
            _run_segment(job, folder, number, save_every, socket, on_step)
    records.add("done", step=job.steps)


def _checkpointed_step(records: Records) -> int:
    """Return the step of the latest checkpoint."""
    return max((record["step"] for record in records.read() if record["event"] == "checkpoint"), default=0)


def _run_segment(
    job: Job, folder: Path, number: int, save_every: int, socket: Path, on_step: Callable[[int], None]
) -> None:
    """Run one segment to its end."""
    records = Records(folder / RECORDS)
    arguments = ["--folder", str(folder), "--segment", str(number), "--save-every", str(save_every)]
    cluster = Cluster(folder, [1] * len(NODES), arguments, socket, script=_SCRIPT, silence_s=SILENCE_S)
    end = step_of(job, SEGMENTS[number].until)
    try:
        records.add("resume" if number else "start", segment=number, step=_checkpointed_step(records))
        cluster.start()
        for strike in _remaining_strikes(job, number, records):
            _wait(cluster, step_of(job, strike.at), on_step)
            waiting = folder / AWAITS_EVENT
            waiting.touch()
            _strike(cluster, strike, records)
            waiting.unlink()
        _wait(cluster, end, on_step)
        for node in cluster.nodes:
            assert node.process is not None
            node.process.wait(_LIMIT_S)
    except (LongRunError, subprocess.TimeoutExpired) as error:
        raise LongRunError(f"segment {number} does not go on: {error}. Logs: {folder}/n*.log") from error
    finally:
        cluster.end()


def _remaining_strikes(job: Job, number: int, records: Records) -> list[Strike]:
    """Return the strikes of a segment that have not been given, in the order of their steps."""
    first = step_of(job, SEGMENTS[number - 1].until) if number else 0
    last = step_of(job, SEGMENTS[number].until)
    given = {(record["kind"], record["node"]) for record in records.read() if record["event"] == "strike"}
    of_segment = [strike for strike in STRIKES if first <= step_of(job, strike.at) < last]
    return [strike for strike in of_segment if (strike.kind, strike.node) not in given]


def _strike(cluster: Cluster, strike: Strike, records: Records) -> None:
    """Give one strike, and wait until all ranks that are left, or back, have made a step."""
    node = cluster.nodes[NODES.index(strike.node)]
    began_s, step = time.time(), _latest_step(cluster)
    if strike.kind == "worker":
        os.kill(node.worker_pids()[0], signal.SIGKILL)
    elif strike.kind == "notice":
        node.leave()
    elif node.is_up:
        return  # the run was stopped while this node was away, and has started with all nodes
    else:
        node.start()
    expected = cluster.num_workers
    if not cluster.wait_for(lambda events: has_continued(events, began_s, expected), _LIMIT_S):
        raise LongRunError(f"no step of {expected} ranks within {_LIMIT_S:.0f} s of {strike}")
    records.add("strike", kind=strike.kind, node=strike.node, began=began_s, step=step, ranks=expected)


def _wait(cluster: Cluster, step: int, on_step: Callable[[int], None]) -> None:
    """Wait until the job has made a step."""
    latest, latest_s = -1, time.monotonic()
    while latest < step:
        time.sleep(0.2)
        now = _latest_step(cluster)
        if now > latest:
            latest, latest_s = now, time.monotonic()
            on_step(latest)
        if time.monotonic() - latest_s > _QUIET_S:
            raise LongRunError(f"no step after {latest} within {_QUIET_S:.0f} s")
        if latest < step and not any(node.is_up for node in cluster.nodes):
            raise LongRunError(f"all nodes ended at step {latest}")


def _latest_step(cluster: Cluster) -> int:
    steps: list[int] = [event["step"] for event in cluster.events() if event["event"] == "step"]
    return steps[-1] if steps else 0
