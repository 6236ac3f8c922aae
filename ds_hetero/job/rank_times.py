"""Where each rank's time goes: from the steps of one rank to numbers for all, for the monitor and for people.

own = RankTimes.of(steps, unit_costs, ...)      this rank's steps since the last observation
times = gather(own, device)                     one all_gather
events(times, ...), table(times, ...)           for DeepSpeed's monitor, for people
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from math import hypot, inf
from statistics import median

import torch
import torch.distributed as dist

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.models import ModelSpec
from ds_hetero.planner.replan.observation import Observation
from ds_hetero.planner.replan.unit_cost import UnitCost
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.step_clock import StepTimes

__all__ = [
    "RECENT_STEPS",
    "SHARES",
    "RankTimes",
    "UnitCosts",
    "events",
    "gather",
    "imbalance",
    "observation_of",
    "peak_flops_per_s",
    "possible_growth",
    "table",
]

SHARES = ("attention", "model", "all_to_all", "ring_wait", "idle", "rest")
RECENT_STEPS = 10  # that minima, medians and maxima are of
_SPARE_MEMORY = 0.95  # of a device, for what grows with the work on it
# 4 operations forward and 8 backward per pair and element of a head count as useful (PaLM, arXiv:2204.02311,
# appendix B), of the 10 that a backward computes without the scores.
_USEFUL_PER_BACKWARD = 12 / 10
_MATMUL_FLOPS = 6  # forward and backward, per parameter and token


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Sums over ``steps`` steps of one rank, see `StepTimes`, and what a unit of its work costs it.

    Args:
        length: median of the longest sequence of a step.
        attention_s_per_flop: see `Observation`; 0 stands for None.
        model_s_per_token: likewise.
        error: see `Observation`.
        growth: see `Observation`.
        peak_flops_per_s: of the device, 0 where it is not known.
        own_min_s: shortest computing time of the latest steps, at most `RECENT_STEPS`.
        own_median_s: median of it.
        own_max_s: longest of it.
    """

    steps: float
    step_s: float
    attention_s: float
    model_s: float
    all_to_all_s: float
    ring_wait_s: float
    idle_s: float
    attention_flops: float
    attention_backward_flops: float
    tokens: float
    length: float
    attention_s_per_flop: float
    model_s_per_token: float
    error: float
    growth: float
    peak_flops_per_s: float
    own_min_s: float
    own_median_s: float
    own_max_s: float

    @classmethod
    def of(
        cls,
        steps: Sequence[StepTimes],
        unit_costs: UnitCosts,
        growth: float,
        peak_flops_per_s: float,
        recent_s: Sequence[float],
    ) -> RankTimes:
        """Sum up steps of this rank.

        Args:
            steps: since the last observation.
            unit_costs: which have been given the same steps.
            growth: by what factor the work on the rank may grow before its memory is full.
            peak_flops_per_s: of the device, 0 where it is not known.
            recent_s: computing time of the latest steps, see `own_s`.
        """
        (per_flop, flop_error), (per_token, token_error) = unit_costs.attention.take(), unit_costs.model.take()
        summed = {name: float(sum(getattr(step, name) for step in steps)) for name in _SUMMED}
        own_s = summed["attention_s"] + summed["model_s"]
        error_s = hypot(flop_error * summed["attention_s"], token_error * summed["model_s"])
        return cls(
            **summed,
            steps=len(steps),
            length=median(step.length for step in steps) if steps else 0.0,
            attention_s_per_flop=per_flop or 0.0,
            model_s_per_token=per_token or 0.0,
            error=error_s / own_s if own_s else 0.0,
            growth=growth,
            peak_flops_per_s=peak_flops_per_s,
            own_min_s=min(recent_s, default=0.0),
            own_median_s=median(recent_s) if recent_s else 0.0,
            own_max_s=max(recent_s, default=0.0),
        )

    def __add__(self, later: RankTimes) -> RankTimes:
        sums = {name: getattr(self, name) + getattr(later, name) for name in ("steps", *_SUMMED)}
        latest = {f.name: getattr(later, f.name) for f in fields(later) if f.name not in sums}
        return RankTimes(**sums, **latest)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the steps' time, by the names in `SHARES`; they add up to 1."""
        known = {name: getattr(self, f"{name}_s") / self.step_s for name in SHARES if name != "rest"}
        return {**known, "rest": 1 - sum(known.values())}

    @property
    def own_s(self) -> float:
        """Seconds that the rank computes in a step, as far as they grow with its share."""
        return (self.attention_s + self.model_s) / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens of this rank."""
        return self.tokens / self.step_s

    def model_flops_utilization(self, model: ModelSpec | None, peak_flops_per_s: float) -> float | None:
        """Useful operations of this rank per second, over the peak of its device; None where either is not known.

        Useful are those of the model with causality counted, each once, however often they are computed.
        """
        peak = peak_flops_per_s or self.peak_flops_per_s
        if model is None or not peak:
            return None
        per_token = model.num_layers * model.active_layer_parameters + model.hidden_size * model.vocab_size
        useful = _MATMUL_FLOPS * per_token * self.tokens + _USEFUL_PER_BACKWARD * self.attention_backward_flops
        return useful / self.step_s / peak


_SUMMED = (
    "step_s",
    "attention_s",
    "model_s",
    "all_to_all_s",
    "ring_wait_s",
    "idle_s",
    "attention_flops",
    "attention_backward_flops",
    "tokens",
)


class UnitCosts:
    """What attention and the rest of a layer cost this rank."""

    def __init__(self) -> None:
        self.attention, self.model = UnitCost(), UnitCost()

    def add(self, step: StepTimes) -> None:
        """Take one step into account."""
        self.attention.add(step.attention_s, step.attention_flops)
        self.model.add(step.model_s, step.tokens)

    def restart(self) -> None:
        """See `UnitCost.restart`."""
        self.attention.restart()
        self.model.restart()


def gather(own: RankTimes, device: torch.device) -> list[RankTimes]:
    """Return the times of every rank.

    Args:
        own: of this rank.
        device: where the default process group wants its tensors.

    Caller: every rank of the world.
    Collectives: one all_gather of 19 numbers.
    """
    row = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    with waiting_for_peers("comparing the times of the ranks"):
        dist.all_gather(rows, row)
    names = [f.name for f in fields(RankTimes)]
    return [RankTimes(**dict(zip(names, values, strict=True))) for values in torch.stack(rows).tolist()]


def observation_of(ranks: Sequence[RankTimes]) -> Observation:
    """Return the observation of one replica, from the times of its ranks."""
    return Observation(
        attention_flops=tuple(rank.attention_flops / rank.steps for rank in ranks),
        tokens=tuple(rank.tokens / rank.steps for rank in ranks),
        attention_s_per_flop=tuple(rank.attention_s_per_flop or None for rank in ranks),
        model_s_per_token=tuple(rank.model_s_per_token or None for rank in ranks),
        error=tuple(rank.error for rank in ranks),
        growth=tuple(rank.growth for rank in ranks),
        step_s=max(rank.step_s / rank.steps for rank in ranks),
        length=round(median(rank.length for rank in ranks)),
    )


def peak_flops_per_s(device: torch.device) -> float:
    """The catalogue's for this device, 0 where it has none."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    name = catalogue_name(properties.name, properties.total_memory)
    return CATALOGUE[name].device.peak_flops_per_s if name else 0.0


