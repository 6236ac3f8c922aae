"""Result of a search, for schedules and pipelines alike."""

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
    """A plan as a search hands it out."""

    plan: Plan  # what a job runs
    search_s: float  # time the search took
    step_s: float  # predicted time of an optimizer step
    tokens: int  # of a step
    idle_ranks: tuple[int, ...]  # without work
    planner: str | None = None  # the published planner whose plan it is; None for ours

    @abstractmethod
    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""

    @property
    @abstractmethod
    def busy(self) -> dict[int, float]:
        """Share of the step that every rank with work computes."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over its time."""
        return self.tokens / self.step_s

    def price(self, devices: Sequence[DeviceSpec], flops_per_token: float) -> Price:
        """Price a step on the devices of all ranks, see `price_of`."""
        return price_of(devices, self.busy, self.step_s, self.tokens, flops_per_token)
