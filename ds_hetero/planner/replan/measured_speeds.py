"""Speeds of devices as a running job measured them, and the cluster at these speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean

from ds_hetero.cluster import Cluster
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost import CostModel
from ds_hetero.planner.replan.policy import Observation
from ds_hetero.values.schedule import Schedule

_ALIKE = (
    0.02  # equal devices whose speeds differ by less count as equal: noise of a measurement. Chosen, never measured
)


def measured_speeds(
    cost: CostModel, schedule: Schedule, observation: Observation, before: Sequence[float]
) -> list[float]:
    """Time that the model expects a rank to compute, over what it did; as before for a rank without work."""
    work = cost.workload
    tokens = schedule.tokens(work.seq_len)
    busy_s = cost.predict(schedule).busy_s
    expected = [
        (busy_s[rank] * cost.model.num_layers + float(cost.loss_s_per_token_D[rank]) * tokens[rank])
        * work.micro_batches
        for rank in range(cost.cluster.num_ranks)
    ]
    own_s = observation.own_s
    return [e / s if e and s else old for e, s, old in zip(expected, own_s, before, strict=True)]


def snapped_speeds(devices: Sequence[DeviceSpec], speeds: Sequence[float], error: float) -> list[float]:
    """Speeds of equal devices made equal where they differ by noise only, which keeps the search small and exact."""
    out = list(speeds)
    for device in dict.fromkeys(devices):
        ranks = sorted((r for r, d in enumerate(devices) if d == device), key=lambda r: speeds[r])
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and log(speeds[rank] / speeds[runs[-1][0]]) <= max(_ALIKE, 3 * error):
                runs[-1].append(rank)
            else:
                runs.append([rank])
        for run in runs:
            mean = exp(fmean(log(speeds[rank]) for rank in run))
            for rank in run:
                out[rank] = mean
    return out


def at_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with every rank's device that much faster at everything it computes."""
    at = iter(speeds)
    return cluster.with_devices(lambda device: _at_speed(device, next(at)))


def _at_speed(device: DeviceSpec, speed: float) -> DeviceSpec:
    efficiency = replace(
        device.efficiency,
        kernel_overhead_s=device.efficiency.kernel_overhead_s / speed,
        attention_overhead_s=device.efficiency.attention_overhead_s / speed,
        message_overhead_s=device.efficiency.message_overhead_s / speed,
    )
    return replace(
        device,
        peak_flops_per_s=device.peak_flops_per_s * speed,
        memory_bytes_per_s=device.memory_bytes_per_s * speed,
        efficiency=efficiency,
    )
