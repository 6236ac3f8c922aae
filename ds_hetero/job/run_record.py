"""Record the measurements of a running job on rank 0, and write them as ``run.json``.

The file is written at the end of the job, however the job ends. It is also written while the job runs, so that a killed
job leaves its measurements: as often as writing takes less than a thousandth of the job's time.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from ds_hetero.cluster import load_cluster
from ds_hetero.common.announce import announce
from ds_hetero.common.extras import release_of
from ds_hetero.common.reading import JsonObject
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.decide_pipelines import pipelines_workload
from ds_hetero.decision.forecast import COST_MODEL
from ds_hetero.errors import HeteroError
from ds_hetero.job.expert_loads import ExpertLoads
from ds_hetero.job.job_times import JobTimes, planned_step_s
from ds_hetero.job.rank_times import RankTimes
from ds_hetero.job.replanning import PlanChange
from ds_hetero.job.start import World
from ds_hetero.reporting.run_file import MAX_TRACED, MeasuredRank, RunFile, TracedRange, write_run
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.step_clock import NamedRange

logger = logging.getLogger(__name__)

MAX_WRITING_FRACTION = 1e-3  # of the job's time that writing the file may take; chosen, never measured
MAX_OBSERVATIONS = 2_000  # with more, every second observation is dropped; chosen, never measured
_PACKAGES = ("ds-hetero", "torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Device, memory and latest trace of one rank, sent to rank 0 at some observations."""

    device: str  # its name
    memory_bytes: int  # most memory in use so far: of the device, on CPUs of the process
    trace: tuple[TracedRange, ...]  # ranges of its latest step

    @classmethod
    def take(cls, device: torch.device, ranges: Sequence[NamedRange]) -> Snapshot:
        """Take a snapshot of this rank.

        Args:
            ranges: of the rank's latest step; more than `MAX_TRACED` of them are left out.
        """
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            memory_bytes = torch.cuda.max_memory_allocated(device)
        else:
            name = "CPU"
            memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        traced_ranges = ranges if len(ranges) <= MAX_TRACED else ()
        return cls(name, memory_bytes, tuple((span.name, span.start_s, span.stop_s) for span in traced_ranges))

    def to_bytes(self) -> bytes:
        """Encode the snapshot for the exchange between ranks."""
        return json.dumps([self.device, self.memory_bytes, self.trace]).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Snapshot:
        """Decode the snapshot of a rank."""
        device, memory_bytes, trace = json.loads(content)
        return cls(device, memory_bytes, tuple((name, start_s, stop_s) for name, start_s, stop_s in trace))


