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

# Equal devices whose speeds differ by a smaller share count as equal: noise of a measurement. Chosen, never measured.
_ALIKE = 0.02


def measured_speeds(
    cost: CostModel, schedule: Schedule, observation: Observation, before: Sequence[float]
) -> list[float]:
    """Speed of every rank: the seconds that it is predicted to compute in a step, over those that it computed.

    Args:
        before: speeds of ranks without work, which say nothing now.
    """
    work = cost.workload
    tokens = schedule.tokens(work.seq_len)
    busy_s = cost.predict(schedule).busy_s

    def predicted_s(rank: int) -> float:
        layers_s = busy_s[rank] * cost.model.num_layers
        loss_s = float(cost.loss_s_per_token_D[rank]) * tokens[rank]
        return (layers_s + loss_s) * work.micro_batches

    speeds = []
    for rank, (measured_s, speed_before) in enumerate(zip(observation.own_s, before, strict=True)):
        expected_s = predicted_s(rank)
        speeds.append(expected_s / measured_s if expected_s and measured_s else speed_before)
    return speeds


def snapped_speeds(devices: Sequence[DeviceSpec], speeds: Sequence[float], error: float) -> list[float]:
    """Speeds of equal devices made equal where they differ by noise only, which keeps the search small and exact.

    Four equal devices at 0.995, 1.0, 1.005 and 0.5 become three of 1.0, their geometric mean, and one of 0.5.

    Args:
        error: relative standard error of the speeds.
    """
    tolerance = max(_ALIKE, 3 * error)
    snapped = list(speeds)
    for device in dict.fromkeys(devices):
        ranks = [rank for rank, other in enumerate(devices) if other == device]
        ranks.sort(key=speeds.__getitem__)
        runs: list[list[int]] = []  # of speeds that differ by noise from the slowest of the run
        for rank in ranks:
            if runs and log(speeds[rank] / speeds[runs[-1][0]]) <= tolerance:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        for run in runs:
            mean = exp(fmean(log(speeds[rank]) for rank in run))
            for rank in run:
                snapped[rank] = mean
    return snapped


def at_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with every rank's device that much faster at everything it computes."""
    speed_of_next = iter(speeds)  # devices are replaced in the order of the ranks
    return cluster.with_devices(lambda device: _at_speed(device, next(speed_of_next)))


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
