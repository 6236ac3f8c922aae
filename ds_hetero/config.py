"""The "heterogeneity" section of ds_config.json, and the schedules it stands for.

    section = read_section(ds_config)                     # None without a section, or with "enabled": false
    schedules = resolve(section, num_heads=32, num_kv_heads=8, world_size=8, sp_sizes={"sequence_parallel_size": 4})

Everything here can be known by one rank alone; making all ranks agree on it is `integrations.agreement`'s part.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_hetero.baselines import UNIFORM, proportional, ulysses
from ds_hetero.errors import ConfigError, ScheduleError
from ds_hetero.kernel_names import KERNEL_NAMES, KernelName
from ds_hetero.replicas import holds_replicas, read_replicas
from ds_hetero.schedule import Schedule, schedules_for_world

if TYPE_CHECKING:
    from ds_hetero.cluster import Cluster

__all__ = [
    "SECTION",
    "HeterogeneitySection",
    "ReplanSection",
    "batches_of_replicas",
    "check_schedules",
    "cluster_of_job",
    "clusters_of_replicas",
    "needs_measuring",
    "needs_planner",
    "read_section",
    "resolve",
    "sp_size_of",
]

SECTION = "heterogeneity"

# Strategies by name: uniform ones, those that need to know the devices, and the search.
_UNIFORM = tuple(UNIFORM)
_FROM_DEVICES = ("proportional",)
_FROM_PLANNER = ("plan", "lut", "formula")
_STRATEGIES = (*_UNIFORM, *_FROM_DEVICES, *_FROM_PLANNER)

_Result = TypeVar("_Result")

Search = Callable[[str, "Cluster"], Schedule]
"""From the name of a searching strategy and the cluster of one replica to a schedule of ranks that begin at 0."""


class ReplanSection(BaseModel):
    """``"replan"``: search again while training when the measured speeds have moved.

    Args:
        enabled: off by default.
        interval_steps: optimizer steps between two looks at the speeds; it takes two looks at least to change.
        min_gain: predicted gain of step time below which the schedule stays, as a share (0.05 is 5 %).
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = False
    interval_steps: int = Field(default=5, ge=1)
    min_gain: float = Field(default=0.05, ge=0, lt=1)