class RunRecord:
    """Record of the job so far; on rank 0.

    Args:
        path: of ``run.json``.
        changes: returns the changes of the plan so far.

    Attributes:
        events: of an elastic job.
        experts: loads of divided experts; None if every rank has all.
    """

    def __init__(self, start: JobStart, path: Path, changes: Callable[[], Sequence[PlanChange]]) -> None:
        self._start, self._path, self._changes = start, path, changes
        self.events: Sequence[JsonObject] = ()
        self.experts: ExpertLoads | None = None
        self._scenario = _scenario_of(start)
        self._versions = _versions()
        # An interactive session keeps the last error here: an error from before the job does not end it.
        self._error_before = getattr(sys, "last_value", None)
        self._totals: list[RankTimes] = []
        self._observations: list[Mapping[str, float]] = []
        self._snapshots: list[Snapshot] = []
        self._traced_step: int | None = None
        self._written_s, self._writing_s = time.monotonic(), 0.0

    def add(self, step: int, job_times: JobTimes, totals: Sequence[RankTimes]) -> None:
        """Add an observation, and replace the totals over all observations; write the file if that is cheap."""
        self._totals = list(totals)
        self._observations.append(
            {
                "step": step,
                "steps": job_times.ranks[0].steps,
                "step_s": job_times.step_s,
                "tokens_per_s": job_times.tokens_per_s(self._start.plan),
                "imbalance": job_times.imbalance,
            }
        )
        if len(self._observations) > MAX_OBSERVATIONS:
            del self._observations[::2]
        if time.monotonic() - self._written_s > self._writing_s / MAX_WRITING_FRACTION:
            self._write("running")

    def add_snapshots(self, step: int, snapshots: Sequence[Snapshot]) -> None:
        """Replace the snapshots of all ranks by those after ``step`` optimizer steps."""
        self._traced_step, self._snapshots = step, list(snapshots)

    def end(self, reason: str | None = None) -> None:
        """Write the file for the last time.

        Args:
            reason: why the job ends; left out, the error that ends this process, if any.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if reason is None and error is not None and error is not self._error_before:
            reason = f"{type(error).__name__}: {error}"
        if not self._totals:
            announce(
                f"no {self._path.name}: the job ended before a step was measured; the first two optimizer steps after "
                "a start or resume are never measured"
            )
        elif self._write(reason or "normally"):
            announce(f"the measurements are in {self._path}")

    def _write(self, ended: str) -> bool:
        """Write the file; return whether that succeeded. ``ended``: how the job ended, or "running"."""
        begin_s = time.monotonic()
        try:
            write_run(self._run_file(ended), self._path)
        except OSError as error:  # a full disk must not end a training
            logger.error("the measurements of this job cannot be written to %s: %s", self._path, error)
            return False
        finally:
            self._written_s = time.monotonic()
            self._writing_s = self._written_s - begin_s
        return True

    def _run_file(self, ended: str) -> RunFile:
        """Return the content of the file."""
        return RunFile(
            plan=self._start.plan,
            scenario=self._scenario,
            predicted_s=_predicted_s(self._start),
            ended=ended,
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=self._versions,
            steps=int(self._totals[0].steps),
            ranks=tuple(map(_measured_rank, self._totals, self._snapshots)),
            observations=tuple(self._observations),
            changes=tuple(change.to_dict() for change in self._changes()),
            events=tuple(self.events),
            experts=None if self.experts is None else self.experts.to_dict(),
            traced_step=self._traced_step,
            trace=tuple(snapshot.trace for snapshot in self._snapshots),
        )


def _measured_rank(times: RankTimes, snapshot: Snapshot) -> MeasuredRank:
    """Return a rank's entry of ``run.json``: its times as means per step, and its device and memory."""
    work_fields = ("step_s", "attention_s", "model_s", "tokens")  # sums over steps; the file has means
    wait_fields = ("all_to_all_s", "ring_wait_s", "idle_s", "hop_s", "bubble_s", "sync_s")  # sums, too
    latest_step_fields = ("own_min_s", "own_median_s", "own_max_s")
    return MeasuredRank(
        device=snapshot.device,
        memory_bytes=snapshot.memory_bytes,
        **{name: getattr(times, name) / times.steps for name in (*work_fields, *wait_fields)},
        **{name: getattr(times, name) for name in latest_step_fields},
    )


def _predicted_s(start: JobStart) -> float | None:
    """Return the seconds of a step that were predicted at the start; None without a prediction."""
    if start.is_of_pipelines:
        return planned_step_s(start.plan)
    return max((forecast.prediction.iteration_s for forecast in start.forecasts), default=None)


def _scenario_of(start: JobStart) -> PlanScenario | None:
    """Return the scenario of the plan's prediction; None without a prediction."""
    if start.is_of_pipelines:
        return _scenario_of_pipelines(start)
    if not start.forecasts:
        return None
    costs = [forecast.cost for forecast in start.forecasts]
    world_cluster = costs[0].workload.zero_cluster  # all replicas together, if ZeRO shards over them
    return PlanScenario(
        cost_model=costs[0].name,
        model=costs[0].model,
        workload=costs[0].workload,
        clusters=tuple(cost.cluster for cost in costs) if world_cluster is None else (world_cluster,),
    )


def _scenario_of_pipelines(start: JobStart) -> PlanScenario | None:
    """Return the scenario of a plan of pipelines; None if the section does not describe model and devices.

    The devices are those of the search, or, for a plan from a file, those of the section's cluster file.
    """
    facts, plan = start.facts, start.plan
    try:
        if start.searched is not None:
            cluster = start.searched.planned.costs.cluster
        elif start.section.cluster == "measure":
            return None
        else:
            cluster = load_cluster(start.section.cluster)
        is_known = facts.model.spec is not None and cluster.num_ranks == World.current().size
        workload = pipelines_workload(
            facts,
            on_host=default_device().type == "cpu",
            seq_len=plan.seq_len,
            checkpointing=plan.activation_checkpointing,
        )
    except HeteroError as error:
        logger.debug("run.json has no scenario of its plan: %s", error)
        return None
    if not is_known:
        return None
    if plan.is_replicas and plan.ranks == tuple(range(len(plan.ranks))):
        cluster = cluster.part(0, len(plan.ranks))  # without ranks that are idle
    return PlanScenario(cost_model=COST_MODEL, model=facts.model.expect_spec(), workload=workload, clusters=(cluster,))


def _versions() -> dict[str, str]:
    """Return the releases of Python and of the packages that are installed."""
    packages = {name: release_of(name) for name in _PACKAGES}
    return {"python": sys.version.split()[0], **{name: text for name, text in packages.items() if text is not None}}
