"""Whether a machine that waits to join an elastic job pays, as the planner has it."""

from types import SimpleNamespace

import pytest

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import Workload
from ds_hetero.decision.forecast import forecast
from ds_hetero.job.join_gain import MIN_JOIN_GAIN, predicted_join_gain
from ds_hetero.models import load_model
from ds_hetero.planner.planning import plan


def _start(gpus, network, seq_len=32768):
    cluster = cluster_from_dict(read_notation(gpus, network).content)
    model, work = load_model("llama-3.2-1b"), Workload(seq_len=seq_len, zero_stage=1)
    planned = plan(cluster, model, work)
    return SimpleNamespace(
        forecasts=(forecast(planned.schedule, cluster, model, work, planned),), is_of_pipelines=False
    )


@pytest.mark.parametrize(
    ("network", "cards", "seq_len", "pays"),
    [
        ("200Gbit/s", {"new": ["NVIDIA GeForce RTX 4090"]}, 65536, True),
        ("200Gbit/s", {"new": ["NVIDIA GeForce RTX 4090"], "other": ["RTX 3090", "RTX 3090"]}, 65536, True),
        ("0.05", {"new": ["RTX 3090"]}, 2048, False),  # whose exchange takes longer than its help saves
        ("25", {"new": ["NVIDIA GeForce RTX 3060"]}, 65536, False),  # whose memory is too small for an equal share
    ],
)
def test_machines_pay_where_steps_become_shorter(network, cards, seq_len, pays):
    gain = predicted_join_gain(_start("4090 | 4090", network, seq_len), cards)
    assert gain is not None and (gain >= MIN_JOIN_GAIN) == pays, gain


@pytest.mark.parametrize(
    ("gpus", "network", "cards"),
    [
        ("4090 | 4090", "25", {"new": ["a card that nobody knows"]}),
        ("4090x2", None, {"new": ["RTX 4090"]}),  # nothing is known of the network
    ],
)
def test_what_the_planner_does_not_know_is_not_judged(gpus, network, cards):
    assert predicted_join_gain(_start(gpus, network), cards) is None


def test_a_job_without_a_forecast_is_not_judged():
    assert predicted_join_gain(SimpleNamespace(forecasts=(), is_of_pipelines=False), {"new": ["RTX 4090"]}) is None
