"""Whether pipelines can train in 16 bits on a cluster.

Pipelines train in bfloat16 or float32, not in float16 ("fp16" of `ds_hetero.frameworks.deepspeed.keys`), and a job in
bfloat16 is refused on devices without hardware for it (`ds_hetero.job.native_types`). So no plan of pipelines in 16
bits can run there.
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
    """Refuse pipelines in 16 bits on devices that lack bfloat16. Raises `PlanError`: ranks, devices, what to change.

    Args:
        devices: of the cluster, by rank.
        plan: that has been made; None where one is to be searched for, which may use every rank.
    """
    if workload.element_bytes != _16_BITS:
        return
    ranks = range(len(devices)) if plan is None else plan.ranks
    lacking = ((rank, devices[rank].name) for rank in ranks if rank < len(devices) and _lacks_bf16(devices[rank]))
    by_device = ranks_by_value(lacking)
    if not by_device:
        return
    listed = "; ".join(f"{name}, {ranks_text(of_ranks)}" for name, of_ranks in by_device.items())
    raise PlanError(
        f"pipelines train in bf16 or fp32, not in fp16, and these devices have no bf16: {listed}. Leave them out of "
        "the cluster; or plan one replica (--parallel sequence), and train it in fp16; or train in fp32, for which a "
        'job with "parallel": "full" and without "bf16" plans its pipelines itself when it starts.'
    )


def _lacks_bf16(device: DeviceSpec) -> bool:
    entry = CATALOGUE.get(device.name)
    return entry is not None and entry.bf16_flops_per_s is not None
