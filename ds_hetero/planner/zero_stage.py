"""Advise another ZeRO stage if the same schedule is faster with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.planner.expert_choice import divided_stages
from ds_hetero.planner.fewer_ranks import MIN_ADVICE_GAIN
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class OtherStage:
    """A ZeRO stage with which the same schedule is faster, and fits into memory."""

    stage: int  # ZeRO stage, 0 to 3
    within: bool  # whether shards stay inside nodes, see `Workload.zero_within`
    iteration_s: float  # predicted time of an optimizer step

    @property
    def name(self) -> str:
        """The stage for people, with the key that the section needs for it."""
        return f"{self.stage}" + (' with shards inside nodes ("zero_within": "node")' if self.within else "")

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"stage": self.stage, "within_nodes": self.within, "iteration_s": self.iteration_s}


def faster_zero_stage(cost: CostModel, schedule: Schedule, now_s: float) -> OtherStage | None:
    """Return the ZeRO stage with which a schedule is fastest, if it saves 5 % of ``now_s``; else None.

    Stage 3 is also tried with shards inside nodes, which gathers no parameters between nodes.
    """
    work = cost.workload
    is_offloaded = work.offload_optimizer or work.offload_parameters
    has_several_nodes = len(cost.cluster.nodes) > 1 and work.data_parallel == 1
    stages = (0, 1, 2, 3) if work.experts is None else divided_stages(work)
    options = [(stage, False) for stage in stages]
    if cost.name == "calibrated" and has_several_nodes and not is_offloaded and work.experts is None:
        options.append((3, True))
    fitting = []
    for stage, within in options:
        changed = replace(work, zero_stage=stage, zero_within=within)
        prediction = make_cost_model(cost.name, cost.cluster, cost.model, changed).predict(schedule)
        if prediction.feasible:
            fitting.append(OtherStage(stage=stage, within=within, iteration_s=prediction.iteration_s))
    best = min(fitting, key=lambda other: other.iteration_s, default=None)
    if best is None or best.iteration_s >= (1 - MIN_ADVICE_GAIN) * now_s:
        return None
    return best
