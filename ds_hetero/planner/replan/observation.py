"""Costs of some optimizer steps under one schedule on every rank: the evidence that re-planning decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Means and medians over the steps since the last observation; tuples are by rank in ascending order.

    Args:
        attention_flops: attention work of the rank in a step.
        tokens: tokens of the rank in a step.
        attention_s_per_flop: measured cost of attention; None where the rank had none.
        model_s_per_token: measured cost of the rest of forward and backward; None where the rank had no tokens.
        error: relative standard error of `own_s`.
        growth: factor by which the work of the rank may grow before its memory is full.
        step_s: duration of a step.
        length: tokens of a typical sequence.
    """

    attention_flops: tuple[float, ...]
    tokens: tuple[float, ...]
    attention_s_per_flop: tuple[float | None, ...]
    model_s_per_token: tuple[float | None, ...]
    error: tuple[float, ...]
    growth: tuple[float, ...]
    step_s: float
    length: int

    @property
    def own_s(self) -> tuple[float, ...]:
        """Seconds that every rank computes in a step."""
        return tuple(
            flops * (per_flop or 0.0) + tokens * (per_token or 0.0)
            for flops, per_flop, tokens, per_token in zip(
                self.attention_flops, self.attention_s_per_flop, self.tokens, self.model_s_per_token, strict=True
            )
        )


def mean_observation(observations: Sequence[Observation]) -> Observation:
    """The mean of several observations of one schedule."""
    last = observations[-1]

    def mean(name: str) -> Any:
        rows = zip(*(getattr(observation, name) for observation in observations), strict=True)
        return tuple(None if None in row else fmean(row) for row in rows)

    names = ("attention_flops", "tokens", "attention_s_per_flop", "model_s_per_token")
    return replace(
        last,
        **{name: mean(name) for name in names},
        error=tuple(error / sqrt(len(observations)) for error in last.error),
        step_s=fmean(observation.step_s for observation in observations),
        length=round(median(observation.length for observation in observations)),
    )
