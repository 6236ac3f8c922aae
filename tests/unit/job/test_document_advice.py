"""Batches of several documents that nobody asked to place: when they are, and that what would be saved is said once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.step_errors import UNMEASURED_ERROR
from ds_hetero.cost import Workload
from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.forecast import forecast
from ds_hetero.job.document_advice import DocumentAdvice
from ds_hetero.job.documents import agree_on_placer
from ds_hetero.job.start import World
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.documents.summary import documents_of, report_documents
from ds_hetero.runtime.attention.batch_layout import BatchLayout, batch_layout
from ds_hetero.values.baselines import proportional
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.section import HeterogeneitySection

LENGTH = 32_768
LENGTHS = (16_000, 6_000, 4_000, 3_000, 2_000, 1_768)
MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=1024,
    vocab_size=100,
)
CLUSTER = cluster_from_dict(
    {
        "nodes": [
            {"name": "here", "devices": ["4", "3", "2", "1"], "link": {"bandwidth_gb_per_s": 10, "latency_us": 10}}
        ],
        "devices": {
            str(speed): {"peak_tflops": speed, "memory_gib": 24, "memory_bandwidth_gb_per_s": 100 * speed}
            for speed in (4, 3, 2, 1)
        },
    }
)
SCHEDULE = proportional([4, 3, 2, 1], 8, 2)
FORECAST = forecast(SCHEDULE, CLUSTER, MODEL, Workload(seq_len=LENGTH))


def stream(*lengths: int) -> BatchLayout:
    return batch_layout(stream_placement(SCHEDULE, LENGTH), (Rows(0, 1, documents_of(lengths, LENGTH)),))


def test_it_says_once_what_the_planner_predicts(capsys):
    report = report_documents(FORECAST.cost, FORECAST.schedule, LENGTHS)
    advice = DocumentAdvice(HeterogeneitySection(), [FORECAST])
    advice.record_batch(stream(LENGTH))  # one document
    with torch.no_grad():
        advice.record_batch(stream(*LENGTHS))
    assert not capsys.readouterr().err
    advice.record_batch(stream(*LENGTHS))
    advice.record_batch(stream(*LENGTHS))
    told = capsys.readouterr().err
    saved = 1 - report.loads.predicted_s / report.others_s["stream"]
    assert saved > 0.1
    assert told.count("a batch of 6 documents") == 1 and f"take {saved:.0%} less time" in told


@pytest.mark.parametrize(
    ("written", "forecasts"),
    [({"placement": "stream"}, [FORECAST]), ({"placement": "documents"}, [FORECAST]), ({}, [])],
)
def test_it_is_silent_where_it_was_decided_or_nothing_is_known(capsys, written, forecasts):
    advice = DocumentAdvice(HeterogeneitySection.model_validate(written), forecasts)
    advice.record_batch(stream(*LENGTHS))
    assert not capsys.readouterr().err


def test_it_is_silent_once_a_batch_was_placed_by_its_documents(capsys):
    advice, documents = DocumentAdvice(HeterogeneitySection(), [FORECAST]), documents_of(LENGTHS, LENGTH)
    advice.record_batch(
        batch_layout(report_documents(FORECAST.cost, SCHEDULE, LENGTHS).placement, (Rows(0, 1, documents),))
    )
    advice.record_batch(stream(*LENGTHS))
    assert not capsys.readouterr().err


def test_it_is_silent_where_little_would_be_saved(capsys):
    advice = DocumentAdvice(HeterogeneitySection(), [FORECAST])
    advice.record_batch(stream(LENGTH - 16, 16))
    assert not capsys.readouterr().err


# --- what a job gets that says nothing of its placement -----------------------------------------------


def start_of(section, forecasts=(FORECAST,)):
    """As much of a job's start as decides about documents."""
    return SimpleNamespace(section=HeterogeneitySection.model_validate(section), forecasts=forecasts)


def test_documents_are_placed_by_default_with_the_error_of_the_devices_and_memory_to_spare():
    """Nobody has measured the devices: a gain has to be 64 %, and units get 55 % of the tokens that fit."""
    placer = agree_on_placer(World(0, 1), start_of({}), 0)
    asked = agree_on_placer(World(0, 1), start_of({"placement": "documents"}), 0)
    assert FORECAST.prediction.error == UNMEASURED_ERROR == 0.45
    assert placer.least_gain == pytest.approx(0.6364, abs=1e-4)
    assert asked.least_gain is None
    assert placer.costs.most_tokens == tuple(int(most * 0.55) for most in asked.costs.most_tokens)
    assert placer.costs.step_s == asked.costs.step_s > 0


@pytest.mark.parametrize(
    ("section", "forecasts"),
    [({}, ()), ({"replan": {"enabled": True}}, (FORECAST,))],
    ids=["devices are not known", "the schedule may change"],
)
def test_batches_are_cut_by_their_length_by_default_where(section, forecasts):
    facts = start_of(section)
    assert not JobStart(facts=facts, plan=None, is_predicted=bool(forecasts)).places_by_default
    assert JobStart(facts=start_of({}), plan=None, is_predicted=True).places_by_default
