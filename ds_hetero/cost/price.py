"""Price of a training for people: money, energy, days and the share of the peaks (MFU). Idle devices are billed too.

Objectives of a plan: the time of an optimizer step, its money per token, or its energy per token.

    time     seconds per step
    cost     step x sum of price over devices with work / tokens of the step
    energy   sum over devices with work of busy x watts + (step - busy) x idle watts, / tokens of the step

Idle devices count nothing, so ``cost`` and ``energy`` may leave devices out; `ds_hetero.cost.price` says what they add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict, shortened
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.errors import PlanError

OBJECTIVES = ("time", "cost", "energy")
IDLE_SHARE = 0.25  # of the power under load, where a device does not say
SECONDS_PER_HOUR = 3600
TOO_LONG = 1e12  # value of a plan whose step takes longer than is acceptable


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective that the search makes small: linear in the step's time and in the time that devices compute."""

    name: str  # one of `OBJECTIVES`
    constant: float  # per second of the step, whichever devices work
    per_s: tuple[float, ...]  # of each kind of device, per second of the step
    per_busy_s: tuple[float, ...]  # of each kind of device, per second of computing
    at_most_s: float | None = None  # longest step that is acceptable; None for any

    @classmethod
    def of(cls, name: str, kinds: Sequence[DeviceSpec], tokens: int, at_most_s: float | None = None) -> Objective:
        """Bind an objective to a cluster's devices. Raises `PlanError`: an unknown name, or no price or power."""
        zeros = (0.0,) * len(kinds)
        if name == "time":
            return cls(name, 1.0, zeros, zeros, at_most_s)
        if name == "cost":
            prices = [_known(kind, "price_per_hour", name) for kind in kinds]
            return cls(name, 0.0, tuple(p / SECONDS_PER_HOUR / tokens for p in prices), zeros, at_most_s)
        if name == "energy":
            watts = [_known(kind, "watts", name) for kind in kinds]
            idle = [
                IDLE_SHARE * full if kind.idle_watts is None else kind.idle_watts
                for full, kind in zip(watts, kinds, strict=True)
            ]
            busy = tuple((full - rest) / tokens for full, rest in zip(watts, idle, strict=True))
            return cls(name, 0.0, tuple(rest / tokens for rest in idle), busy, at_most_s)
        raise PlanError(f"objective {shortened(name)} is unknown; it is one of {', '.join(OBJECTIVES)}.")

    def value(self, step_s: float, per_s: float, busy: float) -> float:
        """Return the objective of a plan; at least `TOO_LONG` where its step takes too long, more the longer it takes.

        Args:
            per_s: sum of `per_s` over its devices.
            busy: sum over its devices of `per_busy_s` x the seconds that they compute.
        """
        if self.at_most_s is not None and step_s > self.at_most_s:
            return TOO_LONG * step_s / self.at_most_s
        return step_s * (self.constant + per_s) + busy


def _known(device: DeviceSpec, field: str, objective: str) -> float:
    value: float | None = getattr(device, field)
    if value is None:
        raise PlanError(
            f"--objective {objective} needs {field} of every device, and {device.name} has none. "
            f"Add it to the cluster file: devices: {{{device.name}: {{{field}: ...}}}}"
            f"{f', or give --price {device.name}=...' if field == 'price_per_hour' else ''}."
        )
    return value


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
    watts = [_watts(device, busy.get(rank, 0.0)) for rank, device in enumerate(devices) if device.watts is not None]
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


def _watts(device: DeviceSpec, busy: float) -> float:
    """Power of a device that computes for a share of the time."""
    full = device.watts or 0.0
    idle = IDLE_SHARE * full if device.idle_watts is None else device.idle_watts
    return idle + min(busy, 1.0) * (full - idle)
