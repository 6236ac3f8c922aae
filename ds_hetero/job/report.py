"""What a job says of itself on rank 0: one line that the engine is on, and the table of the prediction."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_hetero.cluster import Cluster
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GIB
from ds_hetero.config import HeterogeneitySection
from ds_hetero.cost import Workload
from ds_hetero.job.forecast import Forecast
from ds_hetero.planner import PlannedSchedule
from ds_hetero.planner.explain import describe
from ds_hetero.plans import Plan
from ds_hetero.schedule import Schedule

__all__ = ["announce", "forecast_text", "plan_text"]

logger = logging.getLogger(__name__)

_SHOWN_GROUPS = 8  # of a schedule, and replicas of a job, that one line names


def announce(text: str) -> None:
    """Say something once: as a log record where the script lets these through, else on stderr."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(f"ds_hetero: {text}", file=sys.stderr, flush=True)


def plan_text(plan: Plan, section: HeterogeneitySection) -> str:
    """One line: ``4 ranks, schedule four_ranks.json: groups 2, heads 6+2 | 5+3, tokens 4:1 | 3:2``.

    Args:
        plan: of replicas.
        section: that the plan was made of.
    """
    source = section.schedule if isinstance(section.schedule, str) else "given inline"
    source = Path(source).name if source.endswith(".json") else source
    shapes: dict[Schedule, list[int]] = {}
    for number, schedule in enumerate(plan.schedules):
        shapes.setdefault(schedule.shifted(0), []).append(number)
    count = f"{len(plan.pipelines)} replicas, " if len(plan.pipelines) > 1 else ""
    ranks = f"{len(plan.ranks)} rank{'s' if len(plan.ranks) > 1 else ''}"
    return f"{ranks}, {count}schedule {source}: {_shapes_text(shapes)}"


def _shapes_text(shapes: dict[Schedule, list[int]]) -> str:
    if len(shapes) == 1:
        return _shape_text(next(iter(shapes)))
    parts = [f"replica {', '.join(map(str, numbers))}: {_shape_text(shape)}" for shape, numbers in shapes.items()]
    more = [f"{len(parts) - _SHOWN_GROUPS} more"] if len(parts) > _SHOWN_GROUPS else []
    return "; ".join([*parts[:_SHOWN_GROUPS], *more])


def _shape_text(schedule: Schedule) -> str:
    """``groups 2, heads 6+2 | 5+3, tokens 4:1 | 3:2``, in ring order."""
    groups = schedule.ring_groups[:_SHOWN_GROUPS]
    heads = ["+".join(map(str, group.heads)) for group in groups]
    tokens = [":".join(f"{weight:.4g}" for weight in group.tokens) for group in groups]
    more = [f"{len(schedule.groups) - _SHOWN_GROUPS} more"] if len(schedule.groups) > _SHOWN_GROUPS else []
    return f"groups {len(schedule.groups)}, heads {' | '.join([*heads, *more])}, tokens {' | '.join([*tokens, *more])}"


def forecast_text(forecasts: Sequence[Forecast]) -> str:
    """A table of who does what, and the prediction; replicas that are alike have one table."""
    alike: dict[tuple[Cluster, Workload, Schedule], list[int]] = {}
    for number, forecast in enumerate(forecasts):
        cost = forecast.cost
        alike.setdefault((cost.cluster, cost.workload, forecast.schedule.shifted(0)), []).append(number)
    parts = []
    for numbers in alike.values():
        title_prefix = f"replica {', '.join(map(str, numbers))}: " if len(forecasts) > 1 else ""
        forecast = forecasts[numbers[0]]
        parts.append(f"{_replica_table(forecast, title_prefix)}\n{_prediction_lines(forecast)}")
    return "\n".join(parts)


def _replica_table(forecast: Forecast, title_prefix: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cost, schedule, prediction = forecast.cost, forecast.schedule, forecast.prediction
    title = f"{title_prefix}{describe(schedule.shifted(0), cost.cluster)}; {schedule.layout}"
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("ring", "rank", "device", "tokens", "share", "heads", "memory GiB", "of"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    seq_len, first = cost.workload.seq_len, schedule.ranks[0]
    tokens = schedule.tokens(seq_len)
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in sorted(zip(group.ranks, group.heads, strict=True)):
            own = rank - first
            table.add_row(
                str(position),
                str(rank),
                cost.cluster.devices[own].name,
                f"{tokens[rank]:,}",
                f"{tokens[rank] / seq_len:.1%}",
                str(heads),
                f"{prediction.memory_bytes[own] / GIB:.2f}",
                f"{cost.capacity_bytes_D[own] / GIB:.2f}",
            )
    file = io.StringIO()
    Console(file=file, width=118).print(table)
    return file.getvalue().rstrip()


def _prediction_lines(forecast: Forecast) -> str:
    cost, prediction, planned = forecast.cost, forecast.prediction, forecast.planned
    work, terms = cost.workload, prediction.terms
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
    if offloaded := _offloaded(work):
        lines.append(f"not in it:  copies to and from the host and what it computes there, for the {offloaded}")
    if prediction.reason:
        lines.append(f"memory:     {prediction.reason}")
    if planned is not None:
        lines.append(f"searched:   {time_text(planned.search_s)}; {_against_baselines(planned)}")
    return "\n".join(lines)


def _offloaded(work: Workload) -> str:
    kept = {"optimizer state": work.offload_optimizer, "parameters": work.offload_parameters}
    return " and the ".join(name for name, is_offloaded in kept.items() if is_offloaded)


def _against_baselines(planned: PlannedSchedule) -> str:
    parts = []
    for kind, prediction in planned.baselines.items():
        if prediction is None:
            parts.append(f"no {kind}")
        else:
            gain = planned.prediction.tokens_per_s / prediction.tokens_per_s
            parts.append(f"{gain:.2f} x {planned.baseline_names[kind]}")
    return ", ".join(parts)
