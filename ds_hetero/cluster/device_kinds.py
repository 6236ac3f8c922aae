"""Kinds of devices: shares of their peaks that devices of one kind reach, each with its source.

These shares are compared with public measurements by `python -m benchmarks.real_cards`; `ds-hetero profile` measures
those of a cluster.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cluster.attention_rates import (
    ADA_SERVER,
    AMPERE,
    BLACKWELL,
    CDNA2,
    CDNA3,
    CONSUMER,
    EDGE_KEYS,
    GA102,
    HALF_KEYS,
    HEAD_WIDTH,
    HOPPER,
    OTHER,
    PASCAL,
    SMALL,
    TURING,
    Rates,
)
from ds_hetero.cluster.topology import Efficiency


class CardKind(NamedTuple):
    """Shares of the peaks that a kind of devices reaches."""

    efficiency: Efficiency  # shares outside attention
    attention: Rates  # rates by attention kernel; an installation chooses the first kernel
    source: str  # source of `efficiency`


def _kind(multiprocessors: int, matmul: float, memory: float, attention: Rates, source: str) -> CardKind:
    """Return a kind of devices.

    Args:
        multiprocessors: number of streaming multiprocessors or compute units.
        matmul: share of the peak that large matmuls reach.
        memory: share of the memory's bandwidth that norms and activations reach.
        attention: rates by attention kernel, the one that an installation chooses first.
        source: where ``matmul`` and ``memory`` come from.
    """
    return CardKind(
        efficiency=Efficiency(
            matmul=matmul,
            memory=memory,
            matmul_half_tokens=256,  # chosen, never measured: two tiles of 128 rows
            attention_half_rows=64 * multiprocessors,  # half a wave of 128-row tiles over all multiprocessors
            attention_half_kv=HALF_KEYS,
            attention_edge_keys=EDGE_KEYS,
            attention_width=HEAD_WIDTH,
            layer_host_s=LAYER_HOST_S,
            attention_overhead_s=10e-6,  # chosen, never measured: the launch of a kernel in eager PyTorch
        ),
        attention=attention,
        source=source,
    )


LAYER_HOST_S = 0.6e-3
"""Time of the host to launch a layer's forward in eager PyTorch; `ds_hetero.cost.terms.host` adds adapters and ZeRO."""

_FIT = "fitted to steps of llm-foundry, xtuner, torchtune and others: python -m benchmarks.real_cards"
_BEST = "large matmuls as in stas00/ml-engineering (MAMF), less 0.15 as on the H100; memory as on the H100"
_N8192 = "matmuls of n = 8192 in mli/transformers-benchmarks; memory assumed"
_ASSUMED = "assumed: no measurement of this card"
HOPPER_KIND = _kind(132, 0.63, 0.52, HOPPER, _FIT)
A100_80_KIND = _kind(108, 0.765, 0.62, AMPERE, _FIT)
A100_40_KIND = _kind(108, 0.73, 0.71, AMPERE, _FIT)
BLACKWELL_KIND = _kind(148, 0.63, 0.58, BLACKWELL, _BEST)
PRO_BLACKWELL_KIND = _kind(148, 0.70, 0.75, CONSUMER, _ASSUMED)
ADA_KIND = _kind(142, 0.65, 0.75, ADA_SERVER, _ASSUMED)  # L40S and L40 meet their power limit first
GA102_KIND = _kind(84, 0.61, 0.75, GA102, _N8192)
CONSUMER_KIND = _kind(100, 0.90, 0.75, CONSUMER, _N8192)
SMALL_KIND = _kind(60, 0.75, 0.75, SMALL, _ASSUMED)
A30_KIND = _kind(56, 0.75, 0.75, SMALL, _ASSUMED)
L4_KIND = _kind(58, 0.55, 0.75, SMALL, _ASSUMED)
A10_KIND = _kind(72, 0.60, 0.75, SMALL, _ASSUMED)
TURING_KIND = _kind(60, 0.60, 0.75, TURING, _ASSUMED)
PASCAL_KIND = _kind(60, 0.60, 0.75, PASCAL, _ASSUMED)
CDNA2_KIND = _kind(110, 0.50, 0.60, CDNA2, _ASSUMED)
CDNA3_KIND = _kind(304, 0.50, 0.60, CDNA3, _BEST)
OTHER_KIND = _kind(64, 0.50, 0.60, OTHER, _ASSUMED)  # this project has run on none of them
CPU_KIND = CardKind(Efficiency(), {}, "none: run ds-hetero profile")
