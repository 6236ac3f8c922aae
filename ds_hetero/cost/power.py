"""Power of a device: under load, idle, and on average over a step."""

from __future__ import annotations

from ds_hetero.cluster.topology import DeviceSpec

# Idle power as a share of the power under load, if a device gives none. Chosen, never measured.
IDLE_SHARE = 0.25


def idle_watts(device: DeviceSpec) -> float:
    """Return the power of an idle device in watts: as given, or a share of its power under load."""
    if device.idle_watts is not None:
        return device.idle_watts
    return IDLE_SHARE * (device.watts or 0.0)


def average_watts(device: DeviceSpec, busy: float) -> float:
    """Return the average power in watts of a device that computes for the share ``busy`` of the time, at most 1."""
    load_w, idle_w = device.watts or 0.0, idle_watts(device)
    return idle_w + min(busy, 1.0) * (load_w - idle_w)
