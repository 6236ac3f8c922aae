"""The planning half at the start of a job: what is trained, searched for and predicted on rank 0.

    model, workload = model_of(pretrained), workload_of(pretrained, ds_config, section, num_replicas)
    searcher = Searcher(model, workload, section.layout)         # `ds_hetero.job.resolve.resolve` calls it
    forecasts = forecast(schedules, clusters, model, workload, searcher.plans)
    print(forecast_text(forecasts))

Read from the frameworks is what a cost model needs to know of the training; what they keep to themselves, such as an
optimizer that is not Adam, is taken to be usual.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_hetero.cluster import Cluster
from ds_hetero.config import SECTION, HeterogeneitySection
from ds_hetero.cost import CostModel, Prediction, Workload, make_cost_model
from ds_hetero.errors import ModelError, PlanError
from ds_hetero.models import ModelSpec, model_from_config
from ds_hetero.planner import PlannedSchedule, planning, strategy
from ds_hetero.planner.explain import describe
from ds_hetero.schedule import Schedule
from ds_hetero.text import time_text
from ds_hetero.units import GIB

__all__ = [
    "Forecast",
    "Searcher",
    "forecast",
    "forecast_text",
    "mixed_precision",
    "model_of",
    "training_dtype",
    "workload_from",
    "workload_of",
]

COST_MODEL = "calibrated"
FP32_BYTES = 4


# --- what is trained --------------------------------------------------------------------------------


def model_of(pretrained: Any) -> ModelSpec:
    """The shape of a transformers model.

    Raises:
        ModelError: it has layers that no cost model describes.
    """
    config = pretrained.config.get_text_config()
    try:
        return model_from_config(config.to_dict(), type(pretrained).__name__)
    except ModelError as error:
        raise ModelError(
            f'{error} So no schedule can be searched for: give "{SECTION}.schedule" a schedule file, or a strategy '
            'without a search, such as "proportional".'
        ) from None


def training_dtype(pretrained: Any, ds_config: Mapping[str, Any]) -> torch.dtype:
    """In which type layers are computed: that of DeepSpeed's mixed precision, else the model's own."""
    own: torch.dtype = pretrained.dtype
    return mixed_precision(ds_config) or own


def mixed_precision(ds_config: Mapping[str, Any]) -> torch.dtype | None:
    """The data type of DeepSpeed's mixed precision, None without."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(name, {}).get("enabled") is True:
            return dtype
    return None


def workload_of(
    pretrained: Any, ds_config: Mapping[str, Any], section: HeterogeneitySection, num_replicas: int, *, on_host: bool
) -> Workload:
    """What one replica trains, from the model and the DeepSpeed configuration; arguments as for `workload_from`.

    Raises:
        PlanError: nobody says how long sequences are.
    """
    parameters = list(pretrained.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    trained = sum(size for p, size in zip(parameters, sizes, strict=True) if p.requires_grad)
    modules = list(pretrained.modules())
    return workload_from(
        ds_config,
        section,
        num_replicas,
        seq_len=_seq_len(pretrained, section),
        element_bytes=training_dtype(pretrained, ds_config).itemsize,
        trained=trained / sum(sizes),
        causal=any(getattr(module, "is_causal", False) for module in modules),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in modules),
        on_host=on_host,
    )


