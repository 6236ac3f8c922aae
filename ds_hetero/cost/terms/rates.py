"""Rates that a cluster's devices achieve in matmuls, attention, memory traffic and kernel launches.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Bools, Floats

# Share of a device's memory bandwidth that copies reach, if no profile has measured it. Chosen, never measured.
COPY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedRates:
    """Achieved speeds and launch overheads of every rank's device, ``[D]``.

    At a ``half_`` size a kernel reaches half of its full rate, see `Efficiency`.
    """

    s_per_flop: Floats  # seconds per FLOP of a large matmul
    half_tokens: Floats  # tokens at which a matmul runs at half of that rate
    memory_s_per_byte: Floats  # seconds per byte that a memory-bound kernel reads or writes
    copy_s_per_byte: Floats  # the same for kernels counted one by one; equal where a profile measured whole layers
    is_profiled: Bools  # whether a profile measured a layer's kernels together, per byte of `elementwise_elements`
    layer_host_s: Floats  # time of the host to launch one layer's forward, which takes at least that long
    kernel_overhead_s: Floats  # host and launch time of one layer's forward outside attention
    attention_flops_per_s: dict[str, Floats]  # FLOPs per second of attention, by the name of the pass
    half_rows: Floats  # query rows at which attention runs at half of that rate
    half_kv: Floats  # key tokens at which attention runs at half of that rate
    edge_keys: Floats  # keys per query that a causal square costs beyond its half; zero for full attention
    attention_overhead_s: Floats  # host and launch time of one attention block

    @classmethod
    def of(cls, cluster: Cluster, *, causal: bool, head_dim: int) -> AchievedRates:
        """Read the rates of a cluster's devices, for causal or full attention and heads of width ``head_dim``."""
        efficiencies = [device.efficiency for device in cluster.devices]

        def share(field: str) -> Floats:
            """Read one field of `Efficiency` for every rank, ``[D]``."""
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
