"""Looks at the phases of pipelines every few steps: for DeepSpeed's monitor, for the table at the end, for re-planning.

One observation is one `on_all_ranks` of the moments of the steps since the last one.
"""

from __future__ import annotations

import atexit
import io
from collections.abc import Sequence
from typing import Any

from ds_hetero.common.text import time_text
from ds_hetero.job.monitor import AFTER_CHANGE, WARM_UP, EventWriter
from ds_hetero.job.pipeline_replanning import LayerReplanning
from ds_hetero.job.pipeline_times import (
    PHASES,
    MeasuredPipeline,
    RankPhases,
    common_steps,
    measure_pipelines,
    phases_of,
)
from ds_hetero.job.rank_times import possible_growth
from ds_hetero.job.report import announce
from ds_hetero.job.start import World
from ds_hetero.plans import Plan
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.pipeline.stage_clock import StageClock

__all__ = ["PipelineMonitor", "phase_events", "phase_table"]


class PipelineMonitor:
    """Observes the steps of pipelines; rank 0 reports them.

    Args:
        plan: what every rank does.
        clock: of this rank's stage.
        interval: steps between two observations.
        writer: of the events that each observation makes.
        replanning: says where layers shall be; None where the section does not ask for it.
    """

    def __init__(
        self,
        plan: Plan,
        clock: StageClock,
        interval: int,
        writer: EventWriter,
        replanning: LayerReplanning | None = None,
    ) -> None:
        self.clock, self.replanning = clock, replanning
        self._plan, self._interval, self._writer = plan, interval, writer
        self._world, self._device = World.current(), default_device()
        self._steps, self._steps_to_skip = 0, WARM_UP
        self._totals: list[RankPhases] = []
        self._measured: list[MeasuredPipeline] = []
        if self._world.rank == 0:
            atexit.register(self.report)

    def record_step(self, samples: int) -> Plan | None:
        """Count an optimizer step, and observe all ranks if it is due.

        Args:
            samples: of all optimizer steps so far, the abscissa of the monitor's events.

        Returns:
            The plan that the job shall go on with, if it is another one.

        Caller: every rank of the world, after each optimizer step.
        Collectives: every ``interval`` steps one `on_all_ranks`, and another one with re-planning.
        """
        self.clock.end_step()
        self._steps += 1
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            self.clock.pop_finished()
        elif self._steps % self._interval == 0:
            return self._observe(samples)
        return None

    @waiting_for_peers("comparing the times of the ranks")
    def _observe(self, samples: int) -> Plan | None:
        by_rank = self._world.on_all_ranks(lambda: (self.clock.pop_finished(), possible_growth(self._device)))
        steps = common_steps([of_rank for of_rank, _ in by_rank])
        if not steps:  # a device is far behind
            return None
        phases, self._measured = phases_of(self._plan, steps), measure_pipelines(self._plan, steps)
        self._totals = [a + b for a, b in zip(self._totals, phases, strict=True)] if self._totals else phases
        if self._world.rank == 0 and self._writer.enabled:
            self._writer.write_events(phase_events(phases, self._measured, samples))
        if self.replanning is None:
            return None
        plan = self.replanning.observe(self._steps, self._measured, [growth for _, growth in by_rank])
        if plan is not None:
            self._plan, self._steps_to_skip = plan, AFTER_CHANGE
            self.clock.restart()
        return plan

    def report(self) -> None:
        """Show the table on rank 0, once; steps after the last observation are not in it."""
        atexit.unregister(self.report)
        if self._totals and self._world.rank == 0:
            announce("\n" + phase_table(self._plan, self._totals, self._measured))
        self._totals = []


def phase_events(
    ranks: Sequence[RankPhases], pipelines: Sequence[MeasuredPipeline], samples: int
) -> list[tuple[str, float, int]]:
    """What DeepSpeed's monitor is given: (name, value, samples).

    Args:
        ranks: phases of each.
        pipelines: measured and predicted.
        samples: trained on so far, which DeepSpeed's own events count in.
    """
    values: list[tuple[str, float]] = []
    for number, rank in enumerate(ranks):
        values += [(f"rank{number}/{name}_share", share) for name, share in rank.shares.items()]
    for number, pipeline in enumerate(pipelines):
        values.append((f"pipeline{number}/passes_s", pipeline.passes_s))
        values.append((f"pipeline{number}/predicted_s", pipeline.predicted_s))
    values.append(("step_s", max(rank.step_s / rank.steps for rank in ranks)))
    return [(f"Heterogeneity/{name}", value, samples) for name, value in values]


def phase_table(plan: Plan, ranks: Sequence[RankPhases], pipelines: Sequence[MeasuredPipeline]) -> str:
    """One line per rank, and prediction beside measurement for every pipeline and the step.

    Args:
        plan: that the steps ran under.
        ranks: phases of each.
        pipelines: of the latest observation.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    step_s = max(rank.step_s / rank.steps for rank in ranks)
    rows = Table(title=f"Where the time of {ranks[0].steps} steps went, {time_text(step_s)} each", box=box.SIMPLE)
    for heading in ("rank", "pipeline", "stage", "layers", *PHASES):
        rows.add_column(heading, justify="right")
    for number, rank in enumerate(ranks):
        shares = [f"{rank.shares[name]:.1%}" for name in PHASES]
        rows.add_row(str(number), *_place_of(plan, number), *shares)
    file = io.StringIO()
    Console(file=file, width=100).print(rows)
    lines = [file.getvalue().rstrip()]
    for number, pipeline in enumerate(pipelines):
        lines.append(
            f"passes of pipeline {number}: predicted {time_text(pipeline.predicted_s)} from the measured speeds of its "
            f"stages, measured {time_text(pipeline.passes_s)} "
            f"(prediction {pipeline.predicted_s / pipeline.passes_s - 1:+.1%})"
        )
    if (planned_s := _planned_step_s(plan)) is not None:
        lines.append(
            f"step: the plan says {time_text(planned_s)}, measured {time_text(step_s)} "
            f"(prediction {planned_s / step_s - 1:+.1%})"
        )
    return "\n".join(lines)


def _place_of(plan: Plan, rank: int) -> tuple[str, str, str]:
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    if place is None or stage is None or stage.layers is None:
        return "", "", ""
    return str(place[0]), str(place[1]), f"{stage.layers[0]}-{stage.layers[1] - 1}"


def _planned_step_s(plan: Plan) -> float | None:
    """What the plan file predicts of a step, if it does."""
    said: Any = (plan.predicted or {}).get("step_s")
    return float(said) if isinstance(said, int | float) and said > 0 else None
