"""Read and write the run file, ``run.json``: the measurements of a job, with its plan.

    {"format": "ds_hetero run", "version": 1, "digest": "1f0c...", "plan": {...}, "scenario": {...},
     "ended": "normally", "versions": {"torch": ...}, "steps": 200, "ranks": [{"rank": 0, "attention_s": 0.41, ...}],
     "observations": [...], "trace": {"step": 12, "ranks": [[["ds_hetero.forward", 0.0, 0.3], ...], ...]}}

Times are in seconds; those of a rank are means per step. ``digest`` is that of the job's first plan.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from ds_hetero.common.atomic_writing import write_whole
from ds_hetero.common.reading import JsonDict, JsonObject, read_file, shortened
from ds_hetero.errors import ConfigError, PlanError
from ds_hetero.reporting.scenario import PlanScenario, read_scenario
from ds_hetero.values.plans import Plan, read_plan

FORMAT, VERSION = "ds_hetero run", 1
MAX_TRACED = 20_000  # ranges of one rank in the trace; chosen, never measured

_TEXTS = ("ended", "written")
_OBSERVATION = ("step", "steps", "step_s", "tokens_per_s", "imbalance")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRank:
    """Mean seconds of each part of a rank's step; see `ds_hetero.runtime.step_clock.StepTimes`."""

    device: str  # name of the device
    step_s: float  # the step, which the following times are parts of
    attention_s: float  # attention
    model_s: float  # rest of forward and backward
    all_to_all_s: float  # all-to-alls
    ring_wait_s: float  # waiting for keys and values
    idle_s: float  # waiting in other collectives
    tokens: float  # tokens of the rank, per step
    memory_bytes: int  # peak memory of the device; on CPUs of the process
    own_min_s: float  # shortest computing time of the latest steps
    own_median_s: float  # median computing time of the latest steps
    own_max_s: float  # longest computing time of the latest steps
    hop_s: float = 0.0  # sending to neighbouring stages, and waiting while their messages are on the wire
    bubble_s: float = 0.0  # waiting for stages that still compute
    sync_s: float = 0.0  # sending gradients of pipelines to their owners, and parameters back

    @property
    def rest_s(self) -> float:
        """Remainder of the step: the optimizer, the loader, the host."""
        parts = self.attention_s + self.model_s + self.all_to_all_s + self.ring_wait_s + self.idle_s
        return self.step_s - parts - self.hop_s - self.bubble_s - self.sync_s


TracedRange = tuple[str, float, float]
"""Name, begin and end of a range, in seconds since the step began on that rank."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """Measurements of a job.

    Args:
        observations: observed steps, oldest first, each with ``step``, ``steps``, ``step_s``, ``tokens_per_s`` and
            ``imbalance``.
        changes: changes of the plan, oldest first. A change of a replica's schedule has ``step``, ``replica``,
            ``schedule`` and ``gain``; a change of the layers of stages ``step``, ``layers`` by pipeline and stage, and
            ``gain``.
        events: events of an elastic job, also from before its restarts, each with ``kind``, ``time`` in seconds since
            1970, ``ranks``, and further keys that depend on the kind.
        experts: loads of experts that are divided among ranks: by rank ``experts`` of a layer, ``planned_share`` and
            ``share`` of all rows; ``rows`` of every expert by layer. None if experts are not divided.
    """

    plan: Plan  # first plan of the job
    scenario: PlanScenario | None  # scenario of the plan; None if the cost model lacks the devices or the model
    predicted_s: float | None  # seconds of a step, predicted at the start; None without a scenario
    ended: str  # ``"normally"``, ``"running"`` (not yet, or killed), or the text of the error
    written: str  # date and time, ISO 8601, UTC
    versions: Mapping[str, str]  # versions by package
    steps: int  # number of observed steps
    ranks: tuple[MeasuredRank, ...]  # mean step of every rank
    observations: tuple[Mapping[str, float], ...] = ()
    changes: tuple[JsonObject, ...] = ()
    events: tuple[JsonObject, ...] = ()
    experts: JsonObject | None = None
    traced_step: int | None = None  # number of the step in ``trace``; None without a trace
    trace: tuple[tuple[TracedRange, ...], ...] = ()  # ranges of every rank in that step

    @property
    def step_s(self) -> float:
        """Mean seconds of a step on the slowest rank."""
        return max(rank.step_s for rank in self.ranks)

    def to_dict(self) -> JsonDict:
        """Return the content of the file."""
        traced_ranks = [list(map(list, ranges)) for ranges in self.trace]
        content: JsonDict = {
            "format": FORMAT,
            "version": VERSION,
            "digest": plan_digest(self.plan),
            "plan": self.plan.to_dict(),
            "scenario": None if self.scenario is None else self.scenario.to_dict(),
            "predicted_s": self.predicted_s,
            **{name: getattr(self, name) for name in _TEXTS},
            "versions": dict(self.versions),
            "steps": self.steps,
            "ranks": [{"rank": number, **asdict(rank)} for number, rank in enumerate(self.ranks)],
            "observations": list(map(dict, self.observations)),
            "changes": list(map(dict, self.changes)),
        }
        if self.events:
            content["events"] = list(map(dict, self.events))
        if self.experts is not None:
            content["experts"] = dict(self.experts)
        content["trace"] = {"step": self.traced_step, "ranks": traced_ranks}
        return content


def plan_digest(plan: Plan) -> str:
    """Return the digest by which a run file names its plan: 16 hexadecimal digits."""
    return f"{plan.fingerprint:016x}"


def expect_writable(folder: str) -> None:
    """Make a folder if it is missing. Raises `ConfigError`: it cannot be made, or no file can be written to it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f'"heterogeneity.report": {shortened(folder)} cannot be written to: {reason}. Give a folder in which rank '
            "0 may write run.json, or leave the key out."
        ) from None


