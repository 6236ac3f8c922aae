"""Prediction beside measurement: which steps are compared, and with what."""

from __future__ import annotations

import logging

import pytest
import torch

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.common.announce import announce
from ds_hetero.cost import Workload
from ds_hetero.decision.forecast import forecast
from ds_hetero.job.prediction_check import Comparison, PredictionCheck
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.values.baselines import ring, ulysses
from ds_hetero.values.placement import Rows, stream_placement

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=128,
    vocab_size=100,
)
LINK = {"bandwidth_gb_per_s": 1, "latency_us": 10}
CLUSTER = cluster_from_dict(
    {
        "nodes": [{"name": "a", "device": "d", "count": 2, "link": LINK}],
        "devices": {"d": {"peak_tflops": 1, "memory_gib": 8, "memory_bandwidth_gb_per_s": 100}},
    }
)
SCHEDULE = ring(2, 4, 2)


def check_of(num_replicas: int = 1) -> PredictionCheck:
    schedules = [SCHEDULE.shifted(2 * i) for i in range(num_replicas)]
    return PredictionCheck([forecast(schedule, CLUSTER, MODEL, Workload(seq_len=1024)) for schedule in schedules])


def step(check: PredictionCheck, now_s: float, *lengths: int, schedule=SCHEDULE) -> None:
    for length in lengths:
        check.record_batch(batch_layout(stream_placement(schedule, length), (Rows(0, 1, ((0, length),)),)))
    check.record_step(now_s)


def test_every_step_is_predicted_for_its_own_batches():
    check, (forecast, *_) = check_of(2), check_of().forecasts
    for number, length in enumerate((64, 64, 256, 512, 1024)):
        step(check, 10.0 * number, length, length)
    expected = [forecast.iteration_s(SCHEDULE, length, 1, 2) for length in (256, 512, 1024)]
    assert check.compare() == Comparison(steps=3, predicted_s=expected[1], measured_s=10.0)


def test_the_first_steps_do_not_count_if_there_are_others():
    check = check_of()
    step(check, 0.0, 64)
    assert check.compare() is None
    step(check, 50.0, 64)
    assert check.compare().measured_s == 50.0
    step(check, 53.0, 64)
    assert (check.compare().steps, check.compare().measured_s) == (1, 3.0)


def test_a_schedule_that_changes_in_between_is_predicted_as_it_was():
    check, other = check_of(), ulysses(2, 4, 2)
    step(check, 0.0, 512)
    step(check, 1.0, 512)
    step(check, 2.0, 512, schedule=other)
    assert check.compare().predicted_s == pytest.approx(check.forecasts[0].iteration_s(other, 512, 1, 1))


def test_forwards_without_gradients_are_no_part_of_a_step():
    check = check_of()
    for now_s in range(3):
        with torch.no_grad():
            check.record_batch(batch_layout(stream_placement(SCHEDULE, 64), (Rows(0, 1, ((0, 64),)),)))
        step(check, float(now_s), 1024)
    assert check.compare().predicted_s == pytest.approx(check.forecasts[0].iteration_s(SCHEDULE, 1024, 1, 1))


def test_the_comparison_is_announced_once(capsys):
    check = check_of()
    for now_s in range(4):
        step(check, float(now_s), 512)
    check.report()
    check.report()
    told = capsys.readouterr().err
    assert told.count("ds_hetero: per step, median of 2: predicted ") == 1 and "measured 1 s" in told


def test_nothing_is_announced_without_a_prediction(capsys):
    empty = PredictionCheck(())
    step(empty, 0.0, 64)
    step(empty, 1.0, 64)
    empty.report()
    assert empty.compare() is None and not capsys.readouterr().err


def test_scripts_that_log_get_a_record_in_place_of_stderr(caplog, capsys):
    with caplog.at_level(logging.INFO):
        announce("chosen")
    assert "chosen" in caplog.text and not capsys.readouterr().err
