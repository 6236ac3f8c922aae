"""Published figures of HexiSeq (arXiv:2605.07569v1), the questions that it leaves open, and our assumptions.

Figures 3 to 7 are drawings without numbers; the figures in the text are here, and table 3 in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GAIN_MEAN, GAIN_BEST = 1.36, 1.72  # section 5.3: over the strongest baseline, six panels
EQUAL_FLOPS_WITHIN = 0.005  # section 5.4: "about 0.5 %" of the best homogeneous baseline, Ulysses
SCHEDULER_S = {128: 9.0, 1024: 444.0}  # figure 6
GLOBAL_BATCH = 8  # section 5.1

# What ours must reach: mean gain of simulations 1-3 at datasheet peaks, share of the bound, seconds by devices.
GAIN_TARGET, OF_BOUND_TARGET = 1.40, 0.95
TIME_TARGETS = {128: 0.5, 1024: 3.0, 4096: 10.0}

SIMULATIONS = {
    "S1": "hexiseq-simulation-1",
    "S2": "hexiseq-simulation-2",
    "S3": "hexiseq-simulation-3",
}
MODELS = ("gpt-13b", "gpt-70b")
CONTEXTS = (65_536, 131_072, 262_144, 524_288, 1_048_576)  # "up to 1024K"; the steps below it are not published

# Section 5.4: mixed cluster, homogeneous cluster, model, context.
EQUAL_FLOPS = {
    "S4": ("hexiseq-simulation-4", "hexiseq-simulation-4-homogeneous", "gpt-13b", 262_144),
    "S5": ("hexiseq-simulation-5", "hexiseq-simulation-5-homogeneous", "gpt-13b", 131_072),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of table 3; thousands of tokens per second."""

    method: str
    model: str
    setting: int
    context: int
    measured: float
    simulated: float


TABLE_3 = (
    Row("usp", "gpt-3b", 2, 65_536, 16.6, 16.8),
    Row("usp", "gpt-3b", 3, 65_536, 27.4, 29.9),
    Row("ulysses", "gpt-3b", 3, 131_072, 19.8, 19.0),
    Row("ulysses", "gpt-13b", 3, 16_384, 11.4, 11.2),
    Row("ring", "gpt-3b", 2, 32_768, 7.3, 7.6),
    Row("ring", "gpt-7b", 3, 16_384, 4.3, 4.3),
    Row("hexiseq", "gpt-3b", 3, 65_536, 30.2, 30.0),
    Row("hexiseq", "gpt-7b", 3, 65_536, 16.5, 15.9),
)

# What the paper leaves open, and what is taken here unless an assumption below says otherwise.
OPEN_QUESTIONS = (
    ("compute rates c_d", "dense bf16 datasheet peaks: H100 989.5, A100 and A800 312, L40S 362 TFLOPS"),
    ("calibration constants", "none"),
    ("latencies", "5 us inside a node, 10 us between nodes"),
    ("200 GB/s between nodes", "of every pair of devices, as Eq. 9 and 12 have it, not of a node"),
    ("nodes", "of eight equal devices"),
    ("contexts of figure 5", "64K, 128K, 256K, 512K and 1024K"),
    ("heads and layers", "3B 32 x 32, 7B 32 x 32, 13B 40 x 40, 70B 64 x 80; ratio 4 of the MLP, as in Eq. 5"),
    ("legal baselines", "Ulysses and USP where the group size divides the heads; ranks in order of their nodes"),
    ("M_static", "ZeRO-3 over all ranks, 16 bytes per parameter"),
    ("equal FLOPs", "48 x 3 + 8 = 152 and 52 x 3 + 4 + 8 = 168: an H100 counts as three A100"),
    ("Ulysses on 152 and 168 ranks", "40 heads do not divide; shown with fractions of heads beside the legal ones"),
)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """One way to settle the open questions.

    Args:
        tflops: rates that replace the datasheet's, by device.
        between_gb_per_s: bandwidth between nodes.
        latency_us: inside a node and between nodes.
        cost_model: "published", or "calibrated" with efficiencies of 1, without ZeRO traffic and without limits of
            memory: no barrier between ring steps, bytes summed at every device's NIC, partial results merged.
        causal: for the calibrated model; the published one counts full attention.
        fractional_heads: let Ulysses split a head, so that it exists on any number of ranks.
    """

    name: str
    tflops: Mapping[str, float] = field(default_factory=dict)
    between_gb_per_s: float = 200.0
    latency_us: tuple[float, float] = (5.0, 10.0)
    cost_model: str = "published"
    causal: bool = False
    fractional_heads: bool = False


DATASHEET = Assumptions(name="datasheet peaks, 200 GB/s per pair")
_H100, _L40S = "H100-SXM-80GB", "L40S"

ASSUMPTIONS = (
    DATASHEET,
    Assumptions(name="H100 = 3 A100", tflops={_H100: 936}),
    *(Assumptions(name=f"L40S at {rate} TFLOPS", tflops={_L40S: rate}) for rate in (260, 240, 210, 181)),
    Assumptions(name="25 GB/s per pair", between_gb_per_s=25),
    Assumptions(name="25 GB/s per pair, L40S at 181", between_gb_per_s=25, tflops={_L40S: 181}),
    Assumptions(name="no latency", latency_us=(0, 0)),
    Assumptions(name="ten times the latency", latency_us=(50, 100)),
    Assumptions(name="Ulysses with fractions of heads", fractional_heads=True),
    Assumptions(name="no barrier, bytes summed at ports, 200 GB/s", cost_model="calibrated"),
    Assumptions(name="no barrier, bytes summed, 25 GB/s", cost_model="calibrated", between_gb_per_s=25),
    Assumptions(name="no barrier, bytes summed, causal zigzag", cost_model="calibrated", causal=True),
)