def workload_from(
    ds_config: Mapping[str, Any],
    section: HeterogeneitySection,
    num_replicas: int,
    *,
    seq_len: int,
    element_bytes: int,
    trained: float = 1.0,
    causal: bool = True,
    checkpointing: bool,
    on_host: bool,
) -> Workload:
    """What one replica trains, from the DeepSpeed configuration and what only the model can tell.

    Args:
        ds_config: values that are still ``"auto"`` count as left out.
        section: its ``zero_partition`` is used.
        num_replicas: copies of the model that share a global batch.
        seq_len: tokens of a sequence.
        element_bytes: of the data type in which layers are computed.
        trained: share of the parameters that are trained.
        causal: whether attention is.
        checkpointing: of the activations of every layer.
        on_host: devices are CPUs, so that nothing can be offloaded to the host.
    """
    zero, weights = ds_config.get("zero_optimization", {}), section.zero_partition
    stage = _number(zero, "stage", 0)
    micro_batch, micro_batches = _batch(ds_config, num_replicas)
    wide = ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")
    master_bytes = 0 if stage == 0 and element_bytes == FP32_BYTES else FP32_BYTES
    return Workload(
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=causal,
        zero_stage=stage,
        zero_weights=tuple(weights) if isinstance(weights, list) and num_replicas == 1 else None,
        activation_checkpointing=checkpointing,
        tiled_logits=False,  # models return the logits of all tokens of a shard
        element_bytes=element_bytes,
        gradient_bytes=(FP32_BYTES if wide else element_bytes) * trained,
        optimizer_bytes=(master_bytes + 2 * FP32_BYTES) * trained,
        offload_optimizer=stage > 0 and not on_host and _offloads(zero, "offload_optimizer"),
        offload_parameters=stage == 3 and not on_host and _offloads(zero, "offload_param"),
        data_parallel=num_replicas,
    )


def _seq_len(pretrained: Any, section: HeterogeneitySection) -> int:
    longest = getattr(pretrained.config.get_text_config(), "max_position_embeddings", None)
    seq_len = section.seq_len or longest
    if not isinstance(seq_len, int) or seq_len < 1:
        raise PlanError(
            f'"{SECTION}.seq_len" is missing, and {type(pretrained).__name__} has no max_position_embeddings. '
            'Give the tokens of a sequence that are to be planned for, such as "seq_len": 32768.'
        )
    return seq_len


def _batch(ds_config: Mapping[str, Any], num_replicas: int) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step, the missing one from the others as DeepSpeed does."""
    micro = _number(ds_config, "train_micro_batch_size_per_gpu", 0)
    steps = _number(ds_config, "gradient_accumulation_steps", 0)
    total = _number(ds_config, "train_batch_size", 0) // num_replicas
    micro = micro or total // (steps or 1) or 1
    return micro, steps or max(total // micro, 1)


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else default


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    return (zero.get(key) or {}).get("device", "none") not in (None, "none")


# --- searching --------------------------------------------------------------------------------------


class Searcher:
    """Finds schedules for `ds_hetero.job.resolve.resolve`, and keeps what the planner said of them.

    Args:
        model, workload: what is trained.
        layout: the section's, None for the planner's choice.

    Attributes:
        plans: by cluster, where the planner has searched.
    """

    def __init__(self, model: ModelSpec, workload: Workload, layout: str | None) -> None:
        self._model, self._workload, self._layout = model, workload, layout
        self.plans: dict[Cluster, PlannedSchedule] = {}

    def __call__(self, name: str, cluster: Cluster) -> Schedule:
        """The schedule that the strategy ``name`` makes for one replica on ``cluster``.

        Raises:
            PlanError: nothing fits into memory, or the sequence is shorter than the ranks are many.
        """
        try:
            if name != "plan":
                return strategy(name, make_cost_model(COST_MODEL, cluster, self._model, self._workload))
            self.plans[cluster] = planning.plan(
                cluster, self._model, self._workload, cost_model=COST_MODEL, layout=self._layout
            )
        except PlanError as error:
            raise PlanError(
                f'{error} It was planned for sequences of {self._workload.seq_len} tokens; set "{SECTION}.seq_len" to '
                "what you train, or leave it out for the model's max_position_embeddings."
            ) from None
        return self.plans[cluster].schedule


# --- predicting -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the cost model says of one replica.

    Args:
        schedule: in global ranks.
        cost: the cost model of the replica's cluster, whose ranks begin at 0, bound to model and workload.
        prediction: of the schedule.
        plan: the planner's, where it has searched.
    """

    schedule: Schedule
    cost: CostModel
    prediction: Prediction
    plan: PlannedSchedule | None

    def iteration_s(self, schedule: Schedule, seq_len: int, micro_batch: int, micro_batches: int) -> float:
        """Predicted time of an optimizer step of other batches, under any schedule of the same ranks."""
        workload = replace(self.cost.workload, seq_len=seq_len, micro_batch=micro_batch, micro_batches=micro_batches)
        cost = make_cost_model(self.cost.name, self.cost.cluster, self.cost.model, workload)
        return cost.predict(schedule.shifted(0)).iteration_s


