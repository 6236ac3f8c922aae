"""The whole job as one value: pipelines with their batches, stages with their ranks and layers.

    {"version": 2, "model": {"num_layers": 40, "num_heads": 40, "num_kv_heads": 40}, "seq_len": 4096,
     "pipelines": [
       {"micro_batch_size": 1, "micro_batches": 14, "stages": [
         {"ranks": [0, 1], "layers": [0, 30], "inner": "tensor", "in_flight": 2},
         {"ranks": [4],    "layers": [30, 40]}]},
       {"micro_batch_size": 1, "micro_batches": 10, "stages": [
         {"ranks": [2, 3], "layers": [0, 40], "inner": "sequence", "schedule": {...}}]}],
     "zero": {"stage": 1, "owner_weights": {"0": 4.0, "4": 1.0}},
     "predicted": {"step_s": 20.9}}

A *pipeline* is stages in order that hold every layer once; pipelines share the samples of an optimizer step (data
parallelism). A *replica* is a pipeline of one stage. A step uses the next G samples of the order in which one process
would read them; they are cut into one run of samples per pipeline, in order, and each run into micro-batches.

Files of version 1, a schedule or a list of replicas, are plans of one-stage pipelines (`read_plan`).

Plain data; nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from ds_hetero.common.reading import (
    MAX_BATCH,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SEQ_LEN,
    JsonDict,
    JsonObject,
    check_content,
    expect_object_keys,
    expect_whole_number,
    is_list,
    is_weight,
    is_whole,
    shortened,
)
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.values.plans.batches import BatchSplit
from ds_hetero.values.schedule import Schedule, schedules_for_world

VERSION = 2

_BATCH_KEYS = ("micro_batch_size", "micro_batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The numbers of a model that a plan depends on."""

    num_layers: int  # decoder layers
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOwners:
    """Who owns the optimizer state."""

    stage: int  # ZeRO stage
    owner_weights: tuple[tuple[int, float], ...] = ()  # (rank, weight), ascending; empty if all own alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Ranks that hold the same layers.

    Args:
        layers: decoder layers ``[from, to)``; None for all layers of a model whose number the plan does not say.
            The embedding belongs to the stage with layer 0, the last norm and the head to the one with the last layer.
    """

    ranks: tuple[int, ...]  # global ranks, in any order
    layers: tuple[int, int] | None = None
    inner: str = "one"  # one of `INNER`
    schedule: Schedule | None = None  # of a ``"sequence"`` stage, in global ranks
    in_flight: int | None = None  # forwards that may run before their backward; None for 1F1B's, stages to the last

    @property
    def num_layers(self) -> int | None:
        """Layers of the stage; None where the plan does not say."""
        return None if self.layers is None else self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages in order, which hold every layer once."""

    stages: tuple[Stage, ...]  # first to last
    micro_batch_size: int | None = None  # samples of one; None where DeepSpeed's configuration says, alike for all
    micro_batches: int | None = None  # micro-batches per optimizer step; None likewise

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all stages, ascending."""
        return tuple(sorted(chain.from_iterable(stage.ranks for stage in self.stages)))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose forward may run before their backward on the stage with this index."""
        in_flight = self.stages[stage].in_flight
        return len(self.stages) - stage if in_flight is None else in_flight


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of every rank of the job.

    Args:
        activation_checkpointing: keep only the input of every layer and compute it again in the backward; None where
            the script says.

    Raises:
        PlanError: the pipelines do not hold every layer once, a rank is in two stages, a stage does not fit its ranks
            or the model. The message names the field, its values and the rule.
    """

    pipelines: tuple[Pipeline, ...]  # with their stages and batches
    model: PlannedModel | None = None  # the model that it is for; None in a plan of replicas read from version 1
    seq_len: int | None = None  # tokens of a sequence that it was planned for, if known
    zero: ZeroOwners | None = None  # owners of optimizer state; None where ds_config.json says
    activation_checkpointing: bool | None = None
    predicted: JsonObject | None = field(default=None, compare=False)  # for people; takes no part in comparisons

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all pipelines, ascending; ranks of the job that are not among them are idle."""
        return tuple(sorted(chain.from_iterable(pipeline.ranks for pipeline in self.pipelines)))

    @cached_property
    def batch_split(self) -> BatchSplit | None:
        """How pipelines that take different batches share the samples of a step; None where all take the same."""
        if self.pipelines[0].micro_batches is None:
            return None
        return BatchSplit(
            micro_batch_sizes=tuple(pipeline.micro_batch_size or 0 for pipeline in self.pipelines),
            micro_batches=tuple(pipeline.micro_batches or 0 for pipeline in self.pipelines),
        )

    @property
    def is_replicas(self) -> bool:
        """Whether every pipeline is one stage of sequence parallelism, which `schedules` lists."""
        return all([stage.inner for stage in pipeline.stages] == ["sequence"] for pipeline in self.pipelines)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules of a plan of replicas, by pipeline. Raises `PlanError`: a pipeline is not one sequence stage."""
        if not self.is_replicas:
            raise PlanError(
                "this plan has pipelines of several stages or stages of tensor parallelism; only plans of replicas "
                "have one schedule per pipeline."
            )
        schedules = (pipeline.stages[0].schedule for pipeline in self.pipelines)
        return tuple(schedule for schedule in schedules if schedule is not None)

    def place_of(self, rank: int) -> tuple[int, int] | None:
        """Return the indices (pipeline, stage) of a rank; None if it is idle."""
        return self._places.get(rank)

    def stage_of(self, rank: int) -> Stage | None:
        """Return the stage of a rank; None if it is idle."""
        place = self.place_of(rank)
        return None if place is None else self.pipelines[place[0]].stages[place[1]]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        places: dict[int, tuple[int, int]] = {}
        for i, pipeline in enumerate(self.pipelines):
            for j, stage in enumerate(pipeline.stages):
                places.update(dict.fromkeys(stage.ranks, (i, j)))
        return places

    def with_schedules(self, schedules: Sequence[Schedule]) -> Plan:
        """Return the same plan of replicas with other schedules, one per pipeline."""
        pipelines = []
        for pipeline, schedule in zip(self.pipelines, schedules, strict=True):
            stage = replace(pipeline.stages[0], ranks=schedule.ranks, schedule=schedule)
            pipelines.append(replace(pipeline, stages=(stage,)))
        return replace(self, pipelines=tuple(pipelines))

    def with_layers(self) -> Plan:
        """Return the same plan in which pipelines of one stage say that it holds all layers, if the model is known."""
        if self.model is None:
            return self
        pipelines = []
        for pipeline in self.pipelines:
            first = pipeline.stages[0]
            if first.layers is None:  # it is the only stage
                pipeline = replace(pipeline, stages=(replace(first, layers=(0, self.model.num_layers)),))
            pipelines.append(pipeline)
        return replace(self, pipelines=tuple(pipelines))

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the canonical JSON without the prediction; ranks compare it before they use the plan."""
        content = {key: value for key, value in self.to_dict().items() if key != "predicted"}
        import hashlib  # see `Schedule.fingerprint`

        return int.from_bytes(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:8], "big") >> 1

    @classmethod
    def of_replicas(cls, schedules: Iterable[Schedule], batch_split: BatchSplit | None = None) -> Plan:
        """The plan of one-stage pipelines that run these schedules, in global ranks, with batches that may differ."""
        stages = [Stage(ranks=schedule.ranks, inner="sequence", schedule=schedule) for schedule in schedules]
        if batch_split is None:
            return cls(pipelines=tuple(Pipeline(stages=(stage,)) for stage in stages))
        pipelines = []
        for stage, size, number in zip(stages, batch_split.micro_batch_sizes, batch_split.micro_batches, strict=True):
            pipelines.append(Pipeline(stages=(stage,), micro_batch_size=size, micro_batches=number))
        return cls(pipelines=tuple(pipelines))

    def to_dict(self) -> JsonDict:
        """Return the content of a plan file, version 2."""
        content: JsonDict = {"version": VERSION}
        if self.model is not None:
            content["model"] = asdict(self.model)
        if self.seq_len is not None:
            content["seq_len"] = self.seq_len
        content["pipelines"] = [_pipeline_to_dict(pipeline) for pipeline in self.pipelines]
        if self.zero is not None:
            content["zero"] = {"stage": self.zero.stage}
            if self.zero.owner_weights:
                content["zero"]["owner_weights"] = {str(rank): weight for rank, weight in self.zero.owner_weights}
        if self.activation_checkpointing is not None:
            content["activation_checkpointing"] = self.activation_checkpointing
        if self.predicted is not None:
            content["predicted"] = dict(self.predicted)
        return content

    def to_replicas_dict(self) -> JsonDict:
        """Return the content of a file of replicas, version 1. Raises `PlanError`: see `schedules`."""
        pairs = zip(self.schedules, self.pipelines, strict=True)
        replicas = [{"schedule": schedule.to_dict(), **_batches_of(pipeline)} for schedule, pipeline in pairs]
        return {"version": 1, "replicas": replicas}


