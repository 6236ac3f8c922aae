"""The four splits of the hetero-ring paper, and the tables of attention times that two of them need.

All four make a ring of single ranks and decide only the tokens of every rank:

    even          gives all ranks the same number of tokens
    proportional  gives tokens in proportion to the devices' attention speed
    lut           lets all ranks finish together, by interpolation in a table of measured times
    formula       gives tokens in proportion to a polynomial of degree 2, fitted to the table's relative performance

The paper divides keys and values by these shares and queries evenly. Here both are divided by the shares, so a rank
with n of L tokens computes n x L pairs.

Source: hetero ring (Columbia), section III.C and figures 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link, Node
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.errors import PlanError
from ds_hetero.planner.published.interface import PublishedPlanner, no_recurrence
from ds_hetero.planner.published.profile_table import ProfileTable
from ds_hetero.values.baselines import even, proportional
from ds_hetero.values.schedule import Schedule


def read_table(path: str) -> ProfileTable:
    """Read a table of JSON or YAML, with ``lengths``, ``speeds``, and for every length a list of ``seconds``.

    Raises:
        PlanError: the file cannot be read, has other keys or types, or breaks a rule of `ProfileTable`.
    """
    content = read_file(path, "table of times", PlanError)
    names = ("lengths", "speeds", "seconds")
    if not isinstance(content, dict) or set(content) != set(names):
        raise PlanError(f"{shortened(path)} must be an object of {', '.join(names)}.")
    rows = content["seconds"] if isinstance(content["seconds"], list) else [None]
    for values in (content["lengths"], content["speeds"], *rows):
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise PlanError(
                f"{shortened(path)}: lengths and speeds must be lists of numbers, and seconds such a list for every "
                f"length; got {shortened(values)}."
            )
    return ProfileTable(
        lengths=tuple(content["lengths"]), speeds=tuple(content["speeds"]), seconds=tuple(map(tuple, rows))
    )


def measured_table(cluster: Cluster) -> ProfileTable | None:
    """Return the table of the times that were measured on the ranks, see `DeviceSpec.attention_s`.

    The speed of a device is the time of the fastest device at the longest length, divided by its own time there. The
    result is None if some rank has no times, or times at other lengths.
    """
    columns = {device.attention_s: dict(device.attention_s) for device in cluster.devices}  # seconds by length
    lengths_of_columns = {tuple(column) for column in columns.values()}
    if len(lengths_of_columns) != 1 or not (lengths := next(iter(lengths_of_columns))):
        return None
    column_by_longest_s = {column[lengths[-1]]: column for column in columns.values()}
    fastest_s = min(column_by_longest_s)
    slowest_first = sorted(column_by_longest_s, reverse=True)
    rows = (tuple(column_by_longest_s[longest_s][length] for longest_s in slowest_first) for length in lengths)
    speeds = tuple(fastest_s / longest_s for longest_s in slowest_first)
    return ProfileTable(lengths=lengths, speeds=speeds, seconds=tuple(rows))


def table_of(cost: CostModel) -> tuple[ProfileTable, list[float], str]:
    """Return the table that `LUT` and `FORMULA` use, the speed of every rank in it, and the source of its times.

    The times are measured if all ranks have measured times, else predicted.
    """
    measured = measured_table(cost.cluster)
    if measured is None:
        return profile_table(cost), list(cost.attention_speeds), "predicted"
    longest_s = [device.attention_s[-1][1] for device in cost.cluster.devices]  # at the longest length, by rank
    return measured, [min(longest_s) / seconds for seconds in longest_s], "measured on the ranks"


def profile_table(cost: CostModel) -> ProfileTable:
    """Return a table of predicted times: every kind of device alone, at seven lengths up to that of the workload."""
    speed_D = cost.attention_s_D.min() / cost.attention_s_D
    devices = {float(speed): device for speed, device in zip(speed_D, cost.cluster.devices, strict=True)}
    speeds = tuple(sorted(devices))
    longest = cost.workload.seq_len
    lengths = tuple(sorted({max(1, longest >> shift) for shift in range(7)}))
    rows = [tuple(device_alone_s(cost, devices[speed], length) for speed in speeds) for length in lengths]
    return ProfileTable(lengths=lengths, speeds=speeds, seconds=tuple(rows))


def device_alone_s(cost: CostModel, device: DeviceSpec, length: int) -> float:
    """Predict the time of attention in one layer for ``length`` tokens on one device alone."""
    link = Link(name="none", latency_s=0.0, bytes_per_s=1.0)
    cluster = Cluster(nodes=(Node(name="alone", devices=(device,), link=link),), network=link)
    workload = replace(cost.workload, seq_len=length, zero_stage=0, zero_weights=None)
    alone = make_cost_model(cost.name, cluster, cost.model, workload)
    schedule = even(1, cost.model.num_heads, cost.model.num_kv_heads)
    return alone.predict(schedule).terms.ring_steps_s


def lut_tokens(table: ProfileTable, speeds: Sequence[float], seq_len: int) -> list[float]:
    """Return the tokens of every rank, as fractions of tokens, with which all ranks finish together by the table.

    A rank with n of L tokens computes n L pairs, as many as self-attention over sqrt(n L) tokens, so its time is looked
    up at that length. The common time is found by bisection on a logarithmic scale.

    Args:
        speeds: speed of every rank, on the scale of the table.
        seq_len: tokens of the sequence, L.
    """
    grid_tokens = np.geomspace(1.0, float(seq_len), 512)
    lookup_lengths = np.sqrt(grid_tokens * seq_len)
    # Seconds of every rank at the tokens of the grid; made ascending, since measured times may fall here and there.
    curves = [np.maximum.accumulate(table.seconds_at(lookup_lengths, speed)) for speed in speeds]

    def tokens_within(time_s: float) -> list[float]:
        """Return the tokens that every rank finishes within ``time_s``."""
        return [float(np.interp(np.log(time_s), np.log(curve), grid_tokens, left=0.0)) for curve in curves]

    low_s = min(float(curve[0]) for curve in curves)
    high_s = max(float(curve[-1]) for curve in curves)
    for _ in range(60):
        middle_s = (low_s * high_s) ** 0.5
        low_s, high_s = (low_s, middle_s) if sum(tokens_within(middle_s)) > seq_len else (middle_s, high_s)
    return tokens_within(high_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """Performance relative to the fastest device, as a polynomial of degree 2 in length / longest and speed."""

    coefficients: tuple[float, ...]  # of 1, x, s, x^2, x s, s^2 with x = length / longest and s = speed
    longest: int  # longest length of the table
    r_squared: float  # share of the table's variance that the polynomial explains

    def performance(self, length: int, speed: float) -> float:
        """Return the performance relative to the fastest device; at least 0.01, so that every rank gets work."""
        value = _features(np.array([length / self.longest]), np.array([speed])) @ np.array(self.coefficients)
        return max(float(value[0]), 0.01)


def fit_formula(table: ProfileTable) -> Formula:
    """Fit the polynomial to all points of a table by least squares."""
    x, s = np.meshgrid(np.array(table.lengths) / table.lengths[-1], np.array(table.speeds), indexing="ij")
    seconds = np.array(table.seconds)
    performance = (seconds[:, -1:] / seconds).ravel()  # the last column is the fastest device
    features = _features(x.ravel(), s.ravel())
    coefficients = np.linalg.lstsq(features, performance, rcond=None)[0]
    residual_squares = float(((features @ coefficients - performance) ** 2).sum())
    total_squares = float(((performance - performance.mean()) ** 2).sum())
    return Formula(
        coefficients=tuple(coefficients.tolist()),
        longest=table.lengths[-1],
        r_squared=1 - residual_squares / total_squares if total_squares else 1.0,
    )


def _features(x: Floats, s: Floats) -> Floats:
    """Return the terms of the polynomial in length / longest and speed, ``[points, 6]``; see `Formula`."""
    return np.stack([np.ones_like(x), x, s, x * x, x * s, s * s], axis=-1)


def table_text(cost: CostModel, table: ProfileTable | None = None) -> str:
    """Describe a table: source of its times, its size, and how well the polynomial fits.

    Args:
        table: the table; left out, that of `table_of`.
    """
    chosen, _, source = table_of(cost) if table is None else (table, [], "given")
    return (
        f"table of attention times: {source}, {len(chosen.lengths)} lengths up to {chosen.lengths[-1]:,} tokens, "
        f"{len(chosen.speeds)} speeds; formula: R^2 = {fit_formula(chosen).r_squared:.3f}"
    )


def _lut(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """Return the schedule of ``lut``; without a table, by the table of `table_of`."""
    chosen, speeds, _ = table_of(cost) if table is None else (table, list(cost.attention_speeds), "given")
    tokens = lut_tokens(chosen, speeds, cost.workload.seq_len)
    return proportional(tokens, cost.model.num_heads, cost.model.num_kv_heads)


def _formula(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """Return the schedule of ``formula``; without a table, by the table of `table_of`."""
    chosen, speeds, _ = table_of(cost) if table is None else (table, list(cost.attention_speeds), "given")
    formula = fit_formula(chosen)
    weights = [formula.performance(cost.workload.seq_len, speed) for speed in speeds]
    return proportional(weights, cost.model.num_heads, cost.model.num_kv_heads)


_SOURCE = "hetero ring (Columbia), section III.C and figures 3 and 4"
_FORBIDS = no_recurrence(
    "its ring passes keys and values (section III), and {model} has layers that carry a state instead"
)
LUT = PublishedPlanner(name="lut", title="hetero ring's table", source=_SOURCE, schedule=_lut, forbids=_FORBIDS)
FORMULA = PublishedPlanner(
    name="formula", title="hetero ring's polynomial", source=_SOURCE, schedule=_formula, forbids=_FORBIDS
)
