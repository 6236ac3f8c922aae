"""Rates of cards fitted to one half of the sources' points and tested on the other.

Fitted by card are the shares of the peak that products reach and of the memory's rate that elementwise work reaches,
and a scale of kernels of attention that nobody runs today; all else is the catalogue's. Points that differ in number
of cards alone stay together, so that halves are not copies of each other.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.real_cards.compare import compare
from benchmarks.real_cards.points import Constants, Row, card_of

FEWEST = 6  # points of a card that is fitted
ROUNDS = 2
STEPS = (0.85, 0.93, 0.97, 1.0, 1.03, 1.07, 1.15)
PULL = 0.02  # of the logarithm's square, towards the catalogue: products and memory trade off against each other


def half_of(row: Row) -> int:
    """0 or 1."""
    key = "|".join(row[column] for column in ("source", "gpu", "model", "seq_len", "recompute", "peft"))
    return zlib.crc32(key.encode()) & 1


def fit(rows: Sequence[Row]) -> Constants:
    """Constants by card that make the mean error of steps least, by one at a time."""
    by_card: dict[str, list[Row]] = defaultdict(list)
    for comparison in compare(rows, kinds=("time",))[0]:
        by_card[comparison.row["gpu"]].append(comparison.row)
    return {card: _fit_card(card, points) for card, points in by_card.items() if len(points) >= FEWEST}


def _fit_card(card: str, points: Sequence[Row]) -> Mapping[str, float]:
    usual = card_of(points[0]).efficiency
    start = {"matmul": usual.matmul, "memory": usual.memory, "old": 1.0}
    own = dict(start)

    def loss(trial: Mapping[str, float]) -> float:
        done, _ = compare(points, {card: trial}, ("time",))
        pulled = sum(math.log(trial[name] / start[name]) ** 2 for name in ("matmul", "memory"))
        return statistics.fmean(min(abs(math.log(1 + each.error)), 1.0) for each in done) + PULL * pulled

    for number in range(ROUNDS):
        for name in own:
            steps = [step ** (0.5**number) for step in STEPS]
            tried = [{**own, name: min(own[name] * step, 1.0 if name != "old" else 10.0)} for step in steps]
            own = min(tried, key=loss)
    return {name: round(value, 3) for name, value in own.items()}
