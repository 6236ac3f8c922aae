"""One accelerator as the cost model sees it: datasheet numbers, and how far below them it really runs.

Peaks come from the catalogue or from the user; efficiencies come from a profile, or are the catalogue's
assumption until there is one. The two are kept apart so that `published` can ignore the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Achieved share of the peak for large shapes, and the sizes at which half of that is left.

    Time of a product of ``m`` tokens with a weight: ``flops / (peak * matmul) * (1 + matmul_half_tokens / m)``.
    Time of attention between ``r`` query rows (tokens x heads x batch) and ``t`` keys:
    ``flops / (peak * attention) * (1 + attention_half_rows / r) * (1 + attention_half_kv / t)``: few heads or short
    shards leave parts of the device idle, short keys leave the kernel's prologue and epilogue uncovered. A causal
    square takes ``attention_edge_keys`` more keys per query than its half.
    """

    matmul: float = 1.0
    attention_forward: float = 1.0
    attention_backward: float = 1.0
    memory: float = 1.0
    matmul_half_tokens: float = 0.0
    attention_half_rows: float = 0.0
    attention_half_kv: float = 0.0
    attention_edge_keys: float = (
        0.0  # keys per query that a causal square costs beyond its half, computed in whole tiles
    )
    kernel_overhead_s: float = 0.0  # host and launch time of one layer's forward outside attention
    attention_overhead_s: float = 0.0  # host and launch time of one attention block
    # Of the thread that computes, for its part in one round of messages (an exchange of heads, a hop of a ring or
    # between stages, an all-reduce): to pack, post, unpack, without waiting. 0 where a host runs ahead of its device.
    message_overhead_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator.

    Args:
        name: catalogue name such as ``H100-SXM-80GB``, or the user's.
        peak_flops_per_s: dense bf16 rate of the datasheet, without sparsity; HexiSeq's c_d (arXiv:2605.07569, table 1).
        memory_bytes: device memory, m_d.
        memory_bytes_per_s: bandwidth of that memory, b_d.
        reserved_bytes: part of the memory that no tensor gets: the driver's context and communication buffers.
        source: where the numbers come from.
        efficiency: achieved shares of the peaks.
        watts: power under load; None if not known.
        idle_watts: power while it waits; None for a quarter of ``watts``.
        price_per_hour: money for one hour, in any one currency; None if not known.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    reserved_bytes: int = 0
    source: str = "given by the user"
    efficiency: Efficiency = field(default_factory=Efficiency)
    watts: float | None = None
    idle_watts: float | None = None
    price_per_hour: float | None = None
