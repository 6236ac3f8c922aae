"""Where the time of pipelines goes, on DeepSpeed's monitor and in the table at the end."""

import csv
from pathlib import Path

import torch

from tests.integration.test_pipelines import adamw, batches, made_model, pipeline, plan_of, train, trained
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

PLAN = plan_of(
    pipeline(1, 4, {"ranks": [0], "layers": [0, 3]}, {"ranks": [1], "layers": [3, 4]}),
    pipeline(1, 2, {"ranks": [2], "layers": [0, 4]}),
)


def watched(rank, folder):
    import deepspeed

    import ds_hetero
    from ds_hetero.job import pipeline_monitor

    told = []
    pipeline_monitor.announce = told.append
    handle = ds_hetero.register()
    model = made_model({}, False)
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    plan = {**PLAN, "predicted": {"step_s": 10.0}}
    config = {"steps_per_print": 2, **monitor, "heterogeneity": {"schedule": plan}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    compute_in(torch.float64)
    train(handle.for_engine(engine), engine, batches(plan, 6, False))
    engine.destroy()
    return told


def test_phases_are_on_the_monitor_and_in_a_table(tmp_path):
    told = run_deepspeed(watched, 4, str(tmp_path))
    assert [len(texts) for texts in told] == [1, 0, 0, 0]
    (table,) = told[0]
    assert "Where the time of 4 steps went" in table
    for line in ("0-2", "3-3", "passes of pipeline 1: predicted", "step: the plan says 10 s, measured"):
        assert line in table
    found = {path.stem.removeprefix("Heterogeneity_"): path for path in Path(tmp_path, "job").glob("*.csv")}
    shares = [last(found[f"rank1_{name}_share"]) for name in ("forward", "backward", "hop", "bubble", "sync", "rest")]
    assert abs(sum(shares) - 1) < 1e-6 and all(share > -1e-6 for share in shares)
    assert last(found["rank3_bubble_share"]) > 0.3
    assert 0 < last(found["pipeline0_predicted_s"]) < 2 * last(found["pipeline0_passes_s"])


def last(path):
    with path.open() as file:
        return float(list(csv.reader(file))[-1][1])
