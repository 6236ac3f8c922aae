"""Achieved rates of the devices of a cluster: matmuls, attention, memory traffic, launches.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Bools, Floats

# Share of a device's bandwidth that copies reach where no profile has measured them. Chosen, never measured.
COPY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedRates:
    """Achieved rates of every rank, ``[D]``; see `Efficiency` for the meaning of the half-sizes."""

    s_per_flop: Floats  # seconds per FLOP of a large matmul
    half_tokens: Floats  # tokens at which a matmul runs at half of that rate
    memory_s_per_byte: Floats  # seconds per byte that a memory-bound kernel reads or writes
    copy_s_per_byte: Floats  # of kernels that are counted one by one; the same where a profile measured them together
    is_profiled: Bools  # whether the kernels of a layer were measured together, `elementwise_elements` their measure
    layer_host_s: Floats  # least time of one layer's forward, that of the host to launch it
    kernel_overhead_s: Floats  # host and launch time of one layer's forward outside attention
    attention_flops_per_s: dict[str, Floats]  # FLOPs per second of attention, by the name of the pass
    half_rows: Floats  # query rows at which attention runs at half of that rate
    half_kv: Floats  # key tokens at which attention runs at half of that rate
    edge_keys: Floats  # keys per query that a causal square costs beyond its half; zero for full attention
    attention_overhead_s: Floats  # host and launch time of one attention block

    @classmethod
    def of(cls, cluster: Cluster, *, causal: bool, head_dim: int) -> AchievedRates:
        """The rates of a cluster's devices for causal or full attention and heads of a width."""
        efficiencies = [device.efficiency for device in cluster.devices]

        def share(field: str) -> Floats:
            """One field of `Efficiency` of every rank, ``[D]``."""
            return np.array([getattr(efficiency, field) for efficiency in efficiencies])

        is_profiled = np.array([efficiency.is_profiled for efficiency in efficiencies])
        memory_s_per_byte = 1 / (cluster.memory_bytes_per_s * share("memory"))
        copy_s_per_byte = 1 / (COPY_SHARE * cluster.memory_bytes_per_s)
        return cls(
            s_per_flop=1 / (cluster.peak_flops_per_s * share("matmul")),
            half_tokens=share("matmul_half_tokens"),
            memory_s_per_byte=memory_s_per_byte,
            copy_s_per_byte=np.where(is_profiled, memory_s_per_byte, copy_s_per_byte),
            is_profiled=is_profiled,
            layer_host_s=share("layer_host_s"),
            kernel_overhead_s=share("kernel_overhead_s"),
            attention_flops_per_s={
                name: cluster.peak_flops_per_s * [device.attention_share(name, head_dim) for device in cluster.devices]
                for name in ("forward", "backward")
            },
            half_rows=share("attention_half_rows"),
            half_kv=share("attention_half_kv"),
            edge_keys=share("attention_edge_keys") if causal else np.zeros(cluster.num_ranks),
            attention_overhead_s=share("attention_overhead_s"),
        )