def forecast(
    schedules: Sequence[Schedule],
    clusters: Sequence[Cluster],
    model: ModelSpec,
    workload: Workload,
    plans: Mapping[Cluster, PlannedSchedule],
) -> tuple[Forecast, ...]:
    """A forecast per replica.

    Raises:
        PlanError, ScheduleError: the workload does not fit the cluster, or its sequence is too short for a schedule.
    """
    found = []
    for schedule, cluster in zip(schedules, clusters, strict=True):
        planning.check_workload(cluster, workload)
        cost = make_cost_model(COST_MODEL, cluster, model, workload)
        prediction = cost.predict(schedule.shifted(0))
        found.append(Forecast(schedule=schedule, cost=cost, prediction=prediction, plan=plans.get(cluster)))
    return tuple(found)


# --- for people -------------------------------------------------------------------------------------


def forecast_text(forecasts: Sequence[Forecast]) -> str:
    """A table of who does what, and the prediction; replicas that are alike are told of once."""
    parts: list[str] = []
    alike: dict[tuple[Cluster, Workload, Schedule], list[int]] = {}
    for number, each in enumerate(forecasts):
        alike.setdefault((each.cost.cluster, each.cost.workload, each.schedule.shifted(0)), []).append(number)
    for numbers in alike.values():
        which = f"replica {', '.join(map(str, numbers))}: " if len(forecasts) > 1 else ""
        parts.append(_replica_text(forecasts[numbers[0]], which))
    return "\n".join(parts)


def _replica_text(found: Forecast, which: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cost, schedule, prediction = found.cost, found.schedule, found.prediction
    work, terms = cost.workload, prediction.terms
    table = Table(title=f"{which}{describe(schedule.shifted(0), cost.cluster)}; {schedule.layout}", box=box.SIMPLE)
    for heading in ("ring", "rank", "device", "tokens", "share", "heads", "memory GiB", "of"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    tokens, first = schedule.tokens(work.seq_len), schedule.ranks[0]
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in sorted(zip(group.ranks, group.heads, strict=True)):
            own = rank - first
            table.add_row(
                str(position),
                str(rank),
                cost.cluster.devices[own].name,
                f"{tokens[rank]:,}",
                f"{tokens[rank] / work.seq_len:.1%}",
                str(heads),
                f"{prediction.memory_bytes[own] / GIB:.2f}",
                f"{cost.capacity_bytes_D[own] / GIB:.2f}",
            )
    console = Console(file=io.StringIO(), width=118)
    console.print(table)
    shares = ", ".join(
        f"{name} {seconds / prediction.block_s:.0%}"
        for name, seconds in (
            ("non-attention", terms.non_attention_s),
            ("all-to-all", terms.all_to_all_s),
            ("ring steps", terms.ring_steps_s),
        )
    )
    batches = f"{work.micro_batches} micro-batch{'es' if work.micro_batches > 1 else ''} of "
    lines = [
        f"for {cost.model.name}, {batches}{work.micro_batch} x {work.seq_len:,} tokens per step, ZeRO-{work.zero_stage}"
        f"{', activation checkpointing' if work.activation_checkpointing else ''}",
        f"predicted:  {time_text(prediction.iteration_s)} per step, {prediction.tokens_per_s:,.0f} tokens/s; "
        f"{time_text(prediction.block_s)} per block ({shares})",
        f"bottleneck: {prediction.bottleneck.text}",
        f"bound:      {prediction.bound_s / prediction.block_s:.1%} of the speed at perfect balance with free links",
    ]
    if prediction.reason:
        lines.append(f"memory:     {prediction.reason}")
    if found.plan is not None:
        lines.append(f"searched:   {time_text(found.plan.search_s)}; {_against_baselines(found.plan)}")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip() + "\n" + "\n".join(lines)


def _against_baselines(plan: PlannedSchedule) -> str:
    parts = []
    for kind, prediction in plan.baselines.items():
        if prediction is None:
            parts.append(f"no {kind}")
        else:
            gain = plan.prediction.tokens_per_s / prediction.tokens_per_s
            parts.append(f"{gain:.2f} x {plan.baseline_names[kind]}")
    return ", ".join(parts)