def possible_growth(device: torch.device) -> float:
    """By what factor the memory in use on this device could grow; infinite on the host."""
    if device.type != "cuda":
        return inf
    total = torch.cuda.get_device_properties(device).total_memory
    return _SPARE_MEMORY * total / max(torch.cuda.max_memory_allocated(device), 1)


def events(
    ranks: Sequence[RankTimes], model: ModelSpec | None, peaks: Sequence[float], changes: int, samples: int
) -> list[tuple[str, float, int]]:
    """What DeepSpeed's monitor is given, per rank and of all ranks: (name, value, samples).

    Args:
        ranks: their times.
        model: what is trained; None where no cost model describes it.
        peaks: peak rates of the devices, 0 where unknown.
        changes: of the schedule, since the start.
        samples: trained on so far, which DeepSpeed's own events count in.
    """
    values: list[tuple[str, float]] = []
    for number, (rank, peak) in enumerate(zip(ranks, peaks, strict=True)):
        values += [(f"rank{number}/{name}_share", share) for name, share in rank.shares.items()]
        values.append((f"rank{number}/tokens_per_s", rank.tokens_per_s))
        if (mfu := rank.model_flops_utilization(model, peak)) is not None:
            values.append((f"rank{number}/mfu", mfu))
    values.append(("tokens_per_s", sum(rank.tokens_per_s for rank in ranks)))
    values.append(("imbalance", imbalance(ranks)))
    values.append(("schedule_changes", float(changes)))
    return [(f"Heterogeneity/{name}", value, samples) for name, value in values]


def imbalance(ranks: Sequence[RankTimes]) -> float:
    """Computing time of the busiest rank over the mean; 1 is balanced."""
    own = [rank.own_s for rank in ranks]
    return max(own) * len(own) / sum(own) if any(own) else 1.0


def table(ranks: Sequence[RankTimes], model: ModelSpec | None, peaks: Sequence[float], changes: int) -> str:
    """One line per rank; arguments as for `events`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    utilization = [rank.model_flops_utilization(model, peak) for rank, peak in zip(ranks, peaks, strict=True)]
    steps = int(ranks[0].steps)
    title = f"Where the time of {steps} steps went: imbalance {imbalance(ranks):.2f}, {changes} changes of schedule"
    rows = Table(title=title, box=box.SIMPLE)
    for heading in ("rank", "attention", "model", "all-to-all", "ring wait", "idle", "rest", "tokens/s", "MFU"):
        rows.add_column(heading, justify="right")
    for number, (rank, mfu) in enumerate(zip(ranks, utilization, strict=True)):
        shares = [f"{rank.shares[name]:.1%}" for name in SHARES]
        rows.add_row(str(number), *shares, f"{rank.tokens_per_s:,.0f}", "" if mfu is None else f"{mfu:.1%}")
    file = io.StringIO()
    Console(file=file, width=100).print(rows)
    return file.getvalue().rstrip()
