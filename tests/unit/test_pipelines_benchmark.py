"""What the benchmark of pipelines makes of measured times."""

from __future__ import annotations

import pytest

from benchmarks.pipelines.tables import summarize, summarize_memory

FOUND = {
    "seconds": {
        "deepspeed": [4.0, 4.2, 4.1],
        "ours": [1.0, 1.1, 0.9],
        "grid pp4": [2.0, 2.2, 2.1],
        "grid pp2": [2.1, 2.3, 2.2],
        "sequence": [3.0, 3.0, 3.0],
    },
    "plans": {
        "ours": {"predicted_s": 0.9},
        "grid pp4": {"predicted_s": 2.0},
        "grid pp2": {"predicted_s": 1.9},
        "sequence": {"predicted_s": 1.8},
    },
}


def test_pairs_that_hardly_differ_are_not_ranked():
    summary = summarize(FOUND)
    assert summary["best_grid"] == "grid pp4"
    assert summary["fastest"] == "ours"
    assert summary["over_best_grid"] == pytest.approx(2.0)
    assert summary["over_stock"] == pytest.approx(4.0, rel=0.15)
    assert summary["pairs"] == 5 and summary["pairs_in_order"] == 3
    assert sorted(summary["wrong_pairs"]) == [("grid pp2", "sequence"), ("grid pp4", "sequence")]
    assert summary["errors"]["ours"] == pytest.approx(-0.1)


def test_the_worst_rank_counts():
    plan = {"bytes": {0: 110, 1: 80}, "predicted_bytes": {0: 100, 1: 100}}
    assert summarize_memory({"plans": {"ours": plan}})["worst"] == pytest.approx(0.1)
