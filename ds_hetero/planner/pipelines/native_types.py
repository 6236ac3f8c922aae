"""Refuse plans of pipelines in 16 bits on devices without bfloat16, where no job could run them.

Pipelines train in bfloat16 or float32, not in float16 ("fp16" of `ds_hetero.frameworks.deepspeed.keys`), and a job in
bfloat16 does not start on devices without hardware for it (`ds_hetero.job.bf16_support`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.values.plans import Plan

_16_BITS = 2  # bytes of an element


def expect_trainable(devices: Sequence[DeviceSpec], workload: Workload, plan: Plan | None = None) -> None:
    """Check that every device of a 16-bit workload has bfloat16. Raises `PlanError`, which lists devices without it.

    Args:
        devices: devices of the cluster, by rank.
        plan: the plan whose ranks are checked; None to check all ranks, before a plan is searched.
    """
    if workload.element_bytes != _16_BITS:
        return
    ranks = range(len(devices)) if plan is None else plan.ranks
    without_bf16 = ((rank, devices[rank].name) for rank in ranks if rank < len(devices) and _lacks_bf16(devices[rank]))
    ranks_by_device = ranks_by_value(without_bf16)
    if not ranks_by_device:
        return
    devices_text = "; ".join(f"{name}, {ranks_text(device_ranks)}" for name, device_ranks in ranks_by_device.items())
    raise PlanError(
        f"pipelines need bf16 or fp32, and these devices have no bf16: {devices_text}. Leave them out of the cluster; "
        'or plan one replica and train it in fp16 (--parallel sequence); or train in fp32: set "parallel": "full", '
        'remove "bf16", and the job plans its pipelines at its start.'
    )


def _lacks_bf16(device: DeviceSpec) -> bool:
    """Whether the device has no hardware for bfloat16 and computes it in float32, by the catalogue."""
    entry = CATALOGUE.get(device.name)
    return entry is not None and entry.bf16_flops_per_s is not None
