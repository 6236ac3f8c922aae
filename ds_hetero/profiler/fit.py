"""Fit the cost model's numbers of a device or a link to timings, and return the errors of the fit.

Samples are plain tuples, so that a profile is JSON and a fit can be repeated without the machine. All fits minimise
relative errors, so that a step of a millisecond counts as much as one of a second; no coefficient is negative.

    fit          time of                                                  depends on
    layer        a transformer layer without attention, both passes       tokens and width
    attention    attention between two blocks, both passes                query rows and keys
    transfer     a message                                                bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

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
    """Median and largest relative error of a fit over its samples."""

    median: float
    largest: float

    @classmethod
    def between(cls, predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> FitError:
        """Return the relative errors of ``predicted`` against ``measured``."""
        error = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(median=float(np.median(error)), largest=float(error.max()))


class TransferFit(NamedTuple):
    """A line through the times of transfers: seconds = latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float
    error: FitError


def fit_efficiency(
    peak_flops_per_s: float,
    memory_bytes_per_s: float,
    layers: Sequence[LayerSample],
    attention: Sequence[AttentionSample],
) -> tuple[Efficiency, dict[str, FitError]]:
    """Fit the fractions of the two peaks that a device achieves, and the curves of small sizes.

    Returns:
        The efficiency, and the errors of each fit, by names such as "layer forward".
    """
    layer, layer_errors = _fit_layer(peak_flops_per_s, memory_bytes_per_s, layers)
    curves, attention_errors = _fit_attention(peak_flops_per_s, attention)
    return Efficiency(**layer, **curves), layer_errors | attention_errors


def _fit_layer(
    peak_flops_per_s: float, memory_bytes_per_s: float, samples: Sequence[LayerSample]
) -> tuple[dict[str, float], dict[str, FitError]]:
    """Fit the times of layers. Both passes share all coefficients; a backward is assumed to do all work twice.

    t = flops / rate + flops / tokens * half_tokens / rate + bytes / bandwidth + overhead

    ``rate`` is that of large matmuls, ``half_tokens`` the number of tokens at which half of it is achieved.
    """
    flops = np.array([sample.flops for sample in samples])
    tokens = np.array([sample.tokens for sample in samples], dtype=float)
    moved_bytes = np.array([sample.elementwise_bytes for sample in samples])
    forward_s = np.array([sample.forward_s for sample in samples])
    backward_s = np.array([sample.backward_s for sample in samples])
    features = np.stack([flops, flops / tokens, moved_bytes, np.ones_like(flops)], axis=1)
    coefficients = _fit_non_negative(
        np.concatenate([features, 2 * features]), np.concatenate([forward_s, backward_s]), needed=(0, 2)
    )
    rate, bandwidth = 1 / coefficients[0], 1 / coefficients[2]
    predicted_s = features @ coefficients
    return {
        "matmul": float(rate / peak_flops_per_s),
        "matmul_half_tokens": float(coefficients[1] * rate),
        "memory": float(bandwidth / memory_bytes_per_s),
        "kernel_overhead_s": float(coefficients[3]),
    }, {
        "layer forward": FitError.between(predicted_s, forward_s),
        "layer backward": FitError.between(2 * predicted_s, backward_s),
    }