def event_text(event: JsonObject) -> str:
    """Return the text of an event of an elastic job, without kind and time: ``ranks [3], node b``."""
    return ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("kind", "time"))


def write_run(run: RunFile, path: Path) -> None:
    """Write a run file atomically: a reader gets the old or the new content."""
    write_whole(path, json.dumps(run.to_dict(), allow_nan=False))


def read_run(path: str | Path) -> RunFile:
    """Read a run file. Raises `PlanError`: it cannot be read, has another version, or a key is missing or wrong."""
    data = read_file(path, "run", PlanError)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PlanError(
            f'{path} is not a run file: "format" is not "{FORMAT}". A job writes one with "report" in its section.'
        )
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise PlanError(
            f"run file version {shortened(data.get('version'))} is unknown; this release reads {VERSION}. "
            "Run the job again with this release."
        )
    try:
        return _read(data)
    except KeyError as error:
        raise PlanError(
            f"run file {shortened(str(path))} lacks the key {error}. Give the file as the job wrote it."
        ) from None
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"run file {shortened(str(path))} is damaged: {error}. Give the file as the job wrote it."
        ) from None


def _read(data: JsonObject) -> RunFile:
    """Read the content of a run file. Raises `PlanError`, `KeyError`, `TypeError` and others: the content is wrong."""
    plan = read_plan(data["plan"])
    if data["digest"] != plan_digest(plan):
        raise PlanError(
            f'"digest" of the run file is {shortened(data["digest"])}, and its plan has {plan_digest(plan)}. '
            "Give the file as the job wrote it, or run the job again."
        )
    trace, step = data["trace"]["ranks"], data["trace"]["step"]
    ranks = tuple(_read_rank(rank) for rank in data["ranks"])
    if len(ranks) < len(plan.ranks):
        raise PlanError(
            f'"ranks" of the run file has {len(ranks)} entries, '
            f"its plan has {len(plan.ranks)} ranks. Give the file as the job wrote it."
        )
    scenario, predicted_s = data["scenario"], data["predicted_s"]
    return RunFile(
        plan=plan,
        scenario=None if scenario is None else read_scenario(scenario),
        predicted_s=None if predicted_s is None else _number(predicted_s, "predicted_s"),
        **{name: _text(data[name], name) for name in _TEXTS},
        versions={_text(key, "versions"): _text(value, "versions") for key, value in data["versions"].items()},
        steps=int(_number(data["steps"], "steps")),
        ranks=ranks,
        observations=tuple(map(_read_observation, data["observations"])),
        changes=tuple(map(dict, data["changes"])),
        events=tuple(map(_read_event, data.get("events", ()))),
        experts=None if data.get("experts") is None else _read_experts(data["experts"]),
        traced_step=None if step is None else int(_number(step, "trace.step")),
        trace=tuple(tuple(map(_read_range, ranges)) for ranges in trace),
    )


def _read_rank(data: JsonObject) -> MeasuredRank:
    """Read one rank's entry of ``"ranks"``."""
    names = [field.name for field in fields(MeasuredRank) if field.name != "device"]
    data = {"hop_s": 0.0, "bubble_s": 0.0, "sync_s": 0.0, **data}  # files of earlier releases lack these
    return MeasuredRank(device=_text(data["device"], "device"), **{name: _number(data[name], name) for name in names})


def _read_observation(data: JsonObject) -> dict[str, float]:
    """Read one entry of ``"observations"``."""
    return {key: _number(data[key], key) for key in _OBSERVATION}


def _read_experts(data: JsonObject) -> JsonObject:
    """Read the loads of divided experts."""
    by_rank = {name: [_number(value, name) for value in data[name]] for name in ("experts", "planned_share", "share")}
    return {**by_rank, "rows": [[_number(value, "rows") for value in layer] for layer in data["rows"]]}


def _read_event(data: JsonObject) -> JsonObject:
    """Read one event of an elastic job."""
    return {**data, "kind": _text(data["kind"], "events.kind"), "time": _number(data["time"], "events.time")}


def _read_range(data: Sequence[Any]) -> TracedRange:
    """Read one range of ``"trace"``: its name, and begin and end in seconds."""
    name, start_s, stop_s = data
    return _text(name, "trace"), _number(start_s, "trace"), _number(stop_s, "trace")


def _number(value: Any, name: str) -> Any:
    """Check that the value of a key is a finite number, and return it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise PlanError(f'"{name}" of the run file must be a number, got {shortened(value)}.')
    return value


def _text(value: Any, name: str) -> str:
    """Check that the value of a key is text, and return it."""
    if not isinstance(value, str):
        raise PlanError(f'"{name}" of the run file must be text, got {shortened(value)}.')
    return value
