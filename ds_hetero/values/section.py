"""The "heterogeneity" section of ds_config.json: its keys, their checks, and the messages for wrong values.

    section = read_section(content)        # None with "enabled": false

`ds_hetero.decision.resolve` makes a plan for a section. This module does not import torch, so a configuration can be
checked without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ds_hetero.common.reading import (
    MAX_BATCH,
    MAX_RANKS,
    MAX_SEQ_LEN,
    MAX_STEPS,
    JsonDict,
    JsonObject,
    check_content,
    is_weight,
    shortened,
)
from ds_hetero.common.spelling import did_you_mean, nearest
from ds_hetero.errors import ConfigError
from ds_hetero.values.baselines import STRATEGIES
from ds_hetero.values.placement import RemapWish

# Attention kernels, in the order in which a rank looks for its best. `ds_hetero.runtime.attention.kernels` has the
# devices on which each works.
KernelName = Literal["flash_attn", "torch", "triton", "cudnn"]
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)

# Requested kernels: one for all ranks, a list by rank, or a mapping from parts of device names to kernels. None: every
# rank chooses the best kernel for its device.
KernelWish = KernelName | list[KernelName | None] | dict[str, KernelName] | None

# Types in which partial gradients of keys and values travel between the groups of a ring.
RingGradients = Literal["fp32", "bf16"]

SECTION = "heterogeneity"


class ReplanSection(BaseModel):
    """``"replan"``: whether a job searches for a new plan when measured speeds have changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = False
    interval_steps: int = Field(default=5, ge=1, le=MAX_STEPS)  # steps between two observations; a change needs two
    min_gain: float = Field(default=0.05, ge=0, lt=1)  # smallest predicted gain, as a share of the step, for a change
    report_only: bool = False  # name slow ranks and the gain of re-planning, but change nothing

    @model_validator(mode="after")
    def _either_reports_or_changes(self) -> ReplanSection:
        if self.enabled and self.report_only:
            raise ValueError(
                "cannot be enabled and report_only: enabled changes schedules, report_only changes nothing. Set one of "
                "them to false"
            )
        return self


class PlacementSection(BaseModel):
    """``"placement"``: how the positions of a batch are placed on ranks. A string stands for an object with that mode.

    Args:
        mode: ``"stream"`` shards every batch by its length alone, ``"documents"`` by its documents. If left out, the
            documents decide if that is predicted to save more than predictions err, see `ds_hetero.job.documents`.
        max_tokens: largest number of tokens of a batch row in one all-to-all group; if left out, as many as are
            predicted to fit.
        remap: whether tokens have other ranks in attention than in the rest of a layer; for mode ``"documents"``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["stream", "documents"] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN)
    min_cut_tokens: int = Field(default=512, ge=2, le=MAX_SEQ_LEN)  # shorter documents stay whole
    planner: str | None = Field(default=None, min_length=1, max_length=64)  # a published planner instead of ours
    remap: RemapWish = "where_faster"

    @model_validator(mode="after")
    def _places_documents(self) -> PlacementSection:
        if self.mode == "stream":
            if self.planner is not None:
                raise ValueError(
                    'has a planner of documents, but mode "stream" cuts every batch by its length. Leave one of them '
                    "out"
                )
            if "remap" in self.model_fields_set and self.remap != "never":
                raise ValueError(
                    f'has remap "{self.remap}", but mode "stream" cuts every batch by its length, and its tokens keep '
                    "their ranks. Leave one of them out"
                )
        return self


class ElasticSection(BaseModel):
    """``"elastic"``: how often a job saves to memory. From these saves it resumes after ranks die; see docs/elastic.md.

    Args:
        memory_gib: shared memory of a node that saves may use; if left out, all that is free.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # Steps between two saves; if left out, chosen by the cost of a save.
    every_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    copies: int = Field(default=1, ge=0, le=8)  # copies of every rank's part, on other nodes
    min_ranks: int | None = Field(default=None, ge=1, le=MAX_RANKS)  # with fewer the job waits; None: the launcher's
    memory_gib: float | None = Field(default=None, gt=0, le=2**20, allow_inf_nan=False)
    notice_s: float = Field(default=25, gt=0, le=3600, allow_inf_nan=False)  # seconds from SIGTERM to the node's end


