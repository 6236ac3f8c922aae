"""The hetero ring's figures by prediction: two L40, the second at 10 to 90 %, 4K to 64K tokens, 8 heads of 64."""

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
from ds_hetero.planner.published.interface import ProfileTable

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
DECIDES = (
    "the calibrated cost model of an L40, slowed down evenly; a kernel that MPS throttles need not follow its share of "
    "the SMs. Emulated ranks of a CPU are measured by `python -m benchmarks.lab ring`, at 10 to 90 % and 4K to 16K "
    "tokens of one head ([measured](measured.md#unequal-ranks))."
)


@cache
def device(fraction: float) -> DeviceSpec:
    """An L40 at a share of its speed."""
    full = CATALOGUE["L40"].device
    return replace(
        full,
        name=f"L40 at {fraction:.0%}",
        peak_flops_per_s=full.peak_flops_per_s * fraction,
        memory_bytes_per_s=full.memory_bytes_per_s * fraction,
    )


def cost_of(fraction: float, length: int) -> CostModel:
    """Two ranks, the second at a share of its speed; a training step of one causal layer."""
    node = Node(name="two", devices=(device(1.0), device(fraction)), link=LINK)
    cluster = Cluster(nodes=(node,), network=LINK)
    return make_cost_model("calibrated", cluster, ONE_LAYER, Workload(seq_len=length, zero_stage=0))


@cache
def table() -> ProfileTable:
    """Times of attention on one device by itself, by length and share of its speed."""
    rows = [[device_alone_s(cost_of(1.0, n), device(s), n) for s in FRACTIONS] for n in LENGTHS]
    return ProfileTable(lengths=LENGTHS, speeds=FRACTIONS, seconds=tuple(map(tuple, rows)))


@cache
def times(fraction: float, length: int) -> dict[str, tuple[float, float]]:
    """By strategy, seconds of attention and the share of tokens on the first rank."""
    cost = cost_of(fraction, length)
    found = {}
    for name in STRATEGIES:
        schedule = strategy(name, cost, table())
        tokens = schedule.tokens(length)
        found[name] = cost.predict(schedule).terms.ring_steps_s, tokens[0] / length
    return found


def _homogeneous_s(length: int) -> float:
    return times(1.0, length)["even"][0]


def _grid(quick: bool) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return ((0.1, 0.5, 0.9), (4096, 65_536)) if quick else (FRACTIONS[:-1], LENGTHS)


def token_split(quick: bool) -> Figure:
    """Figure 1."""
    fractions, lengths = _grid(quick)
    lines = {name: [(s, times(s, lengths[-1])[name][1]) for s in fractions] for name in STRATEGIES}
    rows = [(f"{s:.0%}", *(f"{times(s, lengths[-1])[name][1]:.1%}" for name in STRATEGIES)) for s in fractions]
    return Figure(
        name="Figure 1",
        shows="Tokens on the fast rank by strategy, at 64K tokens. The print is a drawing without numbers.",
        columns=("second rank at", *STRATEGIES),
        rows=rows,
        decides=DECIDES,
        lines=lines,
        axes=("speed of the second rank", "share of tokens on the first", ""),
    )


def products(quick: bool) -> Figure:
    """Figure 2: products of square matrices."""
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
        shows="Time of products of square matrices by throttling, ms. The print is a drawing without numbers.",
        columns=("speed", *(f"{n}" for n in sizes)),
        rows=rows,
        decides=DECIDES,
        lines=lines,
        axes=("size", "seconds", "log both"),
    )


def performance(quick: bool) -> Figure:
    """Figure 3: normalized performance by length and speed."""
    seconds = table().seconds
    lines = {
        f"{n // 1024}K": [(s, row[-1] / each) for s, each in zip(FRACTIONS, row, strict=True)]
        for n, row in zip(LENGTHS, seconds, strict=True)
    }
    rows = [(name, *(f"{y:.2f}" for _, y in points)) for name, points in lines.items()]
    return Figure(
        name="Figure 3",
        shows="Performance of attention over that at full speed; about linear in the print.",
        columns=("tokens", *(f"{s:.0%}" for s in FRACTIONS)),
        rows=rows,
        decides=DECIDES,
        lines=lines,
        axes=("speed", "normalized performance", ""),
    )


