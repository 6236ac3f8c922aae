"""The hetero ring's figures by prediction: two L40, the second at 10 to 90 % speed, 4K to 64K tokens, 8 heads of 64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.reproduce.figures.figure import Figure, Paper
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link, Node
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import strategy
from ds_hetero.planner.published.hetero_ring import device_alone_s, fit_formula
from ds_hetero.planner.published.profile_table import ProfileTable

FRACTIONS = tuple(percent / 100 for percent in range(10, 101, 10))
LENGTHS = (4096, 8192, 16_384, 32_768, 65_536)
STRATEGIES = ("even", "proportional", "lut", "formula", "plan")
LINK = Link(name="pcie", latency_s=5e-6, bytes_per_s=25e9)
ONE_LAYER = ModelSpec(
    name="one attention layer of 8 heads",
    num_layers=1,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    mlp_size=2048,
    vocab_size=32_000,
)
SETUP = "The cost model slows an L40 down evenly."


@cache
def device(fraction: float) -> DeviceSpec:
    """Return an L40 at a fraction of its speed."""
    full = CATALOGUE["L40"].device
    return replace(
        full,
        name=f"L40 at {fraction:.0%}",
        peak_flops_per_s=full.peak_flops_per_s * fraction,
        memory_bytes_per_s=full.memory_bytes_per_s * fraction,
    )


def cost_of(fraction: float, length: int) -> CostModel:
    """Return the cost model of a causal layer's training step on two ranks, the second at a fraction of its speed."""
    node = Node(name="two", devices=(device(1.0), device(fraction)), link=LINK)
    cluster = Cluster(nodes=(node,), network=LINK)
    return make_cost_model("calibrated", cluster, ONE_LAYER, Workload(seq_len=length, zero_stage=0))


@cache
def table() -> ProfileTable:
    """Return the times of attention on one device alone, by length and fraction of its speed."""
    rows = [[device_alone_s(cost_of(1.0, n), device(s), n) for s in FRACTIONS] for n in LENGTHS]
    return ProfileTable(lengths=LENGTHS, speeds=FRACTIONS, seconds=tuple(map(tuple, rows)))


@cache
def times(fraction: float, length: int) -> dict[str, tuple[float, float]]:
    """Return by strategy the seconds of attention and the share of tokens on the first rank."""
    cost = cost_of(fraction, length)
    by_strategy = {}
    for name in STRATEGIES:
        schedule = strategy(name, cost, table())
        tokens = schedule.tokens(length)
        by_strategy[name] = cost.predict(schedule).terms.ring_steps_s, tokens[0] / length
    return by_strategy


def _homogeneous_s(length: int) -> float:
    return times(1.0, length)["even"][0]


def _grid(quick: bool) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return ((0.1, 0.5, 0.9), (4096, 65_536)) if quick else (FRACTIONS[:-1], LENGTHS)


def token_split(quick: bool) -> Figure:
    """Rebuild figure 1, the split of tokens."""
    fractions, lengths = _grid(quick)
    lines = {name: [(s, times(s, lengths[-1])[name][1]) for s in fractions] for name in STRATEGIES}
    rows = [(f"{s:.0%}", *(f"{times(s, lengths[-1])[name][1]:.1%}" for name in STRATEGIES)) for s in fractions]
    return Figure(
        name="Figure 1",
        title="tokens of the fast rank",
        shows=(
            "Share of the tokens that the fast rank gets, by strategy, at 64K tokens. The paper draws this "
            "without numbers."
        ),
        columns=("second rank at", *STRATEGIES),
        rows=rows,
        decides=SETUP,
        lines=lines,
        axes=("speed of the second rank", "share of tokens on the first", ""),
    )