class ChecksSection(BaseModel):
    """``"checks"``: checks of every step, see docs/checks.md. ``"on"`` and ``"off"`` stand for ``enabled``.

    Args:
        compare_every: optimizer steps between two comparisons. A comparison runs a short piece of a batch both whole
            and sharded; under ``"batch"`` it is a probe of whether samples influence each other. ``"by_cost"`` chooses
            an interval that costs under 1 % of the steps' time, ``"first_batch"`` compares only the first batch of
            every kind, ``"always"`` every batch, ``"off"`` none.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True
    compare_every: Annotated[int, Field(ge=1, le=MAX_STEPS)] | Literal["by_cost", "first_batch", "always", "off"] = (
        "by_cost"
    )


def _as_checks(value: Any) -> Any:
    """Convert ``"on"`` and ``"off"`` to an object."""
    return {"enabled": value == "on"} if value in ("on", "off") else value


def _as_placement(value: Any) -> Any:
    """Convert a mode to an object; an object with a planner gets mode ``"documents"``, which all planners are for."""
    if isinstance(value, Mapping) and "planner" in value:
        return {"mode": "documents", **value}
    return {"mode": value} if isinstance(value, str) else value


class HeterogeneitySection(BaseModel):
    """The section as the user wrote it, after all checks; docs/configuration.md explains every key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = True
    cluster: str | JsonDict = "measure"
    schedule: str | JsonDict = "plan"
    batch: Literal["by_speed"] | list[Annotated[int, Field(ge=1, le=MAX_BATCH)]] | None = None
    planner: str | None = Field(default=None, min_length=1, max_length=64)
    parallel: Literal["sequence", "full", "best"] = "sequence"
    seq_len: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN)
    token_unit: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN)
    layout: Literal["contiguous", "zigzag"] | None = None
    placement: Annotated[PlacementSection, BeforeValidator(_as_placement)] = PlacementSection()
    attention: KernelWish = None
    tile_tokens: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN)
    keep_attention: bool | Literal["where_it_fits"] = False
    ring_gradients: RingGradients = "fp32"
    loss: (
        Literal["replica_mean", "local_mean", "local_sum", "local_share", "sample_mean", "label_mean", "token_mean"]
        | None
    ) = None
    zero_partition: Literal["uniform", "memory"] | list[float] = "uniform"
    zero_within: Literal["node"] | list[Annotated[int, Field(ge=1, le=MAX_RANKS)]] | None = None
    experts: Literal["equal", "by_memory", "by_speed", "best"] | list[float] | None = None
    replan: ReplanSection = ReplanSection()
    checks: Annotated[ChecksSection, BeforeValidator(_as_checks)] = ChecksSection()
    verify: Literal["first_batch", "always", "off"] | None = None  # old name of "checks", still read
    evaluation: Literal["sharded", "whole"] | None = None
    report: str | None = Field(default=None, min_length=1, max_length=4096)
    elastic: ElasticSection | None = None

    @property
    def sets_batch_by_rank(self) -> bool:
        """Whether every rank runs the whole model, on micro-batches of its own size.

        `ds_hetero.engine.ds_config.sets_batch_by_rank` answers it for a configuration that is not checked yet. When a
        model is prepared, `ds_hetero.engine.trained.model.TrainedModel.batches` does.
        """
        return self.batch is not None

    @property
    def changes_batches(self) -> bool:
        """Whether the batches of the ranks follow their speeds."""
        return self.batch == "by_speed" or (self.sets_batch_by_rank and self.replan.enabled)

    @property
    def compare_every(self) -> int | str:
        """Steps between comparisons, see `ChecksSection`; the old key ``"verify"`` is read, too."""
        if not self.checks.enabled:
            return "off"
        return self.checks.compare_every if self.verify is None else self.verify

    @model_validator(mode="after")
    def _has_checks_or_verify(self) -> HeterogeneitySection:
        """Refuse a section with ``"checks"`` and its old name ``"verify"``."""
        if self.verify is not None and "checks" in self.model_fields_set:
            raise ValueError(
                f'"verify" is "{self.verify}", and "checks" is given, which has replaced it. Leave "verify" out: '
                f'"checks": {{"compare_every": "{self.verify}"}} means the same'
            )
        return self

    @field_validator("zero_partition", "experts")
    @classmethod
    def _has_finite_weights(cls, value: str | list[float] | None) -> str | list[float] | None:
        """Refuse weights that are negative, not finite, or all zero."""
        if isinstance(value, list) and not (any(value) and all(map(is_weight, value))):
            raise ValueError("must hold one finite weight >= 0 per rank, and not only zeros")
        return value

    @property
    def strategy(self) -> str | dict[str, Any]:
        """Name or content of the schedule; for ``"plan"`` with a published planner, the planner's name."""
        return self.planner if self.planner is not None and self.schedule == "plan" else self.schedule

    @model_validator(mode="after")
    def _has_planner_or_schedule(self) -> HeterogeneitySection:
        """Refuse a section with a planner and a schedule that needs no planning."""
        if self.planner is not None and self.schedule != "plan":
            source = self.schedule if isinstance(self.schedule, str) else "given inline"
            raise ValueError(
                f'"planner" is "{self.planner}", but "schedule" is {shortened(source)}, which leaves nothing to plan. '
                "Leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _has_ring_for_gradients(self) -> HeterogeneitySection:
        """Refuse rounded gradients of a ring beside the strategy whose ranks are one group."""
        if self.ring_gradients != "fp32" and self.schedule == "ulysses":
            raise ValueError(
                f'"ring_gradients" is "{self.ring_gradients}", the type of messages in a ring of groups, but '
                '"schedule": "ulysses" makes one group of all ranks, which has none. Leave one of them out'
            )
        return self

    @model_validator(mode="after")
    def _plans_in_token_units(self) -> HeterogeneitySection:
        """Refuse a token unit where the job does not search a schedule, or batches do not follow its tokens."""
        if self.token_unit is None:
            return self
        others = {
            "schedule": self.schedule != "plan",
            "planner": self.planner is not None,
            "parallel": self.parallel == "best",
            "placement": self.placement.mode == "documents",
        }
        for name, is_other in others.items():
            if is_other:
                value = self.placement.mode if name == "placement" else getattr(self, name)
                text = f'"{value}"' if isinstance(value, str) else shortened(value)
                raise ValueError(
                    f'"token_unit" is {self.token_unit}, of which a schedule that the job searches has multiples, but '
                    f'"{name}" is {text}, whose tokens are others. Leave one of them out'
                )
        return self

    @model_validator(mode="after")
    def _has_strategy_of_pipelines(self) -> HeterogeneitySection:
        """Refuse a strategy of sequence parallelism in a search for pipelines."""
        if self.parallel == "full" and self.schedule != "plan" and self.schedule in STRATEGIES:
            raise ValueError(
                f'"parallel": "full" searches for pipelines, but "schedule" is "{self.schedule}", a strategy of '
                'sequence parallelism. Leave "schedule" out, or give it a plan file'
            )
        return self

    @model_validator(mode="after")
    def _leaves_kind_open(self) -> HeterogeneitySection:
        """Refuse keys that say which kind of job it is beside ``"parallel": "best"``, which chooses the kind."""
        if self.parallel == "best":
            for name in ("schedule", "planner", "batch", "experts"):
                if name in self.model_fields_set and getattr(self, name) not in ("plan", None):
                    raise ValueError(
                        f'"parallel": "best" chooses the kind of job and its plan, but "{name}" is '
                        f"{shortened(getattr(self, name))}, which fixes it. Leave one of them out"
                    )
        return self

    @model_validator(mode="after")
    def _has_batch_or_sharding(self) -> HeterogeneitySection:
        """Refuse keys that say how to shard sequences or layers beside ``"batch"``, which shards neither."""
        if not self.sets_batch_by_rank:
            return self
        sharding_keys = (
            "schedule",
            "planner",
            "layout",
            "placement",
            "attention",
            "tile_tokens",
            "keep_attention",
            "ring_gradients",
            "seq_len",
            "token_unit",
            "experts",
        )
        conflicting_keys = [name for name in sharding_keys if name in self.model_fields_set]
        if conflicting_keys:
            raise ValueError(
                f'"batch" lets every rank run the whole model on different samples, and "{conflicting_keys[0]}" says '
                "how sequences or layers are split over ranks. Leave one of them out"
            )
        if self.zero_partition == "memory":
            raise ValueError(
                '"zero_partition": "memory" partitions ZeRO by the memory that a split sequence leaves free, and '
                '"batch" splits no sequences. Give "zero_partition" a list of weights, one per rank, such as [3, 1]'
            )
        return self


_ACCEPTED = {
    "enabled": "true or false",
    "cluster": '"measure", the path of a cluster file, or the same inline as an object',
    "schedule": "the path of a schedule file or plan file, the same inline as an object, or one of "
    + ", ".join(STRATEGIES),
    "batch": 'the samples of every rank\'s micro-batch, such as [6, 2], whole numbers >= 1; or "by_speed"',
    "planner": 'the name of a published planner: of schedules, or with "parallel": "full" of pipelines',
    "parallel": '"sequence" (one replica, or several), "full" (pipelines of unequal stages) or "best" (the faster of '
    "both, chosen when the job starts)",
    "seq_len": f"a whole number >= 1, the tokens of a sequence that is planned for, at most {MAX_SEQ_LEN:,}",
    "token_unit": f"a whole number >= 1 and <= {MAX_SEQ_LEN:,}, of which the tokens of every rank are multiples",
    "layout": '"contiguous" or "zigzag"',
    "placement": '"stream", "documents", or an object with "mode", "max_tokens", "min_cut_tokens", "planner" '
    'and "remap"',
    "attention": "one of "
    + ", ".join(f'"{name}"' for name in KERNEL_NAMES)
    + '; an object from parts of device names to them, such as {"V100": "torch"}; or a list, one per rank, with null '
    "for the best",
    "tile_tokens": f"a whole number >= 1 and <= {MAX_SEQ_LEN:,}, the tokens of a tile of MLPs and logits",
    "keep_attention": 'true, false or "where_it_fits" (if it is predicted to fit into memory, and to be faster): '
    "whether the recomputation of a checkpointed layer takes the attention of its forward",
    "ring_gradients": '"fp32", or "bf16" (half the bytes of these messages, and a rounding at every hop): the type in '
    "which gradients of keys and values travel between the groups of a ring",
    "loss": '"replica_mean", "local_mean", "local_sum" or "local_share", for a loss that the script computes itself; '
    '"sample_mean", "label_mean" or "token_mean", for that of a module that is not split',
    "zero_within": '"node", or the ranks of every node, such as [2, 1]',
    "zero_partition": '"uniform", "memory", or a list of weights, one per rank',
    "experts": '"equal", "by_memory", "by_speed", or a list of weights, one per rank, by which the experts of a layer '
    'are divided among the ranks; or "best" (divided or not, whichever is predicted to be faster)',
    "replan": '{"enabled": true or false, "interval_steps": whole number >= 1, "min_gain": share >= 0 and < 1}, or '
    '{"report_only": true}',
    "checks": '"on", "off", or an object with "enabled" and "compare_every"',
    "checks.enabled": "true or false",
    "checks.compare_every": f"a whole number >= 1 and <= {MAX_STEPS:,}, the steps between comparisons of a piece of "
    'a batch, whole and sharded; "by_cost", "first_batch", "always" or "off"',
    "verify": '"first_batch", "always" or "off"; "checks" takes its place',
    "placement.mode": '"stream" (cut by length) or "documents" (placed by the documents of each batch); left out, '
    "whichever is predicted to be faster",
    "placement.max_tokens": f"a whole number >= 1 and <= {MAX_SEQ_LEN:,}, the tokens of a batch row that one "
    "all-to-all group may hold",
    "placement.min_cut_tokens": f"a whole number >= 2 and <= {MAX_SEQ_LEN:,}; shorter documents stay whole",
    "placement.planner": "the name of a published planner of documents",
    "placement.remap": '"where_faster" (tokens move for linear layers where that is predicted to pay), "always" or '
    '"never"',
    "replan.enabled": "true or false",
    "replan.interval_steps": f"a whole number >= 1 and <= {MAX_STEPS:,}",
    "replan.min_gain": "a share >= 0 and < 1",
    "replan.report_only": "true or false",
    "evaluation": '"sharded" (over shards, as training) or "whole"',
    "report": "the path of a folder, in which rank 0 writes run.json",
    "elastic": 'an object with "every_steps", "copies", "min_ranks", "memory_gib" and "notice_s", all of which have '
    "defaults",
    "elastic.every_steps": f"a whole number >= 1 and <= {MAX_STEPS:,}, the optimizer steps between two saves",
    "elastic.copies": "a whole number >= 0 and <= 8, the copies of every part on other nodes",
    "elastic.min_ranks": f"a whole number >= 1 and <= {MAX_RANKS:,}, below which the job waits",
    "elastic.memory_gib": "a number > 0, the shared memory of a node that saves may take",
    "elastic.notice_s": "a number > 0 and <= 3600, the seconds between SIGTERM and the end of a node",
}


_OBJECTS: dict[str, type[BaseModel]] = {
    "placement": PlacementSection,
    "replan": ReplanSection,
    "elastic": ElasticSection,
    "checks": ChecksSection,
}
_MISSPELLING_SIMILARITY = 0.7  # similarity to the section's name from which a key counts as misspelled; never measured


def expect_section_name(ds_config: JsonObject) -> None:
    """Refuse a key that is nearly the section's name, which DeepSpeed would ignore. Raises `ConfigError`."""
    for key in ds_config:
        if (
            isinstance(key, str)
            and key != SECTION
            and nearest(key.replace("_", ""), [SECTION], _MISSPELLING_SIMILARITY)
        ):
            raise ConfigError(
                f'"{key}" in ds_config.json is not a DeepSpeed key (did you mean "{SECTION}"?). Without a section '
                "of that name ds_hetero would stay off, and every rank would train on whole sequences."
            )


def read_section(raw: Any) -> HeterogeneitySection | None:
    """Read and check the section; return None if it is switched off.

    Raises:
        ConfigError: unknown keys, wrong types, values that do not exist, or combinations that cannot work. One message
            lists all of them, with the accepted values.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'"{SECTION}" must be an object with keys {_keys(HeterogeneitySection)}; got {shortened(raw)}.'
        )
    check_content(raw, f'"{SECTION}"', ConfigError)
    if path := next(_autos(raw), None):
        raise ConfigError(
            f'"{SECTION}.{path}" is "auto", which accelerate refuses anywhere in ds_config.json. '
            f"{accepted(path)} Leave the key out for its default."
        )
    try:
        section = HeterogeneitySection.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, raw))) from None
    return section if section.enabled else None


def _explain(error: ValidationError, raw: JsonObject) -> Iterator[str]:
    """Yield one line per wrong key, with the key, its value and the accepted values."""
    reported_paths = set()
    for problem in error.errors():
        path = _path(problem["loc"], raw)
        if path in reported_paths:  # pydantic reports a union once per member
            continue
        reported_paths.add(path)
        message = problem["msg"].removeprefix("Value error, ")
        if not path:
            yield f'"{SECTION}": {message}.'
        elif problem["type"] == "extra_forbidden":
            outer, _, name = path.rpartition(".")
            model = _OBJECTS.get(outer, HeterogeneitySection)
            yield f'"{SECTION}.{path}" is unknown{did_you_mean(name, model.model_fields)}. The keys are {_keys(model)}.'
        else:
            rule = f" {message}" if problem["type"] == "value_error" else ""
            yield f'"{SECTION}.{path}": {_value(raw, path)}{rule}. {accepted(path)}'


def _path(location: tuple[int | str, ...], raw: JsonObject) -> str:
    """Return the path of a wrong key: ``replan.min_gain``, or ``replan`` if the user did not write an object."""
    is_inside = location[:1] and location[0] in _OBJECTS and isinstance(raw.get(str(location[0])), Mapping)
    return ".".join(str(part) for part in location[: 2 if is_inside else 1])


def accepted(path: str) -> str:
    """Return a sentence on the accepted values of a key, such as ``"replan.min_gain"``; empty for an unknown key."""
    return f"It takes {_ACCEPTED[path]}." if path in _ACCEPTED else ""


def _value(raw: JsonObject, path: str) -> str:
    """Return the JSON of the value at a path, shortened to 200 characters."""
    value: Any = raw
    for part in path.split("."):
        value = value[part]
    text = json.dumps(value, default=repr)
    return text if len(text) <= 200 else text[:197] + "..."


def _keys(model: type[BaseModel]) -> str:
    """List the keys of an object of the section."""
    return ", ".join(model.model_fields)


def _autos(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of every value "auto" in nested objects and lists."""
    if value == "auto":
        yield path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _autos(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _autos(inner, f"{path}[{i}]")