def _pipeline_to_dict(pipeline: Pipeline) -> JsonDict:
    return {**_batches_of(pipeline), "stages": [_stage_to_dict(stage) for stage in pipeline.stages]}


def _batches_of(pipeline: Pipeline) -> JsonDict:
    return {key: getattr(pipeline, key) for key in _BATCH_KEYS if getattr(pipeline, key) is not None}


def _stage_to_dict(stage: Stage) -> JsonDict:
    content: JsonDict = {"ranks": list(stage.ranks)}
    if stage.layers is not None:
        content["layers"] = list(stage.layers)
    if stage.inner != "one":
        content["inner"] = stage.inner
    if stage.schedule is not None:
        content["schedule"] = stage.schedule.to_dict()
    if stage.in_flight is not None:
        content["in_flight"] = stage.in_flight
    return content


INNER = ("one", "tensor", "sequence")
"""How the ranks of a stage share its work: a single rank; tensor parallelism; a schedule of sequence parallelism."""


def check_plan(plan: Plan) -> None:
    """Refuse a plan that is not consistent. Raises `PlanError`: the field, its values and the rule."""
    if not plan.pipelines:
        raise PlanError("pipelines is empty; a plan has at least one pipeline.")
    if plan.model is not None:
        _check_model(plan.model)
    if plan.seq_len is not None:
        expect_whole_number("seq_len", plan.seq_len, 1, MAX_SEQ_LEN, PlanError)
    for i, pipeline in enumerate(plan.pipelines):
        _check_pipeline(f"pipelines[{i}]", pipeline, plan.model)
    ranks = plan.ranks
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank, following in pairwise(ranks) if rank == following})
        raise PlanError(f"ranks {twice} are in more than one stage; a rank has one place at most.")
    batch_keys = [set(_batches_of(pipeline)) for pipeline in plan.pipelines]
    if any(batch_keys) and any(keys != set(_BATCH_KEYS) for keys in batch_keys):
        raise PlanError("micro_batch_size and micro_batches must be given for every pipeline, or for none.")
    if plan.zero is not None:
        _check_zero(plan.zero, set(ranks), any(len(pipeline.stages) > 1 for pipeline in plan.pipelines))


