"""Tell when the ranks run other attention kernels than those whose rates the plan counts, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.text import time_text
from ds_hetero.cost import make_cost_model
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.forecast import Forecast
from ds_hetero.errors import HeteroError
from ds_hetero.planner import planning

# Rates that differ by less are not told: steps are not predicted better than that.
_LEAST_DIFFERENCE = 0.02
# Most ranks for which another plan is searched at a job's start, which takes under a second for so many.
_MAX_SEARCHED_RANKS = 64


def other_kernel_lines(start: JobStart) -> Iterator[str]:
    """Yield a line on the slowest replica whose devices are planned with the rates of other kernels than will run.

    Only devices with rates of the catalogue are compared. Rates of a profile are those of the kernel that it measured.
    """
    rates_by_rank = start.facts.attention_rates
    if not rates_by_rank:
        return
    slowest: tuple[float, str] | None = None
    for forecast in start.forecasts:
        line = _line(forecast, [rates_by_rank[rank] for rank in forecast.schedule.ranks])
        if line is not None and (slowest is None or line[0] > slowest[0]):
            slowest = line
    if slowest is not None:
        yield slowest[1]


def _line(forecast: Forecast, rates_by_rank: list[str]) -> tuple[float, str] | None:
    """Return the predicted step with the kernels that will run, and the line; None if the plan counts them."""
    cost, schedule = forecast.cost, forecast.schedule.shifted(0)
    cluster = as_it_runs(cost.cluster, rates_by_rank)
    changes = {
        (planned.name, planned.attention_kernel, actual.attention_kernel)
        for planned, actual in zip(cost.cluster.devices, cluster.devices, strict=True)
        if _differ(planned, actual)
    }
    if not changes:
        return None
    step_s = make_cost_model(cost.name, cluster, cost.model, cost.workload).predict(schedule).iteration_s
    changed = "; ".join(f"{name} runs {actual}, planned is {planned}" for name, planned, actual in sorted(changes))
    line = (
        f"attention kernels differ from those of the plan: {changed}. Predicted {time_text(step_s)} per step, planned "
        f"{time_text(forecast.prediction.iteration_s)}"
    )
    better_s = _replanned_s(forecast, cluster)
    if better_s is not None and better_s < (1 - _LEAST_DIFFERENCE) * step_s:
        line += f"; a plan for the kernels that run takes {time_text(better_s)}"
    names = ", ".join(f'"{name}": {{"attention": "{actual}"}}' for name, _, actual in sorted(changes))
    return step_s, f'{line}. Set "cluster": "measure", or in the cluster file "devices": {{{names}}}'


def as_it_runs(cluster: Cluster, rates_by_rank: list[str]) -> Cluster:
    """Return the cluster with the rates of the kernels that run, on devices that have rates of the catalogue."""
    rates = iter(rates_by_rank)

    def with_own_rates(device: DeviceSpec) -> DeviceSpec:
        name, entry = next(rates, ""), CATALOGUE.get(device.name)
        has_catalogue_rates = entry is not None and bool(device.attention_kernel)
        if not has_catalogue_rates or entry is None or name not in entry.attention:
            return device
        return with_attention(device, name, entry.attention)

    return cluster.with_devices(with_own_rates)


def _differ(planned: DeviceSpec, actual: DeviceSpec) -> bool:
    """Return True if a pass of attention has another rate."""
    pairs = (
        (planned.efficiency.attention_forward, actual.efficiency.attention_forward),
        (planned.efficiency.attention_backward, actual.efficiency.attention_backward),
    )
    return any(abs(rate - other) > _LEAST_DIFFERENCE * other for rate, other in pairs)


def _replanned_s(forecast: Forecast, cluster: Cluster) -> float | None:
    """Return the predicted step of a plan for ``cluster``; None if none is searched for, or none fits."""
    if forecast.planned is None or cluster.num_ranks > _MAX_SEARCHED_RANKS:
        return None
    try:
        return planning.plan(cluster, forecast.cost.model, forecast.cost.workload).prediction.iteration_s
    except HeteroError:
        return None
