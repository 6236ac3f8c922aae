"""The lines that rank 0 prints of a plan when a job starts: few, and none longer than a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.common.announce import PREFIX
from ds_hetero.cost import Workload
from ds_hetero.decision.chosen_text import chosen_pipelines_text, chosen_schedules_text
from ds_hetero.decision.forecast import Forecast, forecast
from ds_hetero.models import load_model
from ds_hetero.planner import plan
from ds_hetero.values.baselines import proportional, ring
from ds_hetero.values.plans import read_plan

MODEL = load_model("gpt-7b")
WORK = Workload(seq_len=65536, activation_checkpointing=True, zero_stage=3)


def _predicted(cluster_name: str, weights: list[float] | None = None) -> Forecast:
    cluster = load_cluster(cluster_name)
    if weights is None:
        schedule = ring(cluster.num_ranks, MODEL.num_heads, MODEL.num_kv_heads)
    else:
        schedule = proportional(weights, MODEL.num_heads, MODEL.num_kv_heads)
    return forecast(schedule, cluster, MODEL, WORK)


def _lines(text: str) -> list[str]:
    """The lines as they are printed, with the prefix of an announcement; at most ten, of at most 80 columns."""
    lines = f"{PREFIX}{text}".splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 80
    return lines


def test_equal_ranks_share_a_row() -> None:
    cluster = load_cluster("hexiseq-setting-1")
    planned = plan(cluster, MODEL, 65536)
    lines = _lines(chosen_schedules_text([forecast(planned.schedule, cluster, MODEL, WORK, planned)]))
    assert lines[0] == "ds_hetero: the schedule for 1 x 65,536 tokens, ZeRO-3, activation checkpointing"
    assert sum(line.startswith(("  0-3 ", "  4-7 ")) for line in lines) == 2
    assert any(line.startswith("gain: ") for line in lines)


def test_kept_attention_is_said_in_the_title() -> None:
    cluster = load_cluster("hexiseq-setting-1")
    schedule = ring(cluster.num_ranks, MODEL.num_heads, MODEL.num_kv_heads)
    kept = forecast(schedule, cluster, MODEL, replace(WORK, keep_attention=True))
    title = "ds_hetero: the schedule for 1 x 65,536 tokens, ZeRO-3, recomputed but attention"
    assert _lines(chosen_schedules_text([kept]))[0] == title


def test_ranks_that_all_differ_are_counted_where_there_is_no_room() -> None:
    lines = _lines(chosen_schedules_text([_predicted("hexiseq-simulation-1", [100.0 + rank for rank in range(32)])]))
    assert any(line.startswith("  and ") and line.endswith(" more: see handle.plan") for line in lines)
    assert any(line.startswith("predicted: ") for line in lines)


def test_replicas_that_differ_have_a_line_each_and_the_slowest_is_predicted() -> None:
    cluster = load_cluster("hexiseq-setting-1")
    shapes = [ring(8, MODEL.num_heads, MODEL.num_kv_heads), proportional([4, 4, 4, 4, 1, 1, 1, 1], 32, 32)]
    forecasts = [forecast(shapes[i % 2].shifted(8 * i), cluster, MODEL, WORK) for i in range(4)]
    lines = _lines(chosen_schedules_text(forecasts))
    assert [line.partition(":")[0] for line in lines if line.startswith("replica")] == ["replica 0, 2", "replica 1, 3"]
    assert sum(line.startswith("predicted: ") for line in lines) == 1
    equal = _lines(chosen_schedules_text(forecasts[::2]))
    assert any(line.startswith("replica 0, 1: ring of 8 groups") for line in equal)


@pytest.mark.parametrize("count", [1, 12])
def test_pipelines_and_their_stages_are_counted_where_there_is_no_room(count: int) -> None:
    def stage(rank: int, first: int) -> dict[str, Any]:
        return {"ranks": [rank], "inner": "one", "layers": [first, first + 4]}

    pipelines = [
        {"micro_batch_size": 1, "micro_batches": 2, "stages": [stage(8 * i + j, 4 * j) for j in range(8)]}
        for i in range(count)
    ]
    sizes = {"num_layers": 32, "num_heads": 32, "num_kv_heads": 32}
    lines = _lines(chosen_pipelines_text(read_plan({"version": 2, "model": sizes, "pipelines": pipelines}), None))
    assert lines[0].startswith(f"ds_hetero: on, {8 * count} ranks in {count} pipeline")
    assert "5 more stages" in " ".join(" ".join(lines).split())
    assert ("more: see handle.plan" in lines[-1]) == (count > 1)
