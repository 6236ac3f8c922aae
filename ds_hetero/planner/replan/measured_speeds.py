"""Compute the speeds of devices from a running job's measurements, and describe the cluster at these speeds."""

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

# Relative difference up to which speeds of equal devices count as equal: noise of measurements. Chosen, never measured.
_SPEED_NOISE = 0.02


def measured_speeds(
    cost: CostModel, schedule: Schedule, observation: Observation, before: Sequence[float]
) -> list[float]:
    """Return the speed of every rank, relative to the description of the cluster: 0.8 is 20 % slower than described.

    The speed is the predicted over the measured seconds that the rank computes in a step.

    Args:
        schedule: schedule under which the steps were measured.
        before: speeds from earlier observations, by rank; ranks without work keep them.
    """
    work = cost.workload
    tokens = schedule.tokens(work.seq_len)
    busy_s = cost.predict(schedule).busy_s

    def predicted_s(rank: int) -> float:
        """Return the seconds that a rank computes in a step at the described speed."""
        layers_s = busy_s[rank] * cost.model.num_layers
        loss_s = float(cost.loss_s_per_token_D[rank]) * tokens[rank]
        return (layers_s + loss_s) * work.micro_batches

    speeds = []
    for rank, (measured_s, speed_before) in enumerate(zip(observation.compute_s, before, strict=True)):
        expected_s = predicted_s(rank)
        speeds.append(expected_s / measured_s if expected_s and measured_s else speed_before)
    return speeds


def snapped_speeds(devices: Sequence[DeviceSpec], speeds: Sequence[float], error: float) -> list[float]:
    """Return speeds in which equal devices have equal speeds if they differ by noise only.

    With fewer kinds of devices the search is more exact. Example: four equal devices at 0.995, 1.0, 1.005 and 0.5
    become three of 1.0, their geometric mean, and one of 0.5.

    Args:
        devices: devices by rank.
        speeds: speeds by rank.
        error: relative standard error of the speeds.
    """
    tolerance = max(_SPEED_NOISE, 3 * error)
    snapped = list(speeds)
    for device in dict.fromkeys(devices):
        ranks = [rank for rank, other in enumerate(devices) if other == device]
        ranks.sort(key=speeds.__getitem__)
        # Ranks in ascending order are cut into runs: a run ends before the first rank that is faster than the run's
        # slowest rank by more than noise.
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and log(speeds[rank] / speeds[runs[-1][0]]) <= tolerance:
                runs[-1].append(rank)
            else:
                runs.append([rank])
        for run in runs:
            mean_speed = exp(fmean(log(speeds[rank]) for rank in run))
            for rank in run:
                snapped[rank] = mean_speed
    return snapped


def at_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """Return the cluster with the device of every rank ``speeds[rank]`` times as fast."""
    speed_of_next = iter(speeds)  # devices are replaced in the order of the ranks
    return cluster.with_devices(lambda device: _at_speed(device, next(speed_of_next)))


def _at_speed(device: DeviceSpec, speed: float) -> DeviceSpec:
    """Return the device with all rates multiplied, and all overheads divided, by ``speed``."""
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
