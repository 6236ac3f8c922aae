"""Price of a training: money, energy, days and the share of the peaks (MFU). Idle devices are billed, too."""

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
    """Price of an optimizer step on all devices of a cluster."""

    step_s: float  # time of a step
    tokens: int  # of a step
    mfu: float  # operations that the model needs, without those computed twice, over the peaks of all devices
    money: float | None  # for a step, in the currency of the devices' prices; None where one of them is not known
    idle_money: float  # the part of it for devices without work
    joules: float | None  # for a step; None where the power of a device is not known
    num_devices: int  # that are paid for
    num_idle: int  # of them without work

    @property
    def per_million_tokens(self) -> float | None:
        """Money for a million tokens."""
        return None if self.money is None else MILLION * self.money / self.tokens

    @property
    def kwh_per_million_tokens(self) -> float | None:
        """Energy for a million tokens."""
        return None if self.joules is None else MILLION * self.joules / self.tokens / JOULES_PER_KWH

    def training_s(self, tokens: float) -> float:
        """Time of a training on so many tokens."""
        return tokens / self.tokens * self.step_s

    def lines(self, tokens: float) -> list[str]:
        """Say it to people, with a training on so many tokens."""
        training_s = self.training_s(tokens)
        energy_of = "" if self.joules is None else f", {self.joules / self.step_s:,.0f} W on average"
        lines = [
            f"training:   {amount_text(tokens)} tokens take {duration_text(training_s)}; {100 * self.mfu:.1f} % of the "
            f"peaks (MFU){energy_of}"
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
        assert self.money is not None
        per_token = self.money / self.tokens
        text = (
            f"{MILLION * per_token:,.3g} per million tokens, {self.money:,.3g} per step, {per_token * tokens:,.4g} for "
            f"{amount_text(tokens)} tokens"
        )
        if not self.num_idle:
            return text
        left = MILLION * (self.money - self.idle_money) / self.tokens
        return (
            f"{text}, for all {self.num_devices} devices, the {self.num_idle} idle too; {left:,.3g} per million tokens "
            "if those are not rented"
        )

    def to_dict(self, tokens: float) -> JsonDict:
        """Plain data for ``--json``, with a training on so many tokens."""
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
    """``1B``, ``300M``, or the number."""
    for unit, letter in ((BILLION, "B"), (MILLION, "M")):
        if tokens >= unit:
            return f"{tokens / unit:,.4g}{letter}"
    return f"{tokens:,.0f}"


def duration_text(seconds: float) -> str:
    """Days, or hours where a day is more than it takes."""
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours / _HOURS_PER_DAY:,.3g} days" if hours >= _HOURS_PER_DAY else f"{hours:,.3g} hours"


def price_of(
    devices: Sequence[DeviceSpec], busy: Mapping[int, float], step_s: float, tokens: int, flops_per_token: float
) -> Price:
    """Price a step: ranks with work compute a ``busy`` share of it, `training_flops` for a token."""
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
    """Price a step of one replica, whose ranks with work are those that compute."""
    busy = {rank: busy_s / prediction.block_s for rank, busy_s in enumerate(prediction.busy_s) if busy_s}
    work = cost.workload
    flops = training_flops(cost.model, work.seq_len, causal=work.causal)
    return price_of(cost.cluster.devices, busy, prediction.iteration_s, work.step_tokens, flops)