def _check_model(model: PlannedModel) -> None:
    for name, most in (("num_layers", MAX_LAYERS), ("num_heads", MAX_HEADS), ("num_kv_heads", MAX_HEADS)):
        expect_whole_number(f"model.{name}", getattr(model, name), 1, most, PlanError)
    if model.num_heads % model.num_kv_heads:
        raise PlanError(f"model.num_heads={model.num_heads} is not a multiple of num_kv_heads={model.num_kv_heads}.")


def _check_pipeline(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    if not pipeline.stages:
        raise PlanError(f"{where}.stages is empty; a pipeline has at least one stage.")
    for key in _BATCH_KEYS:
        if getattr(pipeline, key) is not None:
            expect_whole_number(f"{where}.{key}", getattr(pipeline, key), 1, MAX_BATCH, PlanError)
    for j, stage in enumerate(pipeline.stages):
        _check_stage(f"{where}.stages[{j}]", stage, model)
    _check_layers(where, pipeline, model)


def _check_stage(where: str, stage: Stage, model: PlannedModel | None) -> None:
    if not stage.ranks or len(set(stage.ranks)) < len(stage.ranks):
        raise PlanError(f"{where}.ranks must name at least one rank, each once, got {shortened(list(stage.ranks))}.")
    if not all(is_whole(rank, 0, MAX_RANKS) for rank in stage.ranks):
        raise PlanError(f"{where}.ranks must be whole numbers >= 0, got {shortened(list(stage.ranks))}.")
    if stage.inner not in INNER:
        raise PlanError(f"{where}.inner {shortened(stage.inner)} is unknown; it is one of {', '.join(INNER)}.")
    if stage.inner == "one" and len(stage.ranks) > 1:
        raise PlanError(
            f'{where} has {len(stage.ranks)} ranks {shortened(list(stage.ranks))}, but "inner" is "one". Say how they '
            'share the work: "tensor", or "sequence" with a schedule.'
        )
    if (stage.inner == "sequence") != (stage.schedule is not None):
        raise PlanError(f'{where}: a "sequence" stage has a schedule, and no other stage has one.')
    if stage.schedule is not None and sorted(stage.ranks) != list(stage.schedule.ranks):
        of_schedule, of_stage = shortened(list(stage.schedule.ranks)), shortened(list(stage.ranks))
        raise PlanError(f"{where}.schedule is of ranks {of_schedule}, the stage of {of_stage}.")
    if stage.in_flight is not None:
        expect_whole_number(f"{where}.in_flight", stage.in_flight, 1, MAX_BATCH, PlanError)
    if model is not None:
        _check_heads(where, stage, model)


def _check_heads(where: str, stage: Stage, model: PlannedModel) -> None:
    if stage.inner == "tensor" and model.num_heads % len(stage.ranks):
        raise PlanError(
            f"{where} cuts {model.num_heads} heads over {len(stage.ranks)} ranks; a tensor-parallel degree divides the "
            "heads."
        )
    schedule = stage.schedule
    if schedule is None:
        return
    if (schedule.num_heads, schedule.num_kv_heads) != (model.num_heads, model.num_kv_heads):
        raise PlanError(
            f"{where}.schedule is for {schedule.num_heads} heads and {schedule.num_kv_heads} KV heads, the model of "
            f"the plan has {model.num_heads} and {model.num_kv_heads}."
        )


def _check_layers(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    layers = [stage.layers for stage in pipeline.stages]
    if layers == [None]:
        return
    if model is None:
        raise PlanError(f"{where} says which layers its stages hold, so the plan must have model.num_layers.")
    cuts = [0, *(interval[1] for interval in layers if interval is not None)]
    consecutive = list(pairwise(cuts))
    has_empty = any(start >= stop for start, stop in consecutive)
    if layers != consecutive or cuts[-1] != model.num_layers or has_empty:
        shown = [None if interval is None else list(interval) for interval in layers]
        raise PlanError(
            f"{where}: the stages hold layers {shortened(shown)}; they must be consecutive, of at least one layer "
            f"each, and cover [0, {model.num_layers}) once."
        )


def _check_zero(zero: ZeroOwners, ranks: set[int], has_stages: bool) -> None:
    if not is_whole(zero.stage, 0, 3):
        raise PlanError(f"zero.stage must be 0, 1, 2 or 3, got {shortened(zero.stage)}.")
    if zero.stage == 3 and has_stages:
        raise PlanError(
            "zero.stage 3 does not work with pipelines of several stages, whose ranks hold their layers whole. "
            "Use 1 or 2."
        )
    for rank, weight in zero.owner_weights:
        if rank not in ranks or not is_weight(weight):
            raise PlanError(
                f"zero.owner_weights gives rank {rank} the weight {shortened(weight)}; it takes finite weights >= 0 of "
                "ranks that have a place in the plan."
            )
    if zero.owner_weights and not any(weight for _, weight in zero.owner_weights):
        raise PlanError("zero.owner_weights are all zero; somebody must own the optimizer state.")


SCENARIO = "scenario"
"""The key of a plan file that says what the plan was made for, see `ds_hetero.reporting.scenario`."""


def read_plan(data: Any, world_size: int | None = None) -> Plan:
    """Read a plan, a list of replicas (version 1) or a schedule (version 1).

    What the file says of its scenario is for reports, and takes no part in the plan.

    Args:
        world_size: ranks of the job; a single schedule is repeated over consecutive blocks of ranks. Left out, it
            stands for one replica.

    Raises:
        ScheduleError: a file of version 1 is wrong, or its schedule cannot be repeated over the job.
        PlanError: a file of version 2 is wrong.
    """
    if isinstance(data, Mapping):
        data = {key: value for key, value in data.items() if key != SCENARIO}
    if isinstance(data, Mapping) and ("pipelines" in data or data.get("version") == VERSION):
        return _read_plan(data)
    if isinstance(data, Mapping) and "replicas" in data:
        return _read_replicas(data)
    schedule = Schedule.from_dict(data)
    return Plan.of_replicas((schedule,) if world_size is None else schedules_for_world(schedule, world_size))


def _read_replicas(data: JsonObject) -> Plan:
    """Read ``{"version": 1, "replicas": [{"schedule", "micro_batch_size", "micro_batches"}, ...]}``."""
    if set(data) != {"version", "replicas"} or not is_whole(data["version"], 1, 1) or not is_list(data["replicas"]):
        raise ScheduleError(
            'a file of several replicas takes "version": 1 and "replicas": [...], '
            f"got {shortened(sorted(data, key=str))}."
        )
    if not data["replicas"]:
        raise ScheduleError("replicas is empty; a job has at least one replica.")
    known = {"schedule", *_BATCH_KEYS}
    for i, replica in enumerate(data["replicas"]):
        if not isinstance(replica, Mapping) or "schedule" not in replica or set(replica) - known:
            raise ScheduleError(
                f"replicas[{i}] takes schedule, micro_batch_size and micro_batches, got {shortened(replica)}."
            )
    schedules = tuple(Schedule.from_dict(replica["schedule"]) for replica in data["replicas"])
    ranks = list(chain.from_iterable(schedule.ranks for schedule in schedules))
    if len(set(ranks)) < len(ranks):
        raise ScheduleError(
            f"the schedules of the replicas hold ranks {shortened([list(schedule.ranks) for schedule in schedules])}; "
            "a rank is in one replica alone. Give every replica ranks of its own."
        )
    batch_keys = [set(replica) & set(_BATCH_KEYS) for replica in data["replicas"]]
    if not any(batch_keys):
        if len({schedule.sp_size for schedule in schedules}) > 1:
            raise ScheduleError(
                f"replicas of {[schedule.sp_size for schedule in schedules]} ranks must say what each is to train on: "
                "give micro_batch_size and micro_batches for every replica."
            )
        return Plan.of_replicas(schedules)
    if any(keys != set(_BATCH_KEYS) for keys in batch_keys):
        raise ScheduleError("micro_batch_size and micro_batches must be given for every replica, or for none.")
    sizes, counts = (tuple(replica[key] for replica in data["replicas"]) for key in _BATCH_KEYS)
    return Plan.of_replicas(schedules, BatchSplit(micro_batch_sizes=sizes, micro_batches=counts))


def _read_plan(data: JsonObject) -> Plan:
    """Read a file of version 2."""
    further = {"model", "seq_len", "zero", "activation_checkpointing", "predicted"}
    expect_object_keys("plan", data, {"version", "pipelines"}, further, PlanError)
    if not is_whole(data["version"], VERSION, VERSION):
        version = shortened(data["version"])
        raise PlanError(f"plan version {version} is unknown; this release reads versions 1 and {VERSION}.")
    model = None
    if "model" in data:
        names = {"num_layers", "num_heads", "num_kv_heads"}
        expect_object_keys("model", data["model"], names, frozenset(), PlanError)
        model = PlannedModel(**{name: data["model"][name] for name in sorted(names)})
    zero = None
    if "zero" in data:
        expect_object_keys("zero", data["zero"], {"stage"}, {"owner_weights"}, PlanError)
        zero = ZeroOwners(stage=data["zero"]["stage"], owner_weights=_owner_weights(data["zero"]))
    predicted = data.get("predicted")
    if predicted is not None and not isinstance(predicted, Mapping):
        raise PlanError(f"predicted must be an object, got {type(predicted).__name__}.")
    check_content(predicted, "plan: predicted", PlanError)
    checkpointing = data.get("activation_checkpointing")
    if checkpointing is not None and not isinstance(checkpointing, bool):
        raise PlanError(f"activation_checkpointing must be true or false, got {shortened(checkpointing)}.")
    if not is_list(data["pipelines"]):
        raise PlanError(f"pipelines must be a list, got {type(data['pipelines']).__name__}.")
    pipelines = tuple(_read_pipeline(f"pipelines[{i}]", pipeline) for i, pipeline in enumerate(data["pipelines"]))
    return Plan(
        pipelines=pipelines,
        model=model,
        seq_len=data.get("seq_len"),
        zero=zero,
        activation_checkpointing=checkpointing,
        predicted=predicted,
    )


def _owner_weights(zero: JsonObject) -> tuple[tuple[int, float], ...]:
    weights = zero.get("owner_weights", {})
    if not isinstance(weights, Mapping) or not all(map(_is_rank, weights)):
        raise PlanError('zero.owner_weights takes ranks and their weights, such as {"0": 4.0, "4": 1.0}.')
    return tuple(sorted((int(rank), weight) for rank, weight in weights.items()))


def _is_rank(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_RANKS))


def _read_pipeline(where: str, data: Any) -> Pipeline:
    expect_object_keys(where, data, {"stages"}, set(_BATCH_KEYS), PlanError)
    if not is_list(data["stages"]):
        raise PlanError(f"{where}.stages must be a list, got {type(data['stages']).__name__}.")
    stages = tuple(_read_stage(f"{where}.stages[{j}]", stage) for j, stage in enumerate(data["stages"]))
    return Pipeline(stages=stages, **{key: data[key] for key in _BATCH_KEYS if key in data})


def _read_stage(where: str, data: Any) -> Stage:
    expect_object_keys(where, data, {"ranks"}, {"layers", "inner", "schedule", "in_flight"}, PlanError)
    for key, most in (("ranks", MAX_RANKS), ("layers", MAX_LAYERS)):
        if key in data and not (is_list(data[key]) and all(is_whole(value, 0, most) for value in data[key])):
            raise PlanError(f"{where}.{key} must be a list of whole numbers >= 0, got {shortened(data[key])}.")
    layers = tuple(data["layers"]) if "layers" in data else None
    if layers is not None and len(layers) != 2:
        raise PlanError(f"{where}.layers must be [from, to), got {shortened(list(layers))}.")
    try:
        schedule = Schedule.from_dict(data["schedule"]) if "schedule" in data else None
    except ScheduleError as error:
        raise PlanError(f"{where}.schedule: {error}") from None
    return Stage(
        ranks=tuple(data["ranks"]),
        layers=layers,
        inner=data.get("inner", "one"),
        schedule=schedule,
        in_flight=data.get("in_flight"),
    )
