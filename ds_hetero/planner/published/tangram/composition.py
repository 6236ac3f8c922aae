"""Compose a pipeline of one partial plan for every island: Tangram's dynamic programme, and an exact form of it.

    T_cycle = (m - 1) max_k tau_k + sum_k tau_k                                                      Eq. 7

Here m is the number of micro-batches, and tau_k the time of a micro-batch on island k. A partial plan is a pipeline
itself, so the maximum is over the periods of the islands' slowest stages, and the sum is over all stages.

For every number of layers on the first k islands, Algorithm 2 keeps one composition: that with the smallest T_cycle.
This is not exact. Example: m = 3. Composition A has a period of 2 s and a latency of 3.5 s, so T_cycle is 2 * 2 + 3.5 =
7.5 s. B has 1 s and 5 s, so T_cycle is 7 s, and B is kept. Now an island with a period and a latency of 4 s follows;
the maximum is 4 s in both. A would take 2 * 4 + 7.5 = 15.5 s, B takes 2 * 4 + 9 = 17 s. `compose_exactly` solves a
shortest path for every maximum that occurs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple


class Timing(NamedTuple):
    """Times of a partial plan for one micro-batch."""

    period_s: float  # time of its slowest stage
    latency_s: float  # sum over all its stages


Tables = Sequence[Mapping[tuple[int, int], Timing]]
"""By island, in order: the timing of every slice of layers, ``(start, stop)``, that the island can run."""


def cycle_s(parts: Sequence[Timing], micro_batches: int) -> float:
    """Return the time of all micro-batches (Eq. 7)."""
    return (micro_batches - 1) * max(period for period, _ in parts) + sum(latency for _, latency in parts)


class _Composition(NamedTuple):
    """A slice of layers on each of the first islands, which together are the first layers of the model."""

    period_s: float  # largest period
    latency_s: float  # sum of latencies
    stops: tuple[int, ...]  # last layer of every slice, exclusive

    def cycle_s(self, micro_batches: int) -> float:
        """Return the time of all micro-batches (Eq. 7)."""
        return (micro_batches - 1) * self.period_s + self.latency_s

    def followed_by(self, stop: int, timing: Timing) -> _Composition:
        """Return the composition with one slice more, up to layer ``stop``."""
        period_s, latency_s = timing
        return _Composition(max(self.period_s, period_s), self.latency_s + latency_s, (*self.stops, stop))


def compose(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return the ends of the islands' slices by Algorithm 2; None if no slices cover the model."""
    best_by_layers: dict[int, _Composition] = {0: _Composition(0.0, 0.0, ())}  # by number of layers so far
    for table in tables:
        best_with_island: dict[int, _Composition] = {}
        for (start, stop), timing in table.items():
            if start not in best_by_layers:
                continue
            new = best_by_layers[start].followed_by(stop, timing)
            old = best_with_island.get(stop)
            if old is None or new.cycle_s(micro_batches) < old.cycle_s(micro_batches):
                best_with_island[stop] = new
        best_by_layers = best_with_island
    return best_by_layers[num_layers].stops if num_layers in best_by_layers else None


def compose_exactly(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return the ends of the slices with the smallest T_cycle; None if no slices cover the model.

    For every period that occurs, as a limit, the composition with the smallest latency is found. The best of these has
    the smallest T_cycle.
    """
    best_s, best_stops = inf, None
    for limit_s in sorted({period for table in tables for period, _ in table.values()}):
        if (micro_batches - 1) * limit_s >= best_s:
            break
        shortest = _least_latency(tables, limit_s).get(num_layers)
        if shortest is None:
            continue
        total_s = (micro_batches - 1) * limit_s + shortest.latency_s
        if total_s < best_s:
            best_s, best_stops = total_s, shortest.stops
    return best_stops


def _least_latency(tables: Tables, limit_s: float) -> dict[int, _Composition]:
    """Return compositions with periods up to ``limit_s`` and the smallest latency, by the number of their layers."""
    best_by_layers: dict[int, _Composition] = {0: _Composition(0.0, 0.0, ())}
    for table in tables:
        best_with_island: dict[int, _Composition] = {}
        for (start, stop), timing in table.items():
            period_s, latency_s = timing
            if period_s > limit_s or start not in best_by_layers:
                continue
            total_s = best_by_layers[start].latency_s + latency_s
            old = best_with_island.get(stop)
            if old is None or total_s < old.latency_s:
                best_with_island[stop] = best_by_layers[start].followed_by(stop, timing)
        best_by_layers = best_with_island
    return best_by_layers
