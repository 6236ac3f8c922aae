"""Fit rates of GPUs to one part of the points, to test them on the other part.

By GPU are fitted: the fraction of the peak that matmuls reach, the fraction of the memory rate that elementwise
operations reach, and the fraction of FlashAttention-2's rate that older kernels reach. By GPU and kernel: a factor of
both passes of attention. For all: the allocator's share and the bytes of a logit. The fractions start from values that
no measurement supports; the other constants are the catalogue's.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.real_cards.compare import Comparison, compare
from benchmarks.real_cards.points import ALL_CARDS, Constants, Row, family_of, kernel_of

MIN_POINTS = 6  # points of a card that is fitted
NEUTRAL = {"matmul": 0.75, "memory": 0.75, "old": 0.5}  # what the catalogue assumes of cards without a measurement
NEUTRAL_MEMORY = {"fragmentation": 0.05, "logit_bytes": 12.0}
PULL = 0.1  # weight of the logarithm's distance to these: products and memory trade off against each other
SOFT = 0.1  # errors well beyond this count linearly
TABLE = "llm-foundry"  # the source with most steps


def half_of(row: Row) -> int:
    """Return 0 or 1.

    Points that differ only in the number of GPUs are in the same half, so that halves are not copies.
    """
    key = "|".join(row[column] for column in ("source", "gpu", "model", "seq_len", "recompute", "peft"))
    return zlib.crc32(key.encode()) & 1


PARTS: Mapping[str, Callable[[Row], bool]] = {
    "one half": lambda row: half_of(row) == 0,
    "the other half": lambda row: half_of(row) == 1,
    "one source alone (llm-foundry)": lambda row: TABLE in row["source"],
}
"""Which points constants are fitted to, by name."""


def fit(rows: Sequence[Row]) -> Constants:
    """Return the constants with the least errors of these points, by GPU and for `ALL_CARDS`.

    GPUs with fewer than `MIN_POINTS` steps keep the catalogue's fractions, which were not fitted to steps.
    """
    constants: dict[str, dict[str, float]] = {}
    for card, points in _by(rows, "time", lambda row: family_of(row["gpu"])).items():
        if len(points) >= MIN_POINTS:
            constants[card] = _least(points, "time", card, NEUTRAL)
    for (card, kernel), points in _by(rows, "attention", lambda row: (family_of(row["gpu"]), kernel_of(row))).items():
        scale = _least(points, "attention", card, {f"{kernel} scale": 1.0}, pull=0.0)
        constants.setdefault(card, {}).update(scale)
    memory = list(_by(rows, "memory", lambda row: 0).get(0, ()))
    constants[ALL_CARDS] = _least(memory, "memory", ALL_CARDS, NEUTRAL_MEMORY) if memory else dict(NEUTRAL_MEMORY)
    return constants


def _by(rows: Sequence[Row], kind: str, key: Callable[[Row], object]) -> dict:  # type: ignore[type-arg]
    groups: dict[object, list[Row]] = defaultdict(list)
    for comparison in compare(rows, kinds=(kind,))[0]:
        groups[key(comparison.row)].append(comparison.row)
    return groups


def _least(
    points: Sequence[Row], kind: str, card: str, start: Mapping[str, float], pull: float = PULL
) -> dict[str, float]:
    """Return the values of the constants in ``start`` with the least logarithmic errors; large ones count linearly."""
    names, first = list(start), np.log(list(start.values()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        trial = {name: float(value) for name, value in zip(names, np.exp(logs), strict=True)}
        done: list[Comparison] = compare(points, {card: trial}, (kind,))[0]
        return np.array([*np.log([1 + comparison.error for comparison in done]), *(pull * (logs - first))])

    least, most = first - 1.5, first + 1.5
    for i, name in enumerate(names):
        if name in ("matmul", "memory"):
            most[i] = 0.0  # of the peak
    best = least_squares(
        residuals, first, bounds=(least, most), loss="soft_l1", f_scale=SOFT, diff_step=0.01, max_nfev=15
    )
    return {name: round(float(value), 4) for name, value in zip(names, np.exp(best.x), strict=True)}
