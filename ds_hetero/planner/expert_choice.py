"""Choose how the experts of a mixture are divided among ranks, or that they are not divided.

Divided experts stay where they are and tokens travel to them. Otherwise weights travel to the tokens (ZeRO-3), or every
rank has all experts (ZeRO 0 to 2). Few tokens are cheaper to send than many weights, and many tokens dearer.

Three divisions are tried: by speed, by speed as far as memory allows, and by memory. The time of experts is that of the
slowest rank, so without a limit of memory by speed is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import time_text
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.expert_shares import BY_MEMORY, BY_SPEED, expert_weights, predicts_experts
from ds_hetero.cost.terms.model_states import FP32_BYTES, DividedExperts, static_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share

# Share of the memory that other states leave free which experts may fill; the rest is for activations, buffers and
# gathered weights. Chosen, never measured: each division is judged by its whole prediction anyway.
_EXPERTS_FILL = 0.8


def divisions(model: ModelSpec, work: Workload, cluster: Cluster) -> Iterator[Workload]:
    """Yield the workload under every division of experts that is tried; nothing if a job cannot divide them."""
    can_divide = predicts_experts(model) and cluster.num_ranks > 1 and work.data_parallel == 1
    offloads_states = work.offload_optimizer or work.offload_parameters
    has_stage = work.zero_stage in divided_stages(work)
    if not can_divide or not has_stage or offloads_states or work.zero_within or work.quantization is not None:
        return
    yield replace(work, experts=BY_SPEED)
    limited = by_speed_within_memory(model, work, cluster)
    if limited is not None and limited != share(model.num_experts, expert_weights(BY_SPEED, cluster)):
        yield replace(work, experts=limited)
    yield replace(work, experts=BY_MEMORY)


def divided_stages(work: Workload) -> tuple[int, ...]:
    """Return the ZeRO stages of jobs that divide experts: those that `check_experts` of the section admits."""
    return (1, 2, 3) if work.element_bytes < FP32_BYTES else (0, 1, 2, 3)


def by_speed_within_memory(model: ModelSpec, work: Workload, cluster: Cluster) -> tuple[int, ...] | None:
    """Return the experts of every rank: by speed, but no more than its memory takes; None if memories are too small.

    Experts beyond a rank's limit go to the ranks that would end first with one more. Example: 8 experts of 10 GiB on
    ranks of speed 3 and 1 with room for 50 and 40 GiB are 5 and 3, where speeds alone would say 6 and 2.
    """
    of_one = replace(work, experts=(1.0,) + (0.0,) * (cluster.num_ranks - 1))  # rank 0 has all experts
    all_experts = DividedExperts.of(model, of_one, cluster)
    bytes_D = np.sum(list(all_experts.by_part.values()), axis=0)
    expert_bytes = float(bytes_D[0]) / model.num_experts
    rest_D = static_bytes(model, of_one, cluster) - (bytes_D - all_experts.step_D)
    capacity_D = np.array([float(device.usable_bytes) for device in cluster.devices])
    most_D = np.floor(np.maximum(_EXPERTS_FILL * (capacity_D - rest_D), 0.0) / expert_bytes).astype(int)
    if most_D.sum() < model.num_experts:
        return None
    speed_D = np.array(expert_weights(BY_SPEED, cluster))
    counts_D = np.minimum(np.array(share(model.num_experts, speed_D.tolist())), most_D)
    for _ in range(model.num_experts - int(counts_D.sum())):
        end_s_D = np.where(counts_D < most_D, (counts_D + 1) / speed_D, np.inf)
        counts_D[int(end_s_D.argmin())] += 1
    return tuple(counts_D.tolist())


@dataclass(frozen=True, kw_only=True)
class OtherExperts:
    """The same schedule with experts that are divided instead of gathered, or the other way round."""

    workload: Workload
    iteration_s: float  # predicted time of an optimizer step
    fits: bool

    @property
    def name(self) -> str:
        """What travels, for people: ``tokens that travel (experts by speed, ZeRO 1)``."""
        if self.workload.experts is None:
            return f"weights that travel (ZeRO {self.workload.zero_stage})"
        return f"tokens that travel ({self.workload.experts_in_words}, ZeRO {self.workload.zero_stage})"

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        experts = self.workload.experts
        return {
            "experts": list(experts) if isinstance(experts, tuple) else experts,
            "zero_stage": self.workload.zero_stage,
            "iteration_s": self.iteration_s,
            "fits": self.fits,
        }


def other_experts(cost: CostModel, schedule: Schedule) -> OtherExperts | None:
    """Predict a schedule with experts the other way: gathered if they are divided, else under their best division.

    Returns:
        None if experts cannot be divided, or no division fits into memory.
    """
    if cost.workload.experts is not None:
        return _predicted(gathered_instead(cost), schedule)
    if cost.name != "calibrated":
        return None
    work = cost.workload
    stage = work.zero_stage if work.zero_stage in (1, 2) else 1
    divided = []
    for division in divisions(cost.model, replace(work, zero_stage=stage, zero_within=False), cost.cluster):
        divided.append(_predicted(make_cost_model(cost.name, cost.cluster, cost.model, division), schedule))
    return min((other for other in divided if other.fits), key=lambda other: other.iteration_s, default=None)


def other_experts_text(other: OtherExperts) -> str:
    """Say what a step of the same schedule takes with experts the other way."""
    if not other.fits:
        return f"{other.name} do not fit with this schedule"
    return f"{other.name} would take {time_text(other.iteration_s)} a step with this schedule"


def _predicted(cost: CostModel, schedule: Schedule) -> OtherExperts:
    prediction = cost.predict(schedule)
    return OtherExperts(workload=cost.workload, iteration_s=prediction.iteration_s, fits=prediction.feasible)


def gathered_instead(cost: CostModel) -> CostModel:
    """Return the cost model of the same job whose experts are not divided, but gathered as other weights (ZeRO-3)."""
    workload = replace(cost.workload, experts=None, zero_stage=3)
    return make_cost_model(cost.name, cost.cluster, cost.model, workload)