class HeterogeneitySection(BaseModel):
    """The section as the user wrote it, checked. The table in README.md, "The heterogeneity section", is its manual."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True
    cluster: str | dict[str, Any] = "measure"
    schedule: str | dict[str, Any] = "plan"
    seq_len: int | None = Field(default=None, ge=1)
    layout: Literal["contiguous", "zigzag"] | None = None
    attention: KernelName | None = None
    loss: Literal["replica_mean", "local_mean", "local_sum", "local_share"] | None = None
    zero_partition: Literal["uniform", "memory"] | list[float] = "uniform"
    replan: ReplanSection = ReplanSection()

    @field_validator("zero_partition")
    @classmethod
    def _usable_weights(cls, value: str | list[float]) -> str | list[float]:
        if isinstance(value, list) and (not any(value) or any(not 0 <= weight < float("inf") for weight in value)):
            raise ValueError("must hold one finite weight >= 0 per rank, and not only zeros")
        return value


_ACCEPTED = {
    "enabled": "true or false",
    "cluster": '"measure", the path of a cluster file, or the same inline as an object',
    "schedule": f"the path of a schedule file, the same inline as an object, or one of {', '.join(_STRATEGIES)}",
    "seq_len": "a whole number >= 1, the tokens of a sequence that is planned for",
    "layout": '"contiguous" or "zigzag"',
    "attention": "one of " + ", ".join(f'"{name}"' for name in KERNEL_NAMES),
    "loss": '"replica_mean", "local_mean", "local_sum" or "local_share", for a loss that the script computes itself',
    "zero_partition": '"uniform", "memory", or a list of weights, one per rank',
    "replan": '{"enabled": true or false, "interval_steps": whole number >= 1, "min_gain": share >= 0 and < 1}',
    "replan.enabled": "true or false",
    "replan.interval_steps": "a whole number >= 1",
    "replan.min_gain": "a share >= 0 and < 1",
}


def read_section(ds_config: Mapping[str, Any]) -> HeterogeneitySection | None:
    """The section of a DeepSpeed configuration; None where there is none or it is switched off.

    Raises:
        ConfigError: unknown keys, wrong types, values that do not exist, combinations that cannot work; one message
            for all of them, with what would be accepted.
    """
    if SECTION not in ds_config:
        return None
    raw = ds_config[SECTION]
    if not isinstance(raw, Mapping):
        raise ConfigError(f'"{SECTION}" must be an object with keys {_keys(HeterogeneitySection)}; got {raw!r}.')
    if path := next(_autos(raw), None):
        raise ConfigError(
            f'"{SECTION}.{path}" is "auto", which accelerate refuses anywhere in ds_config.json. '
            f"{_accepted(path)} Leave the key out for its default."
        )
    try:
        section = HeterogeneitySection.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, raw))) from None
    return section if section.enabled else None


def needs_planner(section: HeterogeneitySection) -> bool:
    """Whether the schedule is searched for under a cost model."""
    return section.schedule in _FROM_PLANNER


def needs_measuring(section: HeterogeneitySection) -> bool:
    """Whether the live ranks are to be measured: something follows from it, or the section says so in words."""
    needed = section.schedule in (*_FROM_DEVICES, *_FROM_PLANNER) or section.zero_partition == "memory"
    return section.cluster == "measure" and (needed or "cluster" in section.model_fields_set)


# --- sizes -----------------------------------------------------------------------------------------


def sp_size_of(sp_sizes: Mapping[str, int | None]) -> int | None:
    """The one sequence-parallel size that the sources in ``sp_sizes`` name; None if none of them does.

    Args:
        sp_sizes: by the name under which the user knows the source, such as ``"sequence_parallel_size of ds_config"``.

    Raises:
        ConfigError: two sources disagree, or a size is no whole number >= 1.
    """
    given = {source: size for source, size in sp_sizes.items() if size is not None}
    for source, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{source} is {size!r}; it must be a whole number >= 1.")
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{source}={size}" for source, size in given.items())
        raise ConfigError(f"the sequence-parallel size is given twice: {listed}. Give it once, or make them equal.")
    return next(iter(given.values()), None)


# --- the schedule ----------------------------------------------------------------------------------


def resolve(
    section: HeterogeneitySection,
    *,
    num_heads: int,
    num_kv_heads: int,
    world_size: int,
    sp_sizes: Mapping[str, int | None],
    measured: Mapping[str, Any] | None = None,
    search: Search | None = None,
) -> tuple[Schedule, ...]:
    """The schedules that the section stands for, one per replica, in global ranks.

    Reads the files that the section names.

    Args:
        section: from `read_section`.
        num_heads: query heads of the model.
        num_kv_heads: its key/value heads.
        world_size: ranks of the job.
        sp_sizes: see `sp_size_of`; with no size given, a strategy spans the whole world.
        measured: content of a cluster file, in place of ``"cluster": "measure"``.
        search: for the strategies that are searched for, see `needs_planner`.

    Raises:
        ConfigError: sizes that disagree, a strategy that is not available.
        ScheduleError: the schedule does not fit the model or the world.
        ClusterError: from reading the cluster.
        PlanError: from the search.
    """
    if isinstance(section.schedule, str) and section.schedule in _STRATEGIES:
        sp_size = sp_size_of(sp_sizes) or world_size
        if world_size % sp_size:
            raise ConfigError(
                f"{world_size} processes cannot be divided into replicas of {sp_size} sequence-parallel ranks. "
                f"Launch a multiple of {sp_size} processes or change the sequence-parallel size."
            )
        if section.schedule in _UNIFORM:
            uniform = UNIFORM[section.schedule](sp_size, num_heads, num_kv_heads)
            schedules = schedules_for_world(uniform, world_size)
        elif sp_size == 1:  # nothing to decide
            schedules = schedules_for_world(ulysses(1, num_heads, num_kv_heads), world_size)
        else:
            clusters = clusters_of_replicas(section, measured, [sp_size] * (world_size // sp_size))
            schedules = _from_clusters(section.schedule, clusters, num_heads, num_kv_heads, search)
    else:
        schedules = _from_file(section.schedule, world_size)
    if section.layout:
        schedules = tuple(replace(schedule, layout=section.layout) for schedule in schedules)
    check_schedules(schedules, num_heads=num_heads, num_kv_heads=num_kv_heads, sp_sizes=sp_sizes)
    return schedules


def check_schedules(
    schedules: Sequence[Schedule], *, num_heads: int, num_kv_heads: int, sp_sizes: Mapping[str, int | None]
) -> None:
    """Refuse schedules of another model, or of other sizes than the user gave; arguments as for `resolve`.

    Raises:
        ConfigError: sizes that disagree.
        ScheduleError: the schedules do not fit the model.
    """
    _expect_model(schedules, num_heads, num_kv_heads)
    _expect_size(schedules, sp_sizes, sp_size_of(sp_sizes))


def clusters_of_replicas(
    section: HeterogeneitySection, measured: Mapping[str, Any] | None, sizes: Sequence[int]
) -> tuple[Cluster, ...]:
    """The cluster of every replica: its part of the section's cluster, or all of it if that describes one replica.

    Args:
        section: from `read_section`.
        measured: see `resolve`.
        sizes: ranks of every replica, which hold consecutive ranks.

    Raises:
        ConfigError: the cluster has another number of devices than the job or a replica, or nothing was measured.
        ClusterError: from reading the cluster.
    """
    source = measured if measured is not None else section.cluster
    if source == "measure":
        raise ConfigError(
            f'"{SECTION}.schedule": {json.dumps(section.schedule)} takes the devices from "cluster": "measure", but '
            "nothing was measured here. Launch the job, or give a cluster file."
        )
    from ds_hetero.cluster import load_cluster

    cluster = load_cluster(source)
    if set(sizes) == {cluster.num_ranks}:
        return (cluster,) * len(sizes)
    if cluster.num_ranks != sum(sizes):
        raise ConfigError(
            f'"{SECTION}.cluster" describes {cluster.num_ranks} devices, the job has {sum(sizes)} processes in '
            f"replicas of {', '.join(map(str, sorted(set(sizes))))}. Describe every device once, in rank order."
        )
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(cluster.part(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def cluster_of_job(
    section: HeterogeneitySection, measured: Mapping[str, Any] | None, world_size: int
) -> Cluster | None:
    """The cluster of all ranks; None where it is not known, or only that of one replica.

    Args:
        section: from `read_section`. measured: see `resolve`. world_size: ranks of the job.

    Raises:
        ClusterError: from reading the cluster.
    """
    source = measured if measured is not None else section.cluster
    if source == "measure":
        return None
    from ds_hetero.cluster import load_cluster

    cluster = load_cluster(source)
    return cluster if cluster.num_ranks == world_size else None


def _from_clusters(
    name: str, clusters: Sequence[Cluster], num_heads: int, num_kv_heads: int, search: Search | None
) -> tuple[Schedule, ...]:
    """One schedule per replica; replicas on equal devices share one."""
    found: dict[Cluster, Schedule] = {}
    for cluster in clusters:
        if cluster in found:
            continue
        if name in _FROM_DEVICES:  # attention, of which long sequences mostly consist
            speeds = [device.peak_flops_per_s * device.efficiency.attention_forward for device in cluster.devices]
            found[cluster] = proportional(speeds, num_heads, num_kv_heads)
        else:
            assert search is not None
            found[cluster] = search(name, cluster)
    firsts = [sum(cluster.num_ranks for cluster in clusters[:i]) for i in range(len(clusters))]
    return tuple(found[cluster].shifted(first) for cluster, first in zip(clusters, firsts, strict=True))


def batches_of_replicas(section: HeterogeneitySection) -> dict[str, Any] | None:
    """The content of the section's schedule, if it lists replicas and their batches; reads the file.

    Raises:
        ConfigError, ScheduleError: the file cannot be read, or is wrong.
    """
    if isinstance(section.schedule, str) and section.schedule in _STRATEGIES:
        return None

    def read(data: Any) -> dict[str, Any] | None:
        return dict(data) if holds_replicas(data) and read_replicas(data)[1] is not None else None

    return _read_source(section.schedule, read)


def _from_file(source: str | Mapping[str, Any], world_size: int) -> tuple[Schedule, ...]:
    def read(data: Any) -> tuple[Schedule, ...]:
        if holds_replicas(data):
            return read_replicas(data)[0]
        return schedules_for_world(Schedule.from_dict(data), world_size)

    return _read_source(source, read)


def _read_source(source: str | Mapping[str, Any], read: Callable[[Any], _Result]) -> _Result:
    """What ``read`` makes of a schedule file's content, or of the same inline; errors name the file."""
    where = source if isinstance(source, str) else "the inline schedule"
    data: Any = source
    if isinstance(source, str):
        if not Path(source).is_file():
            near = _near(source, _STRATEGIES)
            raise ConfigError(f'"{SECTION}.schedule": "{source}" is no file{near}. {_accepted("schedule")}')
        try:
            data = json.loads(Path(source).read_text())
        except (OSError, ValueError) as error:
            raise ScheduleError(f"{where} cannot be read as JSON: {error}") from None
    try:
        return read(data)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def _expect_model(schedules: Sequence[Schedule], num_heads: int, num_kv_heads: int) -> None:
    for schedule in schedules:
        if (schedule.num_heads, schedule.num_kv_heads) != (num_heads, num_kv_heads):
            raise ScheduleError(
                f"the schedule is for num_heads={schedule.num_heads}, num_kv_heads={schedule.num_kv_heads}; the model "
                f"has {num_heads} and {num_kv_heads}. Make a schedule for this model."
            )


