"""Plan: the whole job as one value, with the batches of pipelines and the ranks and layers of their stages.

    {"version": 2, "model": {"num_layers": 40, "num_heads": 40, "num_kv_heads": 40}, "seq_len": 4096,
     "pipelines": [
       {"micro_batch_size": 1, "micro_batches": 14, "stages": [
         {"ranks": [0, 1], "layers": [0, 30], "inner": "tensor", "in_flight": 2},
         {"ranks": [4],    "layers": [30, 40]}]},
       {"micro_batch_size": 1, "micro_batches": 10, "stages": [
         {"ranks": [2, 3], "layers": [0, 40], "inner": "sequence", "schedule": {...}}]}],
     "zero": {"stage": 1, "owner_weights": {"0": 4.0, "4": 1.0}},
     "predicted": {"step_s": 20.9}}

A *pipeline* is a list of stages that together hold every layer once; pipelines share the samples of an optimizer step
(data parallelism). A *replica* is a pipeline of one stage. `BatchSplit` says which samples every pipeline takes.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain

from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.batches import BatchSplit
from ds_hetero.values.plans.plan_checks import check_parts
from ds_hetero.values.plans.stages import Pipeline, PlannedModel, Stage, ZeroOwners, batches_of
from ds_hetero.values.schedule import Schedule

VERSION = 2

SCENARIO = "scenario"
"""Key of a plan file for the scenario that the plan was made for, see `ds_hetero.reporting.scenario`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Work of every rank of the job.

    Args:
        activation_checkpointing: whether only the input of every layer is kept, and the layer is recomputed in the
            backward; None: the script decides.

    Raises:
        PlanError: the pipelines do not hold every layer once, a rank is in two stages, or a stage does not fit its
            ranks or the model. The message names the field, its values and the rule.
    """

    pipelines: tuple[Pipeline, ...]
    model: PlannedModel | None = None  # model that the plan is for; None in a plan of replicas read from version 1
    seq_len: int | None = None  # tokens of a sequence that the plan is for; None if unknown
    zero: ZeroOwners | None = None  # owners of optimizer state; None: as ds_config.json says
    activation_checkpointing: bool | None = None
    predicted: JsonObject | None = field(default=None, compare=False)  # prediction for reports; not compared

    def __post_init__(self) -> None:
        check_parts(self.pipelines, self.model, self.seq_len, self.zero)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all pipelines, ascending; all other ranks of the job are idle."""
        return tuple(sorted(chain.from_iterable(pipeline.ranks for pipeline in self.pipelines)))

    @cached_property
    def batch_split(self) -> BatchSplit | None:
        """Batches by pipeline, if the plan gives them; None if all pipelines take as many as ds_config.json says."""
        if self.pipelines[0].micro_batches is None:
            return None
        return BatchSplit(
            micro_batch_sizes=tuple(pipeline.micro_batch_size or 0 for pipeline in self.pipelines),
            micro_batches=tuple(pipeline.micro_batches or 0 for pipeline in self.pipelines),
        )

    @property
    def is_replicas(self) -> bool:
        """Whether every pipeline is a single stage of sequence parallelism alone, as `schedules` requires."""
        for pipeline in self.pipelines:
            first, *others = pipeline.stages
            if others or first.inner != "sequence" or first.tensor_size > 1:
                return False
        return True

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules of a plan of replicas, by pipeline. Raises `PlanError`: a pipeline is not one sequence stage."""
        if not self.is_replicas:
            raise PlanError(
                "this plan has pipelines of several stages or stages of tensor parallelism; only plans of replicas "
                "have one schedule per pipeline. Give a plan whose pipelines are single sequence stages."
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
        """Indices (pipeline, stage) by rank."""
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
        """Return the same plan, in which every stage has its ``layers``; the plan itself if the model is not known.

        A stage without ``layers`` is the only stage of its pipeline, and holds all layers.
        """
        if self.model is None:
            return self
        pipelines = []
        for pipeline in self.pipelines:
            first = pipeline.stages[0]
            if first.layers is None:
                pipeline = replace(pipeline, stages=(replace(first, layers=(0, self.model.num_layers)),))
            pipelines.append(pipeline)
        return replace(self, pipelines=tuple(pipelines))

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the canonical JSON without the prediction, which ranks compare before they use the plan."""
        content = {key: value for key, value in self.to_dict().items() if key != "predicted"}
        import hashlib  # see `Schedule.fingerprint`

        return int.from_bytes(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:8], "big") >> 1

    @classmethod
    def of_replicas(cls, schedules: Iterable[Schedule], batch_split: BatchSplit | None = None) -> Plan:
        """Make the plan of replicas that run these schedules.

        Args:
            schedules: schedules of the replicas, in global ranks.
            batch_split: batches by replica; None: as many for all as ds_config.json says.
        """
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
        replicas = [{"schedule": schedule.to_dict(), **batches_of(pipeline)} for schedule, pipeline in pairs]
        return {"version": 1, "replicas": replicas}


def _pipeline_to_dict(pipeline: Pipeline) -> JsonDict:
    """Return the content of a pipeline in a plan file."""
    return {**batches_of(pipeline), "stages": [_stage_to_dict(stage) for stage in pipeline.stages]}


def _stage_to_dict(stage: Stage) -> JsonDict:
    """Return the content of a stage in a plan file; defaults are left out."""
    content: JsonDict = {"ranks": list(stage.ranks)}
    if stage.layers is not None:
        content["layers"] = list(stage.layers)
    if stage.inner != "one":
        content["inner"] = stage.inner
    if stage.schedule is not None:
        content["schedule"] = stage.schedule.to_dict()
    if stage.tensor_size > 1:
        content["tensor_size"] = stage.tensor_size
    if stage.in_flight is not None:
        content["in_flight"] = stage.in_flight
    return content
