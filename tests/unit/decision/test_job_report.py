"""What a job says of itself: the line that it is on, and the prediction."""

from __future__ import annotations

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.cost import Workload
from ds_hetero.decision.forecast import forecast
from ds_hetero.decision.start_text import forecast_text
from ds_hetero.job.start import plan_text
from ds_hetero.models import load_model
from ds_hetero.values.baselines import ring, ulysses
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.section import HeterogeneitySection

UNEVEN = Schedule(
    num_heads=8,
    num_kv_heads=4,
    groups=(Group(ranks=(0, 1), tokens=(4, 1), heads=(6, 2)), Group(ranks=(2, 3), tokens=(3, 2), heads=(5, 3))),
)
SHAPE = "groups 2, heads 6+2 | 5+3, tokens 4:1 | 3:2"


@pytest.mark.parametrize(
    ("schedules", "source", "text"),
    [
        ([UNEVEN], "files/four_ranks.json", f"4 ranks, schedule four_ranks.json: {SHAPE}"),
        ([UNEVEN, UNEVEN.shifted(4)], {}, f"8 ranks, 2 replicas, schedule given inline: {SHAPE}"),
        ([ulysses(1, 8, 4)], "ulysses", "1 rank, schedule ulysses: groups 1, heads 8, tokens 1"),
        (
            [UNEVEN, ring(1, 8, 4).shifted(4)],
            "replicas.json",
            f"5 ranks, 2 replicas, schedule replicas.json: replica 0: {SHAPE}; replica 1: groups 1, heads 8, tokens 1",
        ),
        (
            [ring(10, 8, 4)],
            "ring",
            "10 ranks, schedule ring: groups 10, heads 8 | 8 | 8 | 8 | 8 | 8 | 8 | 8 | 2 more, "
            "tokens 1 | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 2 more",
        ),
    ],
    ids=["file", "alike", "one rank", "different", "long"],
)
def test_one_line_names_the_schedule_and_its_shape(schedules, source, text):
    plan = Plan.of_replicas(schedules)
    assert plan_text(plan, HeterogeneitySection(schedule=source)) == text


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ((6, 2), "2 ranks, whole samples by rank: 6 | 2 in a micro-batch"),
        ((3,), "1 rank, whole samples by rank: 3 in a micro-batch"),
        (
            tuple(range(1, 11)),
            "10 ranks, whole samples by rank: 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 2 more in a micro-batch",
        ),
    ],
)
def test_one_line_names_the_samples_of_every_rank_where_no_sequence_is_split(samples, text):
    """And not the groups, heads and tokens of schedules of one rank each, which nobody has asked for."""
    schedules = [ulysses(1, 1, 1).shifted(rank) for rank in range(len(samples))]
    plan = Plan.of_replicas(schedules, BatchSplit(micro_batch_sizes=samples, micro_batches=(1,) * len(samples)))
    assert plan_text(plan, HeterogeneitySection(batch=list(samples))) == text


def test_a_prediction_says_that_the_time_of_offloading_is_not_in_it():
    cluster, model = load_cluster("hexiseq-setting-1"), load_model("gpt-7b")

    def text(**offload):
        schedule = ring(cluster.num_ranks, model.num_heads, model.num_kv_heads)
        return forecast_text([forecast(schedule, cluster, model, Workload(seq_len=8192, **offload))])

    assert "not in it" not in text()
    assert text(offload_optimizer=True).endswith("what it computes there, for the optimizer state")
    assert text(offload_optimizer=True, offload_parameters=True).endswith("the optimizer state and the parameters")
