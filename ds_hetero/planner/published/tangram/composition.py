"""One partial plan per island put together to a pipeline: Tangram's dynamic programme, and the exact form of it.

    T_cycle = (m - 1) max_k tau_k + sum_k tau_k                                                      Eq. 7

Algorithm 2 keeps, for every number of layers over the first k islands, the maximum and the sum of the one composition
with the least T_cycle. That is not exact, since another composition with a smaller maximum and a larger sum may be
better once a slow island follows. `compose_exactly` solves a shortest path for every maximum that occurs.

A partial plan is a pipeline itself, so its maximum is the period of its slowest stage and its sum that of all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

Timing = tuple[float, float]
"""Period and latency of a part, for one micro-batch."""

Tables = Sequence[Mapping[tuple[int, int], Timing]]
"""By island in order, what its slices ``(start, stop)`` take."""


def cycle_s(parts: Sequence[Timing], micro_batches: int) -> float:
    """Return the time of all micro-batches (Eq. 7)."""
    return (micro_batches - 1) * max(period for period, _ in parts) + sum(latency for _, latency in parts)


def compose(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """The ends of islands' slices, by Algorithm 2 on their partial plans; None if no slices cover the model."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for table in tables:
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for (start, stop), (period, latency) in table.items():
            if start not in best:
                continue
            longest, total, stops = best[start]
            new = max(longest, period), total + latency, (*stops, stop)
            if stop not in after or _value(new, micro_batches) < _value(after[stop], micro_batches):
                after[stop] = new
        best = after
    return best[num_layers][2] if num_layers in best else None


def _value(state: tuple[float, float, tuple[int, ...]], micro_batches: int) -> float:
    return (micro_batches - 1) * state[0] + state[1]


def compose_exactly(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return the best ends of the slices; None if no slices cover the model. The arguments are those of `compose`."""
    best, chosen = inf, None
    for limit in sorted({period for table in tables for period, _ in table.values()}):
        if (micro_batches - 1) * limit >= best:
            break
        paths: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for table in tables:
            after: dict[int, tuple[float, tuple[int, ...]]] = {}
            for (start, stop), (period, latency) in table.items():
                if period <= limit and start in paths:
                    total = paths[start][0] + latency
                    if stop not in after or total < after[stop][0]:
                        after[stop] = total, (*paths[start][1], stop)
            paths = after
        if num_layers in paths and (micro_batches - 1) * limit + paths[num_layers][0] < best:
            best, chosen = (micro_batches - 1) * limit + paths[num_layers][0], paths[num_layers][1]
    return chosen
