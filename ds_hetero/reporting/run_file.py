"""``run.json``: what a job measured, and which plan it belongs to.

    {"format": "ds_hetero run", "version": 1, "digest": "1f0c...", "plan": {...}, "scenario": {...},
     "ended": "normally", "versions": {"torch": ...}, "steps": 200, "ranks": [{"rank": 0, "attention_s": 0.41, ...}],
     "observations": [...], "trace": {"step": 12, "ranks": [[["ds_hetero.forward", 0.0, 0.3], ...], ...]}}

Times are seconds; those of a rank are per step. The digest is that of the plan that the job began with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from ds_hetero.common.reading import JsonDict, JsonObject, read_file, shortened, write_whole
from ds_hetero.errors import ConfigError, PlanError
from ds_hetero.reporting.scenario import PlanScenario, read_scenario
from ds_hetero.values.plans import Plan, read_plan

FORMAT, VERSION = "ds_hetero run", 1
MAX_TRACED = 20_000  # ranges of one rank

_TEXTS = ("ended", "written")
_OBSERVATION = ("step", "steps", "step_s", "tokens_per_s", "imbalance")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRank:
    """Where a mean step of one rank went; see `ds_hetero.runtime.step_clock.StepTimes`."""

    device: str  # its name
    step_s: float  # seconds of a step
    attention_s: float  # of it, in attention
    model_s: float  # of it, in the rest of forward and backward
    all_to_all_s: float  # of it, in exchanges
    ring_wait_s: float  # of it, waiting for keys and values
    idle_s: float  # of it, waiting in other collectives
    tokens: float  # that the rank held, per step
    memory_bytes: int  # most memory in use: of the device, on CPUs of the process
    own_min_s: float  # shortest computing time of the latest steps
    own_median_s: float  # median of it
    own_max_s: float  # longest of it
    hop_s: float = 0.0  # of a step, in sending to neighbouring stages, and in what was on its way from them
    bubble_s: float = 0.0  # of it, waiting for stages that still computed
    sync_s: float = 0.0  # of it, bringing gradients of pipelines to their owners and values back

    @property
    def rest_s(self) -> float:
        """The optimizer, the loader, the host: what the other parts leave of a step."""
        parts = self.attention_s + self.model_s + self.all_to_all_s + self.ring_wait_s + self.idle_s
        return self.step_s - parts - self.hop_s - self.bubble_s - self.sync_s


TracedRange = tuple[str, float, float]
"""Name of a range, its begin and its end, in seconds since the step began on that rank."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """Measurements of a job.

    Args:
        observations: ``step``, ``steps``, ``step_s``, ``tokens_per_s`` and ``imbalance`` of each, oldest first.
        changes: of a replica's schedule: ``step``, ``replica``, ``schedule`` and ``gain``; of the layers of stages:
            ``step``, ``layers`` by pipeline and stage, and ``gain``.
        events: of an elastic job, those before it began anew included: ``kind``, ``time`` in seconds since 1970,
            ``ranks``, and what else each kind has.
    """

    plan: Plan  # that the job began with
    scenario: PlanScenario | None  # what it was made for; None where the cost model knows no devices or model
    predicted_s: float | None  # step time that was predicted at the start; None likewise
    ended: str  # ``"normally"``, ``"running"`` (not yet, or killed), or the text of the error
    written: str  # date and time, ISO 8601, UTC
    versions: Mapping[str, str]  # of the packages
    steps: int  # that were observed
    ranks: tuple[MeasuredRank, ...]  # a mean step of every rank
    observations: tuple[Mapping[str, float], ...] = ()
    changes: tuple[JsonObject, ...] = ()
    events: tuple[JsonObject, ...] = ()
    traced_step: int | None = None  # number of the step whose ranges follow; None without
    trace: tuple[tuple[TracedRange, ...], ...] = ()  # ranges of every rank in that step

    @property
    def step_s(self) -> float:
        """Mean seconds of a step on the slowest rank."""
        return max(rank.step_s for rank in self.ranks)

    def to_dict(self) -> JsonDict:
        """Return the content of the file."""
        return {
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
            "observations": [dict(each) for each in self.observations],
            "changes": [dict(each) for each in self.changes],
            **({"events": [dict(each) for each in self.events]} if self.events else {}),
            "trace": {"step": self.traced_step, "ranks": [[list(one) for one in rank] for rank in self.trace]},
        }


def plan_digest(plan: Plan) -> str:
    """Name of a plan in a run file: 16 hexadecimal digits."""
    return f"{plan.fingerprint:016x}"


def expect_writable(folder: str) -> None:
    """Make the folder where there is none. Raises `ConfigError`: it cannot be written to, and why."""
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
    """Text of an event of an elastic job, beside its kind and its time."""
    return ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("kind", "time"))


def write_run(run: RunFile, path: Path) -> None:
    """Write the file; see `write_whole`."""
    write_whole(path, json.dumps(run.to_dict(), allow_nan=False))


def read_run(path: str | Path) -> RunFile:
    """Read a run file. Raises `PlanError`: it cannot be read, is of another version, or a key is wrong."""
    data = read_file(path, "run", PlanError)
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PlanError(
            f'{path} is no run file: "format" is not "{FORMAT}". A job writes one with "report" in its section.'
        )
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise PlanError(f"run file version {shortened(data.get('version'))} is unknown; this release reads {VERSION}.")
    try:
        return _read(data)
    except KeyError as error:
        raise PlanError(f"run file {shortened(str(path))} lacks {error}.") from None
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"run file {shortened(str(path))} is damaged: {error}.") from None


def _read(data: JsonObject) -> RunFile:
    plan = read_plan(data["plan"])
    if data["digest"] != plan_digest(plan):
        raise PlanError(
            f'"digest" of the run file is {shortened(data["digest"])}, and its plan has {plan_digest(plan)}.'
        )
    trace, step = data["trace"]["ranks"], data["trace"]["step"]
    ranks = tuple(_read_rank(rank) for rank in data["ranks"])
    if len(ranks) < len(plan.ranks):
        raise PlanError(f'"ranks" of the run file has {len(ranks)} entries, its plan has {len(plan.ranks)} ranks.')
    scenario, predicted_s = data["scenario"], data["predicted_s"]
    return RunFile(
        plan=plan,
        scenario=None if scenario is None else read_scenario(scenario),
        predicted_s=None if predicted_s is None else _number(predicted_s, "predicted_s"),
        **{name: _text(data[name], name) for name in _TEXTS},
        versions={_text(key, "versions"): _text(value, "versions") for key, value in data["versions"].items()},
        steps=int(_number(data["steps"], "steps")),
        ranks=ranks,
        observations=tuple({key: _number(one[key], key) for key in _OBSERVATION} for one in data["observations"]),
        changes=tuple(dict(one) for one in data["changes"]),
        events=tuple(_read_event(one) for one in data.get("events", ())),
        traced_step=None if step is None else int(_number(step, "trace.step")),
        trace=tuple(tuple(map(_read_range, rank)) for rank in trace),
    )


def _read_rank(data: JsonObject) -> MeasuredRank:
    names = [field.name for field in fields(MeasuredRank) if field.name != "device"]
    data = {"hop_s": 0.0, "bubble_s": 0.0, "sync_s": 0.0, **data}  # files of before do not have these
    return MeasuredRank(device=_text(data["device"], "device"), **{name: _number(data[name], name) for name in names})


def _read_event(data: JsonObject) -> JsonObject:
    return {**data, "kind": _text(data["kind"], "events.kind"), "time": _number(data["time"], "events.time")}


def _read_range(data: Sequence[Any]) -> TracedRange:
    name, start_s, stop_s = data
    return _text(name, "trace"), _number(start_s, "trace"), _number(stop_s, "trace")


def _number(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise PlanError(f'"{name}" of the run file must be a number, got {shortened(value)}.')
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f'"{name}" of the run file must be text, got {shortened(value)}.')
    return value
