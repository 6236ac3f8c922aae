"""Power of a device: under load, idle, and on average over a step."""

from __future__ import annotations

from ds_hetero.cluster.topology import DeviceSpec

# Of the power under load, where a device does not say. Chosen, never measured.
IDLE_SHARE = 0.25


def idle_watts(device: DeviceSpec) -> float:
    """Power of a device that waits. Its power under load is known."""
    if device.idle_watts is not None:
        return device.idle_watts
    return IDLE_SHARE * (device.watts or 0.0)


def average_watts(device: DeviceSpec, busy: float) -> float:
    """Power of a device that computes for the share ``busy`` of the time; more than all of it counts as all."""
    full, idle = device.watts or 0.0, idle_watts(device)
    return idle + min(busy, 1.0) * (full - idle)
