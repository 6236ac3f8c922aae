"""Reader of plan files: plans (version 2), and lists of replicas or single schedules (version 1).

Files of version 1 become plans of one-stage pipelines. `Plan.to_dict` and `Plan.to_replicas_dict` write these files.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from ds_hetero.common.reading import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RANKS,
    JsonObject,
    check_content,
    expect_object_keys,
    expect_whole_number,
    is_list,
    is_whole,
    shortened,
)
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.values.plans.batches import BatchSplit
from ds_hetero.values.plans.plan import SCENARIO, VERSION, Plan
from ds_hetero.values.plans.stages import BATCH_KEYS, Pipeline, PlannedModel, Stage, ZeroOwners
from ds_hetero.values.schedule import Schedule, schedules_for_world


def read_plan(data: Any, world_size: int | None = None) -> Plan:
    """Read a plan, a list of replicas (version 1) or a schedule (version 1).

    The key ``"scenario"`` is ignored, since only reports use it.

    Args:
        data: content of the file.
        world_size: number of ranks of the job, over which a single schedule is repeated in consecutive blocks; None:
            a single schedule is one replica.

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
            'a plan file of several replicas has two keys, "version": 1 and a list "replicas"; '
            f"got the keys {shortened(sorted(data, key=str))} and version {shortened(data.get('version'))}."
        )
    if not data["replicas"]:
        raise ScheduleError("replicas is empty; a job has at least one replica.")
    known = {"schedule", *BATCH_KEYS}
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
            "a rank can be in one replica only. Give the replicas different ranks."
        )
    batch_keys = [set(replica) & set(BATCH_KEYS) for replica in data["replicas"]]
    if not any(batch_keys):
        if len({schedule.sp_size for schedule in schedules}) > 1:
            raise ScheduleError(
                f"replicas of {[schedule.sp_size for schedule in schedules]} ranks must say what each is to train on: "
                "give micro_batch_size and micro_batches for every replica."
            )
        return Plan.of_replicas(schedules)
    if any(keys != set(BATCH_KEYS) for keys in batch_keys):
        raise ScheduleError(
            "micro_batch_size and micro_batches must be given for every replica, or for none; got "
            f"{shortened([sorted(keys) for keys in batch_keys])}."
        )
    sizes, counts = (tuple(replica[key] for replica in data["replicas"]) for key in BATCH_KEYS)
    return Plan.of_replicas(schedules, BatchSplit(micro_batch_sizes=sizes, micro_batches=counts))


def _read_plan(data: JsonObject) -> Plan:
    """Read a file of version 2."""
    optional_keys = {"model", "seq_len", "zero", "activation_checkpointing", "predicted"}
    expect_object_keys("plan", data, {"version", "pipelines"}, optional_keys, PlanError)
    if not is_whole(data["version"], VERSION, VERSION):
        version = shortened(data["version"])
        raise PlanError(
            f"plan version {version} is unknown; this release reads versions 1 and {VERSION}. Plan again with this "
            "release."
        )
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
    """Read the weights of owners as (rank, weight), ascending."""
    weights = zero.get("owner_weights", {})
    if not isinstance(weights, Mapping) or not all(map(_is_rank, weights)):
        raise PlanError(
            'zero.owner_weights takes ranks and their weights, such as {"0": 4.0, "4": 1.0}, '
            f"got {shortened(weights)}."
        )
    return tuple(sorted((int(rank), weight) for rank, weight in weights.items()))


def _is_rank(key: Any) -> bool:
    """Whether a key is the decimal text of a rank."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_RANKS))


def _read_pipeline(where: str, data: Any) -> Pipeline:
    """Read a pipeline; ``where`` is its place in the file."""
    expect_object_keys(where, data, {"stages"}, set(BATCH_KEYS), PlanError)
    if not is_list(data["stages"]):
        raise PlanError(f"{where}.stages must be a list, got {type(data['stages']).__name__}.")
    stages = tuple(_read_stage(f"{where}.stages[{j}]", stage) for j, stage in enumerate(data["stages"]))
    return Pipeline(stages=stages, **{key: data[key] for key in BATCH_KEYS if key in data})


def _read_stage(where: str, data: Any) -> Stage:
    """Read a stage; ``where`` is its place in the file."""
    expect_object_keys(where, data, {"ranks"}, {"layers", "inner", "schedule", "in_flight", "tensor_size"}, PlanError)
    for key, maximum in (("ranks", MAX_RANKS), ("layers", MAX_LAYERS)):
        if key in data and not (is_list(data[key]) and all(is_whole(value, 0, maximum) for value in data[key])):
            raise PlanError(f"{where}.{key} must be a list of whole numbers >= 0, got {shortened(data[key])}.")
    layers = tuple(data["layers"]) if "layers" in data else None
    if layers is not None and len(layers) != 2:
        raise PlanError(
            f"{where}.layers must be [from, to), the first layer and the one after the last, got "
            f"{shortened(list(layers))}."
        )
    tensor_size = data.get("tensor_size", 1)
    if isinstance(tensor_size, (list, tuple)):
        raise PlanError(
            f"{where}.tensor_size is {shortened(tensor_size)}, but all tensor groups of a stage have one size. Give "
            "one number. Other stages, and the stages of other pipelines, may have another."
        )
    expect_whole_number(f"{where}.tensor_size", tensor_size, 1, MAX_HEADS, PlanError)
    try:
        schedule = Schedule.from_dict(data["schedule"], rank_step=tensor_size) if "schedule" in data else None
    except ScheduleError as error:
        raise PlanError(f"{where}.schedule: {error}") from None
    return Stage(
        ranks=tuple(data["ranks"]),
        layers=layers,
        inner=data.get("inner", "one"),
        schedule=schedule,
        tensor_size=tensor_size,
        in_flight=data.get("in_flight"),
    )
