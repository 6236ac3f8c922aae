"""One accelerator as the cost model sees it: datasheet numbers, and how far below them it really runs.

Peaks come from the catalogue or from the user; efficiencies come from a profile, or are the catalogue's
assumption until there is one. The two are kept apart so that `published` can ignore the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Achieved share of the peak for large shapes, and the sizes at which half of that is left.

    Time of a product of ``m`` tokens with a weight: ``flops / (peak * matmul) * (1 + matmul_half_tokens / m)``.
    Time of attention between ``r`` query rows (tokens x heads x batch) and ``t`` keys:
    ``flops / (peak * attention) * (1 + attention_half_rows / r) * (1 + attention_half_kv / t)``: few heads or short
    shards leave parts of the device idle, short keys leave the kernel's prologue and epilogue uncovered. A causal
    square takes ``attention_edge_keys`` more keys per query than its half. The shares of attention hold for heads of
    ``attention_width``, 0 for any; of heads half as wide ``attention_narrow`` of them is left, and widths that are no
    multiple of 32 are padded to one.
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
    attention_width: float = 0.0
    attention_narrow: float = 1.0
    # Of the host, to launch the forward of a layer: a pass takes at least that, however little it computes.
    layer_host_s: float = 0.0
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
        fragmentation: bytes that the allocator holds beside tensors, as a share of these.
        attention_kernel: whose rates ``efficiency`` has; empty where they were measured.
        error: half of the range, as a share, in which a predicted step lies in 8 of 10 cases: of measurements of this
            card, or of cards like it; see ``measured``.
        measured: training on this card was measured, by this project's table or by a profile.
        source: where the numbers come from.
        efficiency: achieved shares of the peaks.
        watts: power under load; None if not known.
        idle_watts: power while it waits; None for a quarter of ``watts``.
        price_per_hour: money for one hour, in any one currency; None if not known.
        attention_s: measured seconds of causal attention on this device alone, ``(tokens, seconds)`` by ascending
            tokens, the table of the hetero-ring paper; empty if it was not measured.
    """

    name: str
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    reserved_bytes: int = 0
    fragmentation: float = 0.0
    attention_kernel: str = ""
    error: float = 0.0
    measured: bool = True
    source: str = "given by the user"
    efficiency: Efficiency = field(default_factory=Efficiency)
    watts: float | None = None
    idle_watts: float | None = None
    price_per_hour: float | None = None
    attention_s: tuple[tuple[int, float], ...] = ()

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors get: without the reserve and what the allocator loses between them."""
        return (self.memory_bytes - self.reserved_bytes) / (1 + self.fragmentation)

    def attention_share(self, name: str, head_dim: int) -> float:
        """Share of the peak that a pass of attention, ``"forward"`` or ``"backward"``, reaches on heads of a width."""
        own = self.efficiency
        share: float = getattr(own, f"attention_{name}")
        if not own.attention_width or head_dim >= own.attention_width:
            return share
        padded = -(-head_dim // 32) * 32
        narrowed: float = own.attention_narrow ** log2(own.attention_width / padded)
        return share * narrowed * head_dim / padded
