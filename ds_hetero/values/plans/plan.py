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

The samples of an optimizer step, shared by pipelines that take different batches.

A step uses the next G samples of the order in which one process would read them, G being the sum over the pipelines of
micro_batch_size x micro_batches. They are cut into one run of samples per pipeline, in order, and each run into that
pipeline's micro-batches. Plain integers; nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ds_hetero.common.reading import MAX_BATCH, JsonDict, JsonObject, is_whole, shortened, whole_rule
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.values.plans.checks import check_plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import Split, share


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How the samples of an optimizer step are shared by pipelines that take different batches.

    Args:
        micro_batch_sizes: samples of a micro-batch, by pipeline.
        micro_batches: micro-batches per optimizer step, by pipeline.

    Raises:
        ScheduleError: not one whole number >= 1 of each per pipeline.
    """

    micro_batch_sizes: tuple[int, ...]
    micro_batches: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.micro_batch_sizes) != len(self.micro_batches):
            raise ScheduleError(
                f"micro_batch_sizes {self.micro_batch_sizes} and micro_batches {self.micro_batches} need one entry per "
                "replica."
            )
        for name, values in (
            ("micro_batch_size", self.micro_batch_sizes),
            ("micro_batches", self.micro_batches),
        ):
            for i, value in enumerate(values):
                if not is_whole(value, 1, MAX_BATCH):
                    rule = whole_rule(value, 1, MAX_BATCH)
                    raise ScheduleError(f"replicas[{i}].{name} must be {rule}, got {shortened(value)}.")

    @property
    def samples_of(self) -> tuple[int, ...]:
        """Samples per optimizer step, by pipeline."""
        return tuple(size * count for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True))

    @property
    def samples(self) -> int:
        """The global batch: samples per optimizer step of all pipelines."""
        return sum(self.samples_of)

    @property
    def micro_steps(self) -> int:
        """Forwards and backwards per optimizer step on every rank of a job of replicas.

        That of the replica with the most micro-batches. The others fill up with batches in which no label counts,
        since ZeRO-2 and 3 communicate over all ranks in each.
        """
        return max(self.micro_batches)

    def micro_batches_of(self, pipeline: int, samples: int) -> list[tuple[int, int]]:
        """Return a pipeline's micro-batches ``[start, stop)`` among the first ``samples`` samples of a step.

        The last step of an epoch may have fewer samples than `samples`; they are shared in the same proportions, so
        that no pipeline gets more than it has room for.

        Args:
            pipeline: its index.
            samples: samples of the step, at most `samples`.
        """
        start, stop = Split(share(samples, self.samples_of)).ranges[pipeline]
        size = self.micro_batch_sizes[pipeline]
        return [(first, min(first + size, stop)) for first in range(start, stop, size)]

    def __str__(self) -> str:
        parts = [f"{size} x {count}" for size, count in zip(self.micro_batch_sizes, self.micro_batches, strict=True)]
        return f"{' + '.join(parts)} = {self.samples} samples"


VERSION = 2

_BATCH_KEYS = ("micro_batch_size", "micro_batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The numbers of a model that a plan depends on.

    Args:
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOwners:
    """Who owns the optimizer state.

    Args:
        stage: ZeRO stage.
        owner_weights: (rank, weight) pairs, ascending by rank; empty if all ranks own alike.
    """

    stage: int
    owner_weights: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Ranks that hold the same layers.

    Args:
        ranks: global ranks, in the order of the tensor-parallel mesh or of the schedule.
        layers: decoder layers ``[from, to)``; None for all layers of a model whose number the plan does not say.
            The embedding belongs to the stage with layer 0, the last norm and the head to the one with the last layer.
        inner: one of `INNER`.
        schedule: of a ``"sequence"`` stage, in global ranks.
        in_flight: micro-batches whose forward may run before their backward; None for 1F1B's own number, the stages
            from this one to the last.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int] | None = None
    inner: str = "one"
    schedule: Schedule | None = None
    in_flight: int | None = None

    @property
    def num_layers(self) -> int | None:
        """Layers of the stage; None where the plan does not say."""
        return None if self.layers is None else self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Stages in order, which hold every layer once.

    Args:
        stages: first to last.
        micro_batch_size: samples of a micro-batch; None where DeepSpeed's configuration says, alike for all pipelines.
        micro_batches: micro-batches per optimizer step; None likewise.
    """

    stages: tuple[Stage, ...]
    micro_batch_size: int | None = None
    micro_batches: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all stages, ascending."""
        return tuple(sorted(rank for stage in self.stages for rank in stage.ranks))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose forward may run before their backward on the stage with this index."""
        given = self.stages[stage].in_flight
        return len(self.stages) - stage if given is None else given


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of every rank of the job.

    Args:
        pipelines: with their stages and batches.
        model: the model that it is for; None in a plan of replicas read from version 1.
        seq_len: tokens of a sequence that it was planned for, if known.
        zero: owners of optimizer state; None where ds_config.json says.
        activation_checkpointing: keep only the input of every layer and compute it again in the backward; None where
            the script says.
        predicted: what the planner says of it, for people; takes no part in comparisons.

    Raises:
        PlanError: the pipelines do not hold every layer once, a rank is in two stages, a stage does not fit its ranks
            or the model. The message names the field, its values and the rule.
    """

    pipelines: tuple[Pipeline, ...]
    model: PlannedModel | None = None
    seq_len: int | None = None
    zero: ZeroOwners | None = None
    activation_checkpointing: bool | None = None
    predicted: JsonObject | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of all pipelines, ascending; ranks of the job that are not among them are idle."""
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks))

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
        return all(len(p.stages) == 1 and p.stages[0].inner == "sequence" for p in self.pipelines)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of a plan of replicas, one per pipeline.

        Raises:
            PlanError: a pipeline has several stages, or one that is no sequence stage.
        """
        schedules = [stage.schedule for pipeline in self.pipelines for stage in pipeline.stages]
        if not self.is_replicas:
            raise PlanError(
                "this plan has pipelines of several stages or stages of tensor parallelism; only plans of replicas "
                "have one schedule per pipeline."
            )
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
        return {
            rank: (i, j)
            for i, pipeline in enumerate(self.pipelines)
            for j, stage in enumerate(pipeline.stages)
            for rank in stage.ranks
        }

    def with_schedules(self, schedules: Sequence[Schedule]) -> Plan:
        """Return the same plan of replicas with other schedules, one per pipeline."""
        stages = [
            replace(p.stages[0], ranks=s.ranks, schedule=s) for p, s in zip(self.pipelines, schedules, strict=True)
        ]
        pipelines = [replace(p, stages=(stage,)) for p, stage in zip(self.pipelines, stages, strict=True)]
        return replace(self, pipelines=tuple(pipelines))

    def with_layers(self) -> Plan:
        """Return the same plan in which pipelines of one stage say that it holds all layers, if the model is known."""
        if self.model is None:
            return self
        every = 0, self.model.num_layers
        pipelines = (
            replace(p, stages=(replace(p.stages[0], layers=every),)) if p.stages[0].layers is None else p
            for p in self.pipelines
        )
        return replace(self, pipelines=tuple(pipelines))

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the canonical JSON without the prediction; ranks compare it before they use the plan."""
        content = {key: value for key, value in self.to_dict().items() if key != "predicted"}
        return int.from_bytes(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()[:8], "big") >> 1

    @classmethod
    def of_replicas(cls, schedules: Iterable[Schedule], batch_split: BatchSplit | None = None) -> Plan:
        """Return the plan of one-stage pipelines that run these schedules.

        Args:
            schedules: in global ranks, one per replica.
            batch_split: the batches of replicas that differ in them.
        """
        stages = [Stage(ranks=schedule.ranks, inner="sequence", schedule=schedule) for schedule in schedules]
        if batch_split is None:
            return cls(pipelines=tuple(Pipeline(stages=(stage,)) for stage in stages))
        batches = zip(stages, batch_split.micro_batch_sizes, batch_split.micro_batches, strict=True)
        return cls(pipelines=tuple(Pipeline(stages=(s,), micro_batch_size=b, micro_batches=m) for s, b, m in batches))

    def to_dict(self) -> JsonDict:
        """Return the content of a plan file, version 2."""
        content: JsonDict = {"version": VERSION}
        if self.model is not None:
            content["model"] = {
                "num_layers": self.model.num_layers,
                "num_heads": self.model.num_heads,
                "num_kv_heads": self.model.num_kv_heads,
            }
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
        """Return the content of a file of replicas, version 1.

        Raises:
            PlanError: the plan is not one of replicas, see `schedules`.
        """
        replicas = []
        for schedule, pipeline in zip(self.schedules, self.pipelines, strict=True):
            batches = {key: getattr(pipeline, key) for key in _BATCH_KEYS if getattr(pipeline, key) is not None}
            replicas.append({"schedule": schedule.to_dict(), **batches})
        return {"version": 1, "replicas": replicas}


def _pipeline_to_dict(pipeline: Pipeline) -> JsonDict:
    content: JsonDict = {key: getattr(pipeline, key) for key in _BATCH_KEYS if getattr(pipeline, key) is not None}
    content["stages"] = [_stage_to_dict(stage) for stage in pipeline.stages]
    return content


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
