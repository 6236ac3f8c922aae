"""Base class of the planner's results, for schedules and for pipelines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.price import Price, price_of
from ds_hetero.values.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Planned(ABC):
    """Result of a search: the plan, and its prediction."""

    plan: Plan  # the plan that a job runs
    search_s: float  # time of the search
    step_s: float  # predicted time of an optimizer step
    tokens: int  # tokens of an optimizer step
    idle_ranks: tuple[int, ...]  # ranks without work
    planner: str | None = None  # name of the published planner that made the plan; None for ours

    @abstractmethod
    def to_dict(self) -> JsonDict:
        """Return plain data for ``--json``."""

    @property
    @abstractmethod
    def busy(self) -> dict[int, float]:
        """Share of the step, 0 to 1, in which a rank computes, by rank; without idle ranks."""

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second."""
        return self.tokens / self.step_s

    def price(self, devices: Sequence[DeviceSpec], flops_per_token: float) -> Price:
        """Return the price of a step on the devices of all ranks, see `price_of`."""
        return price_of(devices, self.busy, self.step_s, self.tokens, flops_per_token)
