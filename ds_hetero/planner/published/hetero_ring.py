"""The four splits of the hetero-ring paper, and the tables of times that two of them are computed from.

All four make a ring of single ranks and only decide who holds how many tokens:

    even          the same for all
    proportional  in proportion to the devices' attention speed
    lut           so that all finish together by a table of measured times, interpolated
    formula       in proportion to a degree-2 polynomial fitted to the table's normalized performance

The paper cuts KV and leaves queries even; here both are cut, so a rank with n of L tokens computes n x L pairs.
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
from ds_hetero.planner.published.interface import ProfileTable, PublishedPlanner, no_recurrence
from ds_hetero.values.baselines import even, proportional
from ds_hetero.values.schedule import Schedule


def read_table(path: str) -> ProfileTable:
    """A table of JSON or YAML: ``lengths``, ``speeds``, ``seconds`` by length. Raises `PlanError`: it is none."""
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
    """Return the table that was measured on the ranks, see `DeviceSpec.attention_s`; None where some have none.

    The speed of a device is that of the fastest one's time at the longest length over its own.
    """
    columns = {device.attention_s: dict(device.attention_s) for device in cluster.devices}
    lengths = {tuple(column) for column in columns.values()}
    if len(lengths) != 1 or not (tokens := next(iter(lengths))):
        return None
    speeds = {column[tokens[-1]]: column for column in columns.values()}
    fastest_s = min(speeds)
    ascending = sorted(speeds, reverse=True)
    rows = (tuple(speeds[key][length] for key in ascending) for length in tokens)
    return ProfileTable(lengths=tokens, speeds=tuple(fastest_s / key for key in ascending), seconds=tuple(rows))


def table_of(cost: CostModel) -> tuple[ProfileTable, list[float], str]:
    """Return the table that `LUT` and `FORMULA` use, the speed of every rank in it, and where its times are from."""
    measured = measured_table(cost.cluster)
    if measured is None:
        return profile_table(cost), list(cost.attention_speeds), "predicted"
    longest = [device.attention_s[-1][1] for device in cost.cluster.devices]
    return measured, [min(longest) / seconds for seconds in longest], "measured on the ranks"


def profile_table(cost: CostModel) -> ProfileTable:
    """A table of predicted times: every kind of device by itself, at lengths up to the workload's."""
    speed_of = cost.attention_s_D.min() / cost.attention_s_D
    devices = {float(speed): device for speed, device in zip(speed_of, cost.cluster.devices, strict=True)}
    speeds = tuple(sorted(devices))
    longest = cost.workload.seq_len
    lengths = tuple(sorted({max(1, longest >> shift) for shift in range(7)}))
    rows = [tuple(device_alone_s(cost, devices[speed], length) for speed in speeds) for length in lengths]
    return ProfileTable(lengths=lengths, speeds=speeds, seconds=tuple(rows))


def device_alone_s(cost: CostModel, device: DeviceSpec, length: int) -> float:
    """Predict attention of one block of so many tokens on one device by itself, with the workload of ``cost``."""
    link = Link(name="none", latency_s=0.0, bytes_per_s=1.0)
    cluster = Cluster(nodes=(Node(name="alone", devices=(device,), link=link),), network=link)
    workload = replace(cost.workload, seq_len=length, zero_stage=0, zero_weights=None)
    alone = make_cost_model(cost.name, cluster, cost.model, workload)
    schedule = even(1, cost.model.num_heads, cost.model.num_kv_heads)
    return alone.predict(schedule).terms.ring_steps_s


def lut_tokens(table: ProfileTable, speeds: Sequence[float], seq_len: int) -> list[float]:
    """Tokens of every rank such that all finish together by the table.

    A rank with n tokens computes as many pairs as a square of side sqrt(n L), so that is where its time is looked
    up. The common time is found by bisection, and so is each rank's share for it.
    """
    grid = np.geomspace(1.0, float(seq_len), 512)
    side = np.sqrt(grid * seq_len)
    curves = [np.maximum.accumulate(table.seconds_at(side, speed)) for speed in speeds]

    def tokens(time_s: float) -> list[float]:
        return [float(np.interp(np.log(time_s), np.log(curve), grid, left=0.0)) for curve in curves]

    low, high = min(float(curve[0]) for curve in curves), max(float(curve[-1]) for curve in curves)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if sum(tokens(middle)) > seq_len else (middle, high)
    return tokens(high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """Normalized performance as a polynomial of degree 2 in (length / longest, speed)."""

    coefficients: tuple[float, ...]  # of 1, x, s, x^2, x s, s^2
    longest: int  # the length that lengths are divided by
    r_squared: float  # share of the table's variance that the polynomial explains

    def performance(self, length: int, speed: float) -> float:
        """Predicted speed relative to the fastest device; never below one hundredth, so that every rank gets work."""
        value = _features(np.array([length / self.longest]), np.array([speed])) @ np.array(self.coefficients)
        return max(float(value[0]), 0.01)


def fit_formula(table: ProfileTable) -> Formula:
    """Least squares over all points of a table; performance is the fastest device's time over the time."""
    x, s = np.meshgrid(np.array(table.lengths) / table.lengths[-1], np.array(table.speeds), indexing="ij")
    seconds = np.array(table.seconds)
    performance = (seconds[:, -1:] / seconds).ravel()
    features = _features(x.ravel(), s.ravel())
    coefficients = np.linalg.lstsq(features, performance, rcond=None)[0]
    residual = float(((features @ coefficients - performance) ** 2).sum())
    spread = float(((performance - performance.mean()) ** 2).sum())
    return Formula(
        coefficients=tuple(coefficients.tolist()),
        longest=table.lengths[-1],
        r_squared=1 - residual / spread if spread else 1.0,
    )


def _features(x: Floats, s: Floats) -> Floats:
    return np.stack([np.ones_like(x), x, s, x * x, x * s, s * s], axis=-1)


def table_text(cost: CostModel, table: ProfileTable | None = None) -> str:
    """Where the times of the table (`table_of`'s, if none is given) are from, and how well the polynomial fits."""
    chosen, _, source = table_of(cost) if table is None else (table, [], "given")
    return (
        f"table of attention times: {source}, {len(chosen.lengths)} lengths up to {chosen.lengths[-1]:,} tokens, "
        f"{len(chosen.speeds)} speeds; formula: R^2 = {fit_formula(chosen).r_squared:.3f}"
    )


def _lut(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    chosen, speeds, _ = table_of(cost) if table is None else (table, list(cost.attention_speeds), "given")
    tokens = lut_tokens(chosen, speeds, cost.workload.seq_len)
    return proportional(tokens, cost.model.num_heads, cost.model.num_kv_heads)


def _formula(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
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
