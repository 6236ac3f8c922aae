"""From timings to the numbers of a device or a link, and how well those describe the timings.

Samples are plain tuples, so that a profile is JSON and a fit can be repeated without the machine. All fits minimise
relative errors, so that a step of a millisecond counts as much as one of a second; no coefficient is negative.

    layer       time of a transformer layer without attention against tokens, forward and backward
    attention   time of a block against query rows and keys, forward and backward
    transfer    time of a message against its bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Efficiency
from ds_hetero.common.arrays import Floats

# Widths of the grids of half-sizes, each around the best point of the one before; chosen, never measured.
GRID_SPREADS = (2.0, 1.5, 1.2, 1.1, 1.05)


class LayerSample(NamedTuple):
    """Time of one layer without attention."""

    tokens: int
    flops: float  # of the forward
    elementwise_bytes: float  # of the forward
    forward_s: float
    backward_s: float


class AttentionSample(NamedTuple):
    """Time of attention between a block of queries and a block of keys."""

    rows: int  # query tokens x heads x sequences
    keys: int
    causal: bool  # a causal square; else everything is visible
    head_dim: int
    forward_s: float
    backward_s: float


class TransferSample(NamedTuple):
    """Time of one message, or of one rank's part in a collective."""

    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FitError:
    """Relative errors of a fit over its samples."""

    median: float
    largest: float

    @classmethod
    def of(cls, predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> FitError:
        """Errors of ``predicted`` against ``measured``."""
        error = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(median=float(np.median(error)), largest=float(error.max()))


class TransferFit(NamedTuple):
    """A line through the times of transfers."""

    latency_s: float
    bytes_per_s: float
    error: FitError


def fit_efficiency(
    peak_flops_per_s: float,
    memory_bytes_per_s: float,
    layers: Sequence[LayerSample],
    attention: Sequence[AttentionSample],
) -> tuple[Efficiency, dict[str, FitError]]:
    """Achieved shares of the two peaks and the curves around them, with the errors by term."""
    layer, layer_errors = _fit_layer(peak_flops_per_s, memory_bytes_per_s, layers)
    curves, attention_errors = _fit_attention(peak_flops_per_s, attention)
    return Efficiency(**layer, **curves), layer_errors | attention_errors


def _fit_layer(
    peak_flops_per_s: float, memory_bytes_per_s: float, samples: Sequence[LayerSample]
) -> tuple[dict[str, float], dict[str, FitError]]:
    """Both passes share one rate of products, one of memory and one overhead; the backward does everything twice.

    t = flops / rate + flops / tokens * half_tokens / rate + bytes / bandwidth + overhead
    """
    flops = np.array([sample.flops for sample in samples])
    tokens = np.array([sample.tokens for sample in samples], dtype=float)
    moved = np.array([sample.elementwise_bytes for sample in samples])
    forward_s = np.array([sample.forward_s for sample in samples])
    backward_s = np.array([sample.backward_s for sample in samples])
    features = np.stack([flops, flops / tokens, moved, np.ones_like(flops)], axis=1)
    fitted = _non_negative(
        np.concatenate([features, 2 * features]), np.concatenate([forward_s, backward_s]), needed=(0, 2)
    )
    rate, bandwidth = 1 / fitted[0], 1 / fitted[2]
    predicted_s = features @ fitted
    return {
        "matmul": float(rate / peak_flops_per_s),
        "matmul_half_tokens": float(fitted[1] * rate),
        "memory": float(bandwidth / memory_bytes_per_s),
        "kernel_overhead_s": float(fitted[3]),
    }, {
        "layer forward": FitError.of(predicted_s, forward_s),
        "layer backward": FitError.of(2 * predicted_s, backward_s),
    }


def _fit_attention(
    peak_flops_per_s: float, samples: Sequence[AttentionSample]
) -> tuple[dict[str, float], dict[str, FitError]]:
    """Two rates, one for each pass, and half-sizes, an overhead and the cost of a diagonal that both share.

    t = flops / rate * (1 + half_rows / rows) * (1 + half_keys / keys) + overhead      of a rectangle
    t + edge_keys / keys * flops / rate                                                of a causal square, at half of it

    For given half-sizes the first is linear; they are searched over a grid that is refined around its best point.
    """
    rows = np.array([sample.rows for sample in samples], dtype=float)
    keys = np.array([sample.keys for sample in samples], dtype=float)
    head_dim = np.array([sample.head_dim for sample in samples], dtype=float)
    times = np.array([[sample.forward_s, sample.backward_s] for sample in samples])
    operations = head_dim[:, None] * (4.0, 10.0)  # per pair of row and key, forward and backward
    causal = np.array([sample.causal for sample in samples])

    def effective_flops(half_rows: float, half_keys: float) -> Floats:
        """FLOPs of both passes, ``[samples, 2]``, grown by what the half-sizes add: their time is flops / rate."""
        pairs = (rows + half_rows) * (keys + half_keys) * np.where(causal, 0.5, 1.0)
        return np.asarray(pairs[:, None] * operations)

    def fitted_rates(half_rows: float, half_keys: float) -> tuple[float, Floats]:
        """Squared relative error over the rectangles, and seconds per FLOP of both passes with the overhead."""
        flops, none = effective_flops(half_rows, half_keys)[~causal], np.zeros(int((~causal).sum()))
        target = times[~causal].ravel(order="F")  # all forwards, then all backwards
        forward, backward = np.r_[flops[:, 0], none], np.r_[none, flops[:, 1]]
        features = np.stack([forward, backward, np.ones_like(target)], axis=1)
        coefficients = _non_negative(features, target, needed=(0, 1))
        return float(((features @ coefficients / target - 1) ** 2).sum()), coefficients

    row_grid, key_grid = _coarse_grid(rows), _coarse_grid(keys)
    for spread in GRID_SPREADS:
        points = ((float(half_rows), float(half_keys)) for half_rows, half_keys in product(row_grid, key_grid))
        _, half_rows, half_keys = min((fitted_rates(*point)[0], *point) for point in points)
        row_grid, key_grid = _finer_grid(row_grid, half_rows, spread), _finer_grid(key_grid, half_keys, spread)
    _, coefficients = fitted_rates(half_rows, half_keys)
    s_per_operation, overhead_s = coefficients[:2], float(coefficients[2])
    predicted = effective_flops(half_rows, half_keys) * s_per_operation + overhead_s
    edge = (rows[:, None] * operations * s_per_operation)[causal] / times[causal]
    missing = 1 - predicted[causal] / times[causal]
    edge_keys = max(float((edge * missing).sum() / (edge**2).sum()), 0.0) if causal.any() else 0.0
    predicted[causal] += edge_keys * edge * times[causal]
    rates = 1 / s_per_operation / peak_flops_per_s
    return {
        "attention_forward": float(rates[0]),
        "attention_backward": float(rates[1]),
        "attention_half_rows": half_rows,
        "attention_half_kv": half_keys,
        "attention_edge_keys": edge_keys,
        "attention_overhead_s": overhead_s,
    }, {
        "attention forward": FitError.of(predicted[:, 0], times[:, 0]),
        "attention backward": FitError.of(predicted[:, 1], times[:, 1]),
    }


def _coarse_grid(values: Floats) -> Floats:
    """Half-sizes from 0 to the largest size that was timed."""
    return np.asarray(np.r_[0.0, np.geomspace(values.min() / 100, values.max(), 13)])


def _finer_grid(grid: Floats, best: float, spread: float) -> Floats:
    """0 and points around the best one, up to ``spread`` times as large; where 0 is the best, 0 and the next one."""
    if not best:
        return grid[:2]
    return np.asarray(np.r_[0.0, np.geomspace(best / spread, best * spread, 7)])


def fit_transfer(samples: Sequence[TransferSample]) -> TransferFit:
    """Fit t = latency + bytes / bandwidth."""
    sizes = np.array([sample.num_bytes for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    features = np.stack([np.ones_like(sizes), sizes], axis=1)
    fitted = _non_negative(features, seconds, needed=(1,))
    return TransferFit(float(fitted[0]), float(1 / fitted[1]), FitError.of(features @ fitted, seconds))


def _non_negative(features: Floats, target: Floats, needed: tuple[int, ...]) -> Floats:
    """Coefficients >= 0 with the least squared relative error; those of ``needed`` are positive.

    With at most four columns every set of positive coefficients can be tried.
    """
    columns = features.shape[1]
    relative = features / target[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    best: tuple[float, Any] = (np.inf, None)
    optional = [column for column in range(columns) if column not in needed]
    for size in range(len(optional) + 1):
        for extra in combinations(optional, size):
            chosen = sorted((*needed, *extra))
            part, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(target)), rcond=None)
            positive = all(value > 0 for value in part)
            error = float(((relative[:, chosen] / scale[chosen] @ part - 1) ** 2).sum())
            if positive and error < best[0] * (1 - 1e-9):
                solution = np.zeros(columns)
                solution[chosen] = part / scale[chosen]
                best = (error, solution)
    if best[1] is None:  # no such set: keep what is needed, as small as the timings allow
        solution = np.zeros(columns)
        solution[list(needed)] = 1 / relative[:, list(needed)].mean(axis=0) / len(needed)
        return solution
    return np.asarray(best[1])
