"""Rates of attention kernels on each kind of device, with the measurement that each rate comes from.

A rate is the share of the device's peak that a kernel reaches with heads of 128 and long sequences, forward and
backward (10 FLOPs, as FlashAttention-2 counts them, arXiv:2307.08691). ``narrow`` is the factor on it for heads of 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import shortened
from ds_hetero.errors import ClusterError

HEAD_WIDTH = 128  # head size for which the rates hold
HALF_KEYS = 147  # number of keys at which full attention runs at half of its rate; fitted to `_CHARTS`
EDGE_KEYS = 184  # keys per query that causal attention costs beyond half of the square; fitted to the same charts


class AttentionRate(NamedTuple):
    """Rate of one kernel on one kind of device."""

    forward: float  # share of the peak in the forward, with heads of 128
    backward: float  # share of the peak in the backward, with heads of 128
    narrow: float  # factor on both shares for heads of 64
    source: str  # where the rate was measured


_CHARTS = "FlashAttention-2's charts (Dao-AILab/flash-attention, assets) and FlashAttention-3, figures 5 and 6"
_FA3 = "FlashAttention-3 (arXiv:2407.08608), figures 5 and 6"
_TORCH = "torch's flash kernel is FlashAttention-2's code; not measured on its own"
_GUESS = "assumed from FlashAttention-2's share on other cards: no measurement of this card"

Rates = Mapping[str, AttentionRate]


def _version_2(forward: float, backward: float, source: str, **other_rates: AttentionRate) -> dict[str, AttentionRate]:
    """Return rates by name of the kernel: FlashAttention-2, torch's copy of it, a Triton kernel, and ``other_rates``.

    Args:
        forward: share of the peak that FlashAttention-2 reaches in the forward.
        backward: share of the peak that FlashAttention-2 reaches in the backward.
        source: where these two shares were measured.
        other_rates: rates of kernels that only this kind of device has, by name.

    0.86 on heads of 64 is from the charts of FlashAttention-2; 0.8 and 0.7 for Triton are chosen, never measured.
    """
    return {
        "flash_attn_2": AttentionRate(forward, backward, 0.86, source),
        "torch": AttentionRate(forward, backward, 0.86, f"{_TORCH}; {source}"),
        "triton": AttentionRate(0.8 * forward, 0.7 * backward, 0.86, f"assumed, 0.8 and 0.7 of flash_attn_2: {source}"),
        **other_rates,
    }


AMPERE = _version_2(0.70, 0.645, f"{_CHARTS} (forward and backward together); forward alone USP (arXiv:2405.07719)")
HOPPER = _version_2(
    0.386,
    0.336,
    _CHARTS,
    flash_attn_3=AttentionRate(0.69, 0.585, 0.72, _FA3),
    cudnn=AttentionRate(0.634, 0.54, 0.67, _FA3),
)
BLACKWELL = _version_2(
    0.211,
    0.17,
    "Dao-AILab/flash-attention, issue 1589: B200, heads of 64",
    flash_attn_4=AttentionRate(0.71, 0.55, 0.8, "FlashAttention-4 as announced (1,605 TFLOPS forward); not checked"),
    cudnn=AttentionRate(0.60, 0.50, 0.8, "assumed, 0.85 of flash_attn_4: no measurement of this card"),
)
GA102 = _version_2(0.88, 0.78, "gpu-mode/ring-attention, issue 10: RTX A5000, heads of 64")
CONSUMER = _version_2(0.70, 0.60, _GUESS)
ADA_SERVER = _version_2(0.55, 0.45, _GUESS)
SMALL = _version_2(0.60, 0.50, _GUESS)
TURING = {"triton": AttentionRate(0.35, 0.30, 0.86, _GUESS), "torch": AttentionRate(0.35, 0.30, 0.86, _GUESS)}
PASCAL = {"torch": TURING["torch"]}  # the Triton kernel needs sm70
CDNA2 = _version_2(0.35, 0.25, _GUESS)
CDNA3 = _version_2(0.40, 0.30, _GUESS)
OTHER = {"torch": AttentionRate(0.35, 0.25, 0.86, _GUESS)}


def with_attention(device: DeviceSpec, kernel: str, rates: Rates) -> DeviceSpec:
    """Return the device with the rates of an attention kernel.

    Args:
        rates: rates of all kernels that run on the device, by name.

    Raises:
        ClusterError: the kernel has no rate on the device.
    """
    rate = rates.get(kernel)
    if rate is None:
        raise ClusterError(
            f"the catalogue has no rate of attention kernel {shortened(kernel)} on {device.name}, only of "
            f"{', '.join(rates)}. Take one of these, or give efficiency.attention_forward and "
            "efficiency.attention_backward of the device in the cluster file."
        )
    efficiency = replace(
        device.efficiency,
        attention_forward=rate.forward,
        attention_backward=rate.backward,
        attention_narrow=rate.narrow,
    )
    return replace(device, attention_kernel=kernel, efficiency=efficiency)