def _fit_attention(
    peak_flops_per_s: float, samples: Sequence[AttentionSample]
) -> tuple[dict[str, float], dict[str, FitError]]:
    """Fit the times of attention blocks: a rate for each pass, and further coefficients that both passes share.

    t = flops / rate * (1 + half_rows / rows) * (1 + half_keys / keys) + overhead      all keys are visible
    t + edge_keys / keys * flops / rate                                 causal square; flops are half of the above

    At ``half_rows`` rows, or ``half_keys`` keys, half of the rate is achieved. If both are given, the first equation is
    linear in 1 / rate and the overhead, which are solved for. So ``half_rows`` and ``half_keys`` are searched over a
    grid that is refined around its best point. ``edge_keys``, the cost of masked tiles on the diagonal, is fitted last.
    """
    rows = np.array([sample.rows for sample in samples], dtype=float)
    keys = np.array([sample.keys for sample in samples], dtype=float)
    head_dim = np.array([sample.head_dim for sample in samples], dtype=float)
    times = np.array([[sample.forward_s, sample.backward_s] for sample in samples])
    flops_per_pair = head_dim[:, None] * (4.0, 10.0)  # of a query row and a key, forward and backward
    causal = np.array([sample.causal for sample in samples])

    def effective_flops(half_rows: float, half_keys: float) -> Floats:
        """Return FLOPs * (1 + half_rows / rows) * (1 + half_keys / keys), ``[samples, 2]``: forward, backward."""
        pairs = (rows + half_rows) * (keys + half_keys) * np.where(causal, 0.5, 1.0)
        return np.asarray(pairs[:, None] * flops_per_pair)

    def fitted_rates(half_rows: float, half_keys: float) -> tuple[float, Floats]:
        """Solve for the rates; return the squared relative error, and s per FLOP (forward, backward) and overhead."""
        flops = effective_flops(half_rows, half_keys)[~causal]
        zeros = np.zeros(int((~causal).sum()))
        target = times[~causal].ravel(order="F")  # all forwards, then all backwards
        forward, backward = np.r_[flops[:, 0], zeros], np.r_[zeros, flops[:, 1]]
        features = np.stack([forward, backward, np.ones_like(target)], axis=1)
        coefficients = _fit_non_negative(features, target, needed=(0, 1))
        return float(((features @ coefficients / target - 1) ** 2).sum()), coefficients

    row_grid, key_grid = _coarse_grid(rows), _coarse_grid(keys)
    for spread in GRID_SPREADS:
        points = ((float(half_rows), float(half_keys)) for half_rows, half_keys in product(row_grid, key_grid))
        _, half_rows, half_keys = min((fitted_rates(*point)[0], *point) for point in points)
        row_grid, key_grid = _finer_grid(row_grid, half_rows, spread), _finer_grid(key_grid, half_keys, spread)
    _, coefficients = fitted_rates(half_rows, half_keys)
    s_per_flop, overhead_s = coefficients[:2], float(coefficients[2])
    predicted = effective_flops(half_rows, half_keys) * s_per_flop + overhead_s
    # Causal squares take longer than predicted: ``missing``, a fraction of the measured time. One edge key would
    # explain ``edge`` of it. The least-squares solution of edge_keys * edge = missing is the quotient of these sums.
    edge = (rows[:, None] * flops_per_pair * s_per_flop)[causal] / times[causal]
    missing = 1 - predicted[causal] / times[causal]
    edge_keys = max(float((edge * missing).sum() / (edge**2).sum()), 0.0) if causal.any() else 0.0
    predicted[causal] += edge_keys * edge * times[causal]
    rates = 1 / s_per_flop / peak_flops_per_s
    return {
        "attention_forward": float(rates[0]),
        "attention_backward": float(rates[1]),
        "attention_half_rows": half_rows,
        "attention_half_kv": half_keys,
        "attention_edge_keys": edge_keys,
        "attention_overhead_s": overhead_s,
    }, {
        "attention forward": FitError.between(predicted[:, 0], times[:, 0]),
        "attention backward": FitError.between(predicted[:, 1], times[:, 1]),
    }


def _coarse_grid(values: Floats) -> Floats:
    """Return values of ``half_rows`` to try: 0, and 13 from a hundredth of the smallest timed rows to the largest."""
    return np.asarray(np.r_[0.0, np.geomspace(values.min() / 100, values.max(), 13)])


def _finer_grid(grid: Floats, best: float, spread: float) -> Floats:
    """Return the values to try next: 0, and 7 from best / spread to best * spread; if 0 is best, the first two."""
    if not best:
        return grid[:2]
    return np.asarray(np.r_[0.0, np.geomspace(best / spread, best * spread, 7)])


def fit_transfer(samples: Sequence[TransferSample]) -> TransferFit:
    """Fit the line t = latency + bytes / bandwidth to timed transfers."""
    sizes = np.array([sample.num_bytes for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    features = np.stack([np.ones_like(sizes), sizes], axis=1)
    coefficients = _fit_non_negative(features, seconds, needed=(1,))
    error = FitError.between(features @ coefficients, seconds)
    return TransferFit(float(coefficients[0]), float(1 / coefficients[1]), error)


def _fit_non_negative(features: Floats, target: Floats, needed: tuple[int, ...]) -> Floats:
    """Return the coefficients >= 0 with the least squared relative error; those of the columns ``needed`` are > 0.

    There are at most four columns, so every set of columns is tried: for each, the least squares over these columns
    alone. A set counts if all its coefficients are positive; coefficients of other columns are 0.

    Args:
        features: [samples, columns].
        target: [samples], the measured times.
        needed: indices of columns that must have a positive coefficient.
    """
    columns = features.shape[1]
    relative = features / target[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    least_error = np.inf
    best_solution: Floats | None = None
    optional = [column for column in range(columns) if column not in needed]
    for size in range(len(optional) + 1):
        for extra in combinations(optional, size):
            tried = sorted((*needed, *extra))  # columns of this set
            scaled, *_ = np.linalg.lstsq(relative[:, tried] / scale[tried], np.ones(len(target)), rcond=None)
            is_positive = all(value > 0 for value in scaled)
            error = float(((relative[:, tried] / scale[tried] @ scaled - 1) ** 2).sum())
            # Larger sets come later; one that is better by rounding alone does not count.
            if is_positive and error < least_error * (1 - 1e-9):
                least_error = error
                best_solution = np.zeros(columns)
                best_solution[tried] = scaled / scale[tried]
    if best_solution is None:  # no set counts: each needed column alone explains an equal share of the times
        solution = np.zeros(columns)
        solution[list(needed)] = 1 / relative[:, list(needed)].mean(axis=0) / len(needed)
        return solution
    return best_solution
