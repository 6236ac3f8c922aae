"""Rates that the devices of a cluster achieve: the rates of the calibrated cost model, by rank.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ds_hetero.cluster.device import Efficiency
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedRates:
    """Achieved rates of every rank, ``[D]``; see `Efficiency` for the meaning of the half-sizes.

    Args:
        s_per_flop: seconds per operation of a large matrix product.
        half_tokens: tokens at which a matrix product runs at half of that rate.
        memory_s_per_byte: seconds per byte that a memory-bound kernel reads or writes.
        layer_host_s: least time of one layer's forward, that of the host to launch it.
        kernel_overhead_s: host and launch time of one layer's forward outside attention.
        attention_flops_per_s: operations per second of attention, by the name of the pass.
        half_rows: query rows at which attention runs at half of that rate.
        half_kv: key tokens at which attention runs at half of that rate.
        edge_keys: keys per query that a causal square costs beyond its half; zero for full attention.
        attention_overhead_s: host and launch time of one attention block.
    """

    s_per_flop: Floats
    half_tokens: Floats
    memory_s_per_byte: Floats
    layer_host_s: Floats
    kernel_overhead_s: Floats
    attention_flops_per_s: dict[str, Floats]
    half_rows: Floats
    half_kv: Floats
    edge_keys: Floats
    attention_overhead_s: Floats

    @classmethod
    def of(cls, cluster: Cluster, *, causal: bool, head_dim: int) -> AchievedRates:
        """The rates of a cluster's devices for causal or full attention and heads of a width."""
        share = {
            field.name: np.array([getattr(device.efficiency, field.name) for device in cluster.devices])
            for field in fields(Efficiency)
        }
        return cls(
            s_per_flop=1 / (cluster.peak_flops_per_s * share["matmul"]),
            half_tokens=share["matmul_half_tokens"],
            memory_s_per_byte=1 / (cluster.memory_bytes_per_s * share["memory"]),
            layer_host_s=share["layer_host_s"],
            kernel_overhead_s=share["kernel_overhead_s"],
            attention_flops_per_s={
                name: cluster.peak_flops_per_s * [each.attention_share(name, head_dim) for each in cluster.devices]
                for name in ("forward", "backward")
            },
            half_rows=share["attention_half_rows"],
            half_kv=share["attention_half_kv"],
            edge_keys=share["attention_edge_keys"] if causal else np.zeros(cluster.num_ranks),
            attention_overhead_s=share["attention_overhead_s"],
        )
