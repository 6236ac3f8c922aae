"""A step of unlike pipelines, as the page and the picture draw_pipelines it."""

from __future__ import annotations

from typing import Any

from ds_hetero.cli.showing.pipelines_picture import draw_pipelines
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost import Workload
from ds_hetero.models import load_model
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Page
from ds_hetero.reporting.pipelines_sections import MAX_MICRO_BATCHES, _timelines, predict_pipelines
from ds_hetero.reporting.plan_page import plan_page
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.values.plans import read_plan


def _described(**workload: Any) -> DescribedPlan:
    """A fast pipeline of many micro-batches beside a slow one of few; A100 in two unlike machines."""
    nodes = [
        {"name": "a", "devices": ["H100-SXM-80GB", "A100-SXM-80GB"], "link": {"bandwidth_gb_per_s": 300}},
        {"name": "b", "device": "A100-SXM-80GB", "link": {"bandwidth_gb_per_s": 100}},
    ]
    cluster = cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 25}})
    model = load_model("qwen3-0.6b")
    layers = model.num_layers
    stages = [{"ranks": [r], "layers": [r * layers // 2, (r + 1) * layers // 2], "inner": "one"} for r in (0, 1)]
    slow = [{"ranks": [2], "layers": [0, layers], "inner": "one"}]
    data = {
        "version": 2,
        "model": {"num_layers": layers, "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads},
        "pipelines": [
            {"micro_batch_size": 1, "micro_batches": 200, "stages": stages},
            {"micro_batch_size": 1, "micro_batches": 90, "stages": slow},
        ],
    }
    work = Workload(seq_len=4096, zero_stage=1, **workload)
    scenario = PlanScenario(cost_model="calibrated", model=model, workload=work, clusters=(cluster,))
    return DescribedPlan(plan=read_plan(data), scenario=scenario)


def test_every_pipeline_is_drawn_over_the_same_part_of_a_step() -> None:
    """The first 24 micro-batches of each on one axis made the fast pipeline look idle."""
    described = _described()
    finished = predict_pipelines(described).finished
    page = Page("p")
    _timelines(page, finished)
    (chart,) = page._charts
    bars, kinds = chart["data"]["bars"], chart["data"]["kinds"]
    ends = [max(stop for row, _, _, stop in bars if row == number) for number in range(3)]
    assert len(set(ends)) == 1 and ends[0] < finished.step_s
    for number in range(3):
        forwards = [bar for bar in bars if bar[0] == number and kinds[bar[1]] == "forward"]
        last_s = max(stop for row, kind, _, stop in bars if row == number and kinds[kind] != "wait")
        assert 2 < len(forwards) <= 2 * MAX_MICRO_BATCHES and last_s > 0.9 * ends[0]


def test_in_short_names_offloads_and_tiles() -> None:
    page = plan_page(_described(tiled_mlp=True, offload_optimizer=True))
    assert "tiled loss, tiled MLP, optimizer state in the host" in page


def test_cards_of_one_name_have_one_colour_and_stages_say_what_they_hold() -> None:
    figure = draw_pipelines(*predict_pipelines(_described()))
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    assert {text.get_text() for text in figure.axes[0].texts} == {"14 layers\n1 card", "28 layers\n1 card"}


def test_the_page_says_what_it_costs_what_it_assumes_and_how_to_launch() -> None:
    page = plan_page(_described())
    assert "Of the peaks (MFU)" in page and "Energy of a million tokens" in page and "A billion tokens take" in page
    assert "Price of a million tokens" not in page  # the catalogue has no prices
    assert "cards of a node share 25 GB/s of network" in page
    assert "&quot;schedule&quot;: &quot;plan.json&quot;" in page and "a slots=2\nb slots=1" in page
