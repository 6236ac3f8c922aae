"""Price of a step where that of every device is known: all devices are paid for, idle ones too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.cluster.device import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.objective import SECONDS_PER_HOUR

MILLION = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Money for an optimizer step, in the currency of the devices' prices.

    Args:
        per_step: of all devices.
        idle_per_step: of those without work, a part of ``per_step``.
        tokens: of a step.
        num_devices: that are paid for.
        num_idle: of them without work.
    """

    per_step: float
    idle_per_step: float
    tokens: int
    num_devices: int
    num_idle: int

    @property
    def per_million_tokens(self) -> float:
        """Money for a million tokens."""
        return MILLION * self.per_step / self.tokens

    @property
    def text(self) -> str:
        """``0.504 per million tokens, 0.0165 per step``, and what idle devices are of it."""
        text = f"{self.per_million_tokens:,.3g} per million tokens, {self.per_step:,.3g} per step"
        if not self.num_idle:
            return text
        left = MILLION * (self.per_step - self.idle_per_step) / self.tokens
        return (
            f"{text}, for all {self.num_devices} devices, the {self.num_idle} idle too; {left:,.3g} per million tokens "
            "if those are not rented"
        )

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "per_million_tokens": self.per_million_tokens,
            "per_step": self.per_step,
            "idle_per_step": self.idle_per_step,
        }


def price_of(devices: Sequence[DeviceSpec], idle: Sequence[int], step_s: float, tokens: int) -> Price | None:
    """Price a step; None where the price of a device is not known.

    Args:
        devices: by rank.
        idle: ranks without work.
        step_s: time of a step.
        tokens: of a step.
    """
    prices = [device.price_per_hour for device in devices if device.price_per_hour is not None]
    if len(prices) < len(devices):
        return None
    hours = step_s / SECONDS_PER_HOUR
    idle_per_step = hours * sum(prices[rank] for rank in idle)
    return Price(
        per_step=hours * sum(prices),
        idle_per_step=idle_per_step,
        tokens=tokens,
        num_devices=len(devices),
        num_idle=len(idle),
    )
