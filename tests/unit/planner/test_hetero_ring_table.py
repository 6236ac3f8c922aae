"""The table of times of `lut` and `formula`: measured on the ranks, given as a file, or predicted."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.errors import ClusterError, PlanError
from ds_hetero.models import load_model
from ds_hetero.planner import strategy
from ds_hetero.planner.published.hetero_ring import measured_table, read_table, table_of, table_text

CARD = {"peak_tflops": 100, "memory_gib": 80, "memory_bandwidth_gb_per_s": 1000}
LENGTHS = (2048, 4096, 8192)


def _cluster(slow=3.0, **slower):
    """Two cards that the datasheet takes for equal; the second was measured to be ``slow`` times as slow."""
    times = {str(n): n * n * 1e-9 for n in LENGTHS}
    devices = {
        "fast": {**CARD, "attention_s": times},
        "slow": {**CARD, "attention_s": {n: slow * seconds for n, seconds in times.items()}, **slower},
    }
    nodes = [{"name": "n", "devices": ["fast", "slow"], "link": {"bandwidth_gb_per_s": 25}}]
    return cluster_from_dict({"nodes": nodes, "devices": devices})


def _cost(cluster):
    return make_cost_model("calibrated", cluster, load_model("llama-3.2-1b"), Workload(seq_len=8192))


def test_the_table_is_what_was_measured_on_the_ranks():
    table = measured_table(_cluster())
    assert table.lengths == LENGTHS
    assert table.speeds == pytest.approx((1 / 3, 1))
    assert table.seconds[1] == pytest.approx((3 * 4096**2 * 1e-9, 4096**2 * 1e-9))
    assert "measured on the ranks, 3 lengths up to 8,192 tokens, 2 speeds" in table_text(_cost(_cluster()))


@pytest.mark.parametrize("name", ["lut", "formula"])
def test_splits_follow_the_measured_times_where_the_datasheet_sees_no_difference(name):
    """Pairs go with tokens, so a card of a third of the speed gets a quarter."""
    tokens = strategy(name, _cost(_cluster())).tokens(8192)
    assert tokens[1] / 8192 == pytest.approx(0.25, abs=0.01)


def test_without_measurements_the_table_is_predicted():
    cluster = _cluster()
    bare = replace(cluster.nodes[0].devices[0], attention_s=())
    unmeasured = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(bare, cluster.devices[1])),))
    assert measured_table(unmeasured) is None
    assert table_of(_cost(unmeasured))[2] == "predicted"


@pytest.mark.parametrize("times", [{"x": 1.0}, {"0": 1.0}, {"2048": 0}, {"2048": True}, [], {}])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ClusterError, match=r"devices\.slow\.attention_s"):
        _cluster(attention_s=times)


NO_TABLES = [
    [],
    {"lengths": [1]},
    {"lengths": 1, "speeds": [1], "seconds": [[1]]},
    {"lengths": [1], "speeds": [1], "seconds": 3},
    {"lengths": [1], "speeds": [True], "seconds": [[1]]},
    {"lengths": [2, 1], "speeds": [1], "seconds": [[1], [1]]},
]


@pytest.mark.parametrize("content", NO_TABLES)
def test_files_that_hold_no_table_are_refused(content, tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError):
        read_table(str(path))


def test_compare_takes_a_file_of_times_and_says_what_the_polynomial_is_worth(tmp_path):
    cluster, times = tmp_path / "cluster.json", tmp_path / "times.json"
    cluster.write_text(json.dumps({"nodes": [{"name": "n", "device": "L40", "count": 2}]}))
    speeds = [0.25, 0.5, 1.0]
    seconds = [[n * n * 1e-9 / speed for speed in speeds] for n in LENGTHS]
    times.write_text(json.dumps({"lengths": LENGTHS, "speeds": speeds, "seconds": seconds}))
    options = ["--cluster", str(cluster), "--model", "llama-3.2-1b", "--seq-len", "8192", "--times", str(times)]
    text = CliRunner().invoke(app, ["compare", *options], catch_exceptions=False).stdout
    assert "table of attention times: given, 3 lengths up to 8,192 tokens, 3 speeds; formula: R^2 = 1.000" in text
