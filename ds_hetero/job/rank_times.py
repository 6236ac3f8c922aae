"""Times of one rank: the parts of its steps, and the cost of a unit of its work.

    replicas     attention, model, all_to_all, ring_wait, idle      `SHARES`
    pipelines    forward, backward, hop, bubble, sync               `PHASES`, see `ds_hetero.job.pipeline_times`

The remainder of a step is called ``"rest"``: the optimizer, the loader, the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import hypot
from statistics import median

import torch

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.runtime.step_clock import StepTimes

SHARES = ("attention", "model", "all_to_all", "ring_wait", "idle")
"""Measured parts of a step of replicas."""
PHASES = ("forward", "backward", "hop", "bubble", "sync")
"""Measured parts of a step of pipelines."""
RECENT_STEPS = 10  # steps over which minima, medians and maxima are taken; chosen, never measured
# Useful FLOPs are 4 forward and 8 backward per query-key pair and head dimension (PaLM, arXiv:2204.02311,
# appendix B). `StepTimes.attention_backward_flops` counts 10 backward, as kernels compute the scores again; so useful
# FLOPs of both passes are 12 / 10 of the counted ones.
_USEFUL_PER_BACKWARD = 12 / 10
_MATMUL_FLOPS = 6  # forward and backward, per parameter and token (PaLM, appendix B)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """One rank's times, summed over ``steps`` steps (see `StepTimes`), and its seconds per FLOP and per token."""

    steps: float
    step_s: float
    attention_s: float
    model_s: float
    all_to_all_s: float
    ring_wait_s: float
    idle_s: float
    sync_s: float
    attention_flops: float
    attention_backward_flops: float
    tokens: float
    length: float  # median of the longest sequence of a step
    attention_s_per_flop: float  # see `Observation`; 0 stands for None
    model_s_per_token: float  # likewise
    error: float  # relative standard error of the two costs, see `Observation`
    growth: float  # factor by which the work may grow before the memory is full, see `Observation`
    peak_flops_per_s: float  # of the device; 0 if unknown
    own_min_s: float  # shortest computing time of the latest `RECENT_STEPS` steps
    own_median_s: float  # median of the same
    own_max_s: float  # longest of the same
    forward_s: float = 0.0  # this field and the next ones are times of passes, of pipelines alone
    backward_s: float = 0.0
    hop_s: float = 0.0  # packing and sending, and waiting while a message is on the wire
    bubble_s: float = 0.0  # waiting for a neighbour that still computes, and for the slowest rank after the passes

    @classmethod
    def from_steps(
        cls,
        steps: Sequence[StepTimes],
        unit_costs: RankUnitCosts,
        growth: float,
        peak_flops_per_s: float,
        recent_s: Sequence[float],
    ) -> RankTimes:
        """Sum up steps of this rank.

        Args:
            unit_costs: unit costs of the same steps.
            growth: factor by which the work on the rank may grow before its memory is full.
            peak_flops_per_s: of the device; 0 if unknown.
            recent_s: seconds of each of the latest steps in which the rank computed, see `compute_s`.
        """
        per_flop, flop_error = unit_costs.attention.take()
        per_token, token_error = unit_costs.model.take()
        sums = sums_of(steps)
        compute_s = sums["attention_s"] + sums["model_s"]
        # The two errors are independent, so their squares add up.
        error_s = hypot(flop_error * sums["attention_s"], token_error * sums["model_s"])
        return cls(
            **sums,
            steps=len(steps),
            length=median(step.length for step in steps) if steps else 0.0,
            attention_s_per_flop=per_flop or 0.0,
            model_s_per_token=per_token or 0.0,
            error=error_s / compute_s if compute_s else 0.0,
            growth=growth,
            peak_flops_per_s=peak_flops_per_s,
            own_min_s=min(recent_s, default=0.0),
            own_median_s=median(recent_s) if recent_s else 0.0,
            own_max_s=max(recent_s, default=0.0),
        )

    def __add__(self, later: RankTimes) -> RankTimes:
        """Add the sums of ``later`` to these; every other field, such as a cost, is taken from ``later``."""
        sums = {name: getattr(self, name) + getattr(later, name) for name in ("steps", *_STEP_SUMS, *_PASS_SUMS)}
        latest = {field.name: getattr(later, field.name) for field in fields(later) if field.name not in sums}
        return RankTimes(**sums, **latest)

    def shares(self, names: Sequence[str]) -> dict[str, float]:
        """Return each part's share of the steps' time, and that of the ``"rest"``; they sum to 1.

        Args:
            names: of the parts, `SHARES` or `PHASES`.
        """
        shares = {name: getattr(self, f"{name}_s") / self.step_s for name in names}
        return {**shares, "rest": 1 - sum(shares.values())}

    @property
    def compute_s(self) -> float:
        """Mean seconds of a step that the rank computes, in attention or elsewhere in the model, without waiting."""
        return (self.attention_s + self.model_s) / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this rank."""
        return self.tokens / self.step_s

    def model_flops_utilization(self, model: ModelSpec | None, peak_flops_per_s: float) -> float | None:
        """Return the rank's MFU: useful FLOPs per second over the peak of its device; None if either is unknown.

        Useful FLOPs are those of the model under its causal mask, each counted once, although checkpointing and
        kernels compute some of them again.

        Args:
            peak_flops_per_s: from the cluster file; 0 for the catalogue's figure of the device.
        """
        peak = peak_flops_per_s or self.peak_flops_per_s
        if model is None or not peak:
            return None
        num_parameters = model.num_layers * model.active_layer_parameters + model.hidden_size * model.vocab_size
        matmul_flops = _MATMUL_FLOPS * num_parameters * self.tokens
        attention_flops = _USEFUL_PER_BACKWARD * self.attention_backward_flops
        return (matmul_flops + attention_flops) / self.step_s / peak


_STEP_SUMS = (
    "step_s",
    "attention_s",
    "model_s",
    "all_to_all_s",
    "ring_wait_s",
    "idle_s",
    "sync_s",
    "attention_flops",
    "attention_backward_flops",
    "tokens",
)
_PASS_SUMS = ("forward_s", "backward_s", "hop_s", "bubble_s")


def sums_of(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return the sums of a rank's times over ``steps``; keys are fields of `RankTimes`."""
    return {name: float(sum(getattr(step, name) for step in steps)) for name in _STEP_SUMS}


def peak_flops_per_s(device: torch.device) -> float:
    """Return the peak FLOP/s of this device in the catalogue; 0 if the catalogue lacks it."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    name = catalogue_name(properties.name, properties.total_memory)
    return CATALOGUE[name].device.peak_flops_per_s if name else 0.0