def products(quick: bool) -> Figure:
    """Rebuild figure 2, matmuls of square matrices."""
    sizes = (1024, 2048, 4096, 8192)
    rows, lines = [], dict[str, list[tuple[float, float]]]()
    for s in (0.1, 0.25, 0.5, 1.0):
        card = device(s)
        seconds = [
            2 * n**3 / (card.peak_flops_per_s * card.efficiency.matmul) * (1 + card.efficiency.matmul_half_tokens / n)
            for n in sizes
        ]
        rows.append((f"{s:.0%}", *(f"{1e3 * each:.2f}" for each in seconds)))
        lines[f"{s:.0%}"] = list(zip(sizes, seconds, strict=True))
    return Figure(
        name="Figure 2",
        title="square matmuls on a slowed GPU",
        shows=(
            "Milliseconds of a matmul of two square matrices, by matrix size and speed of the GPU. The paper "
            "draws this without numbers."
        ),
        columns=("speed", *(f"{n}" for n in sizes)),
        rows=rows,
        decides=SETUP,
        lines=lines,
        axes=("size", "seconds", "log both"),
    )


def performance(quick: bool) -> Figure:
    """Rebuild figure 3, normalized performance by length and speed."""
    seconds = table().seconds
    lines = {
        f"{n // 1024}K": [(s, row[-1] / each) for s, each in zip(FRACTIONS, row, strict=True)]
        for n, row in zip(LENGTHS, seconds, strict=True)
    }
    rows = [(name, *(f"{y:.2f}" for _, y in points)) for name, points in lines.items()]
    return Figure(
        name="Figure 3",
        title="attention on a slowed GPU",
        shows=(
            "Speed of attention relative to a GPU at full speed. In the paper it grows about linearly with the "
            "speed of the GPU; so it does here."
        ),
        columns=("tokens", *(f"{s:.0%}" for s in FRACTIONS)),
        rows=rows,
        decides=SETUP,
        lines=lines,
        axes=("speed", "normalized performance", ""),
    )


def regression(quick: bool) -> Figure:
    """Rebuild figure 4, the polynomial of degree 2."""
    formula = fit_formula(table())
    names = ("1", "x", "s", "x^2", "x s", "s^2")
    return Figure(
        name="Figure 4",
        title="a polynomial for the speed",
        shows=(
            "Coefficients of a polynomial of degree 2 that gives the relative speed of attention from the "
            "sequence length x and the speed s."
        ),
        columns=("", "R^2", *names),
        rows=[
            ("paper", "0.922", *[""] * 6),
            ("ours", f"{formula.r_squared:.3f}", *map("{:.3f}".format, formula.coefficients)),
        ],
        decides=f"{SETUP} Predictions have no noise, so the fit (R^2) is better than for measured times.",
    )


def slowdown(quick: bool) -> Figure:
    """Rebuild figure 5, the slowdown of every strategy over the whole grid."""
    fractions, lengths = _grid(quick)
    rows = [("paper, 10 %", "all", "5-8", "about 2", "", "", "")]
    for s in fractions[::2]:  # every other speed and length is enough to see the best strategy
        for n in lengths[::2]:
            ratios = {name: times(s, n)[name][0] / _homogeneous_s(n) for name in STRATEGIES}
            best = min(ratios.values())
            cells = (f"{ratio:.2f}{' *' if ratio == best else ''}" for ratio in ratios.values())
            rows.append((f"{s:.0%}", f"{n // 1024}K", *cells))
    lines = {
        name: [(s, times(s, lengths[-1])[name][0] / _homogeneous_s(lengths[-1])) for s in fractions]
        for name in STRATEGIES
    }
    return Figure(
        name="Figure 5",
        title="slowdown by strategy",
        shows=(
            "Time relative to two ranks of full speed. A star marks the best strategy of a row; the picture "
            "shows 64K tokens."
        ),
        columns=("second rank at", "tokens", *STRATEGIES),
        rows=rows,
        decides=SETUP,
        lines=lines,
        axes=("speed of the second rank", "slowdown", ""),
    )


