"""Price of a training run: money, energy, duration and MFU. Idle devices are billed, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.units import SECONDS_PER_HOUR
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.power import average_watts
from ds_hetero.cost.terms.flops import training_flops

MILLION, BILLION = 1e6, 1e9
JOULES_PER_KWH = 3.6e6
_HOURS_PER_DAY = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Price of one optimizer step on all devices of a cluster."""

    step_s: float  # time of a step
    tokens: int  # tokens of a step
    mfu: float  # FLOPs that the model needs, without recomputation, over the peak of all devices
    money: float | None  # price of a step, in the currency of the devices' prices; None if a device has no price
    idle_money: float  # the part of `money` that devices without work cost
    joules: float | None  # energy of a step; None if the power of a device is unknown
    num_devices: int  # devices that are paid for
    num_idle: int  # devices without work among them

    @property
    def per_million_tokens(self) -> float | None:
        """Price of a million tokens; None without prices."""
        return None if self.money is None else MILLION * self.money / self.tokens

    @property
    def kwh_per_million_tokens(self) -> float | None:
        """Energy for a million tokens in kWh; None without power."""
        return None if self.joules is None else MILLION * self.joules / self.tokens / JOULES_PER_KWH

    def training_s(self, tokens: float) -> float:
        """Seconds of training on so many tokens."""
        return tokens / self.tokens * self.step_s

    def lines(self, tokens: float) -> list[str]:
        """Describe the price in lines of text, for a training run on so many tokens."""
        training_s = self.training_s(tokens)
        power_text = "" if self.joules is None else f", {self.joules / self.step_s:,.0f} W on average"
        lines = [
            f"training:   {amount_text(tokens)} tokens take {duration_text(training_s)}; {100 * self.mfu:.1f} % of the "
            f"peaks (MFU){power_text}"
        ]
        if (per_million := self.kwh_per_million_tokens) is not None:
            lines.append(
                f"energy:     {per_million:,.3g} kWh per million tokens, {per_million * tokens / MILLION:,.3g} kWh for "
                f"{amount_text(tokens)}; cards alone"
            )
        if self.money is not None:
            lines.append(f"price:      {self._money_text(tokens)}")
        return lines

    def _money_text(self, tokens: float) -> str:
        """Describe the price in one line, for a training run on so many tokens."""
        assert self.money is not None
        per_token = self.money / self.tokens
        text = (
            f"{MILLION * per_token:,.3g} per million tokens, {self.money:,.3g} per step, {per_token * tokens:,.4g} for "
            f"{amount_text(tokens)} tokens"
        )
        if not self.num_idle:
            return text
        without_idle = MILLION * (self.money - self.idle_money) / self.tokens
        return (
            f"{text}, for all {self.num_devices} devices, the {self.num_idle} idle too; "
            f"{without_idle:,.3g} per million tokens if those are not rented"
        )

    def to_dict(self, tokens: float) -> JsonDict:
        """Return plain data for ``--json``, for a training run on so many tokens."""
        steps = tokens / self.tokens
        return {
            "mfu": self.mfu,
            "per_million_tokens": self.per_million_tokens,
            "per_step": self.money,
            "idle_per_step": None if self.money is None else self.idle_money,
            "joules_per_step": self.joules,
            "training": {
                "tokens": tokens,
                "days": self.training_s(tokens) / SECONDS_PER_HOUR / _HOURS_PER_DAY,
                "price": None if self.money is None else steps * self.money,
                "kwh": None if self.joules is None else steps * self.joules / JOULES_PER_KWH,
            },
        }


def amount_text(tokens: float) -> str:
    """Write a number of tokens as ``1B``, ``300M`` or ``50,000``."""
    for unit, letter in ((BILLION, "B"), (MILLION, "M")):
        if tokens >= unit:
            return f"{tokens / unit:,.4g}{letter}"
    return f"{tokens:,.0f}"


def duration_text(seconds: float) -> str:
    """Write a duration in days, or in hours if it is shorter than a day."""
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours / _HOURS_PER_DAY:,.3g} days" if hours >= _HOURS_PER_DAY else f"{hours:,.3g} hours"


def price_of(
    devices: Sequence[DeviceSpec], busy: Mapping[int, float], step_s: float, tokens: int, flops_per_token: float
) -> Price:
    """Return the price of a step on all devices.

    Args:
        devices: devices by rank.
        busy: share of the step in which a rank computes, by rank; other ranks have no work.
        flops_per_token: FLOPs that the model needs for a token: `training_flops`.
    """
    hours = step_s / SECONDS_PER_HOUR
    prices = [device.price_per_hour for device in devices if device.price_per_hour is not None]
    watts = [
        average_watts(device, busy.get(rank, 0.0)) for rank, device in enumerate(devices) if device.watts is not None
    ]
    idle = [rank for rank in range(len(devices)) if rank not in busy]
    is_priced = len(prices) == len(devices)
    return Price(
        step_s=step_s,
        tokens=tokens,
        mfu=tokens * flops_per_token / step_s / sum(device.peak_flops_per_s for device in devices),
        money=hours * sum(prices) if is_priced else None,
        idle_money=hours * sum(prices[rank] for rank in idle) if is_priced else 0.0,
        joules=step_s * sum(watts) if len(watts) == len(devices) else None,
        num_devices=len(devices),
        num_idle=len(idle),
    )


def price_of_prediction(cost: CostModel, prediction: Prediction) -> Price:
    """Price the predicted step of one replica; ranks that compute nothing are idle."""
    busy = {rank: busy_s / prediction.block_s for rank, busy_s in enumerate(prediction.busy_s) if busy_s}
    work = cost.workload
    flops = training_flops(cost.model, work.seq_len, causal=work.causal)
    return price_of(cost.cluster.devices, busy, prediction.iteration_s, work.step_tokens, flops)