def _expect_size(schedules: Sequence[Schedule], sp_sizes: Mapping[str, int | None], sp_size: int | None) -> None:
    sizes = [schedule.sp_size for schedule in schedules]
    wanted = sizes[0] if len(set(sizes)) == 1 else sum(sizes)
    if sp_size is not None and sp_size != wanted:
        source = next(source for source, size in sp_sizes.items() if size is not None)
        raise ConfigError(
            f'"{SECTION}.schedule" has replicas of {sizes} ranks, but {source} is {sp_size}. '
            f"Set it to {wanted}{', all ranks of the replicas together,' if len(set(sizes)) > 1 else ''} or leave it "
            "out where that is possible."
        )


# --- messages --------------------------------------------------------------------------------------


def _explain(error: ValidationError, raw: Mapping[str, Any]) -> Iterator[str]:
    """One line per wrong key, each naming the key, the value and what is accepted."""
    seen = set()
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"][: 2 if problem["loc"][:1] == ("replan",) else 1])
        if path in seen:  # a union reports once per member
            continue
        seen.add(path)
        message = problem["msg"].removeprefix("Value error, ")
        if not path:
            yield f'"{SECTION}": {message}.'
        elif problem["type"] == "extra_forbidden":
            model = ReplanSection if path.startswith("replan.") else HeterogeneitySection
            name = path.removeprefix("replan.")
            yield f'"{SECTION}.{path}" is unknown{_near(name, list(model.model_fields))}. The keys are {_keys(model)}.'
        else:
            said = f" {message}" if problem["type"] == "value_error" else ""
            yield f'"{SECTION}.{path}": {_value(raw, path)}{said}. {_accepted(path)}'


def _accepted(path: str) -> str:
    return f"It takes {_ACCEPTED[path]}." if path in _ACCEPTED else ""


def _value(raw: Mapping[str, Any], path: str) -> str:
    value: Any = raw
    for part in path.split("."):
        value = value[part]
    return json.dumps(value, default=repr)


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _near(value: str, known: Sequence[str]) -> str:
    matches = get_close_matches(value, known, n=1)
    return f' (did you mean "{matches[0]}"?)' if matches else ""


def _autos(value: Any, path: str = "") -> Iterator[str]:
    """Paths of every value "auto" in nested objects and lists."""
    if value == "auto":
        yield path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _autos(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _autos(inner, f"{path}[{i}]")