def regression(quick: bool) -> Figure:
    """Figure 4: the polynomial of degree 2."""
    formula = fit_formula(table())
    names = ("1", "x", "s", "x^2", "x s", "s^2")
    return Figure(
        name="Figure 4",
        shows="Polynomial of degree 2 in length x and speed s for normalized performance.",
        columns=("", "R^2", *names),
        rows=[
            ("print", "0.922", *[""] * 6),
            ("here", f"{formula.r_squared:.3f}", *map("{:.3f}".format, formula.coefficients)),
        ],
        decides=f"{DECIDES} Predictions have no noise, so R^2 is higher than of measured times.",
    )


def slowdown(quick: bool) -> Figure:
    """Figure 5: slowdown of every strategy over the whole grid."""
    fractions, lengths = _grid(quick)
    rows = [("print, 10 %", "all", "5-8", "about 2", "", "", "")]
    for s in fractions:
        for n in lengths:
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
        shows="Slowdown against two equal ranks; the best of a row has a star. The picture is at 64K.",
        columns=("second rank at", "tokens", *STRATEGIES),
        rows=rows,
        decides=DECIDES,
        lines=lines,
        axes=("speed of the second rank", "slowdown", ""),
    )


def speedup(quick: bool) -> Figure:
    """Figure 6: the proportional split over the even one."""
    fractions, lengths = _grid(quick)
    rows: list[Any] = [("print, best", *[""] * (len(lengths) - 1), "4.4 at 10 %")]
    ratios = {s: [times(s, n)["even"][0] / times(s, n)["proportional"][0] for n in lengths] for s in fractions}
    rows += [(f"{s:.0%}", *map("{:.2f}".format, of_speed)) for s, of_speed in ratios.items()]
    return Figure(
        name="Figure 6",
        shows="Speed-up of the proportional (uneven) split over the even one.",
        columns=("second rank at", *(f"{n // 1024}K" for n in lengths)),
        rows=rows,
        decides=DECIDES,
    )


def latency(quick: bool) -> Figure:
    """Figure 7: latency at 10 %."""
    lengths = _grid(quick)[1]
    rows: list[Any] = [("print, 64K", "over 6 s", "below 1.4 s", "", "", "")]
    rows += [(f"{n // 1024}K", *(f"{1e3 * times(0.1, n)[name][0]:.2f} ms" for name in STRATEGIES)) for n in lengths]
    return Figure(
        name="Figure 7",
        shows="Latency with the second rank at 10 %. The print is of a forward, here a training step is predicted: "
        "ratios "
        "can be compared, seconds cannot.",
        columns=("tokens", *STRATEGIES),
        rows=rows,
        decides=DECIDES,
        lines={name: [(n, times(0.1, n)[name][0]) for n in lengths] for name in STRATEGIES},
        axes=("tokens", "seconds", "log both"),
    )


def efficiency(quick: bool) -> Figure:
    """Figure 8: the inverse of the slowdown."""
    fractions, lengths = _grid(quick)
    n = lengths[-1]
    lines = {name: [(s, _homogeneous_s(n) / times(s, n)[name][0]) for s in fractions] for name in STRATEGIES}
    rows: list[Any] = [("print, 10 %", "below 20 %", "40-50 %", "40-50 %", "40-50 %", "")]
    rows += [(f"{s:.0%}", *(f"{lines[name][i][1]:.0%}" for name in STRATEGIES)) for i, s in enumerate(fractions)]
    return Figure(
        name="Figure 8",
        shows="Efficiency: time of two equal ranks over the time, at 64K tokens.",
        columns=("second rank at", *STRATEGIES),
        rows=rows,
        decides=DECIDES,
        lines=lines,
        axes=("speed of the second rank", "efficiency", ""),
    )


PAPER = Paper(
    key="hetero-ring",
    title="Heterogeneity-aware ring attention (Columbia)",
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