def speedup(quick: bool) -> Figure:
    """Rebuild figure 6, the proportional split over the even one."""
    fractions, lengths = _grid(quick)
    rows: list[Any] = [("paper, best", *[""] * (len(lengths) - 1), "4.4 at 10 %")]
    ratios = {s: [times(s, n)["even"][0] / times(s, n)["proportional"][0] for n in lengths] for s in fractions}
    rows += [(f"{s:.0%}", *map("{:.2f}".format, of_speed)) for s, of_speed in ratios.items()]
    return Figure(
        name="Figure 6",
        title="gain of uneven splits",
        shows=(
            "Speed-up of the proportional split over the even split, by speed of the second rank and number of tokens."
        ),
        columns=("second rank at", *(f"{n // 1024}K" for n in lengths)),
        rows=rows,
        decides=SETUP,
    )


def latency(quick: bool) -> Figure:
    """Rebuild figure 7, latency at 10 %."""
    lengths = _grid(quick)[1]
    rows: list[Any] = [("paper, 64K", "over 6 s", "below 1.4 s", "", "", "")]
    rows += [(f"{n // 1024}K", *(f"{1e3 * times(0.1, n)[name][0]:.2f} ms" for name in STRATEGIES)) for n in lengths]
    return Figure(
        name="Figure 7",
        title="latency with a rank at 10 %",
        shows=(
            "Latency with the second rank at 10 % of its speed. The paper times a forward pass; this table "
            "predicts a training step. So compare ratios, not seconds."
        ),
        columns=("tokens", *STRATEGIES),
        rows=rows,
        decides=SETUP,
        lines={name: [(n, times(0.1, n)[name][0]) for n in lengths] for name in STRATEGIES},
        axes=("tokens", "seconds", "log both"),
    )


def efficiency(quick: bool) -> Figure:
    """Rebuild figure 8, the inverse of the slowdown."""
    fractions, lengths = _grid(quick)
    n = lengths[-1]
    lines = {name: [(s, _homogeneous_s(n) / times(s, n)[name][0]) for s in fractions] for name in STRATEGIES}
    rows: list[Any] = [("paper, 10 %", "below 20 %", "40-50 %", "40-50 %", "40-50 %", "")]
    rows += [(f"{s:.0%}", *(f"{lines[name][i][1]:.0%}" for name in STRATEGIES)) for i, s in enumerate(fractions)]
    return Figure(
        name="Figure 8",
        title="efficiency by strategy",
        shows="Time of two ranks of full speed, divided by the time with a slow second rank, at 64K tokens.",
        columns=("second rank at", *STRATEGIES),
        rows=rows,
        decides=SETUP,
        lines=lines,
        axes=("speed of the second rank", "efficiency", ""),
    )


PAPER = Paper(
    key="hetero-ring",
    name="Hetero ring",
    title="Heterogeneity-aware ring attention (Columbia)",
    result=(
        "With one of two ranks at 10 % of its speed and 64K tokens, uneven shares are 4.59 times as fast as "
        "equal ones; the paper prints 4.4. Our plan slows down by 1.82 where a proportional split slows down by "
        "2.18."
    ),
    setup=(
        "Our setup: a training step of one attention layer with 8 heads of 64, on two L40 of which the second is "
        "slowed down to 10 to 90 % of its speed. Strategies: `even` and `proportional` splits of the tokens, the "
        "paper's look-up table (`lut`) and `formula`, and our `plan`. A kernel that MPS throttles need not "
        "follow its share of the SMs, so real GPUs may differ. `python -m benchmarks.lab ring` measures the same "
        "on CPU ranks ([unequal ranks](unequal-ranks.md))."
    ),
    makers={
        "Figure 1": token_split,
        "Figure 2": products,
        "Figure 3": performance,
        "Figure 4": regression,
        "Figure 5": slowdown,
        "Figure 6": speedup,
        "Figure 7": latency,
        "Figure 8": efficiency,
    },
)
