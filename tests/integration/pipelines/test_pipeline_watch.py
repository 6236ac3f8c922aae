"""Where the time of pipelines goes: on DeepSpeed's monitor, in the table at the end, in run.json and on the page."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.reporting.plan_page import plan_page, with_scenario_of_run
from ds_hetero.reporting.run_file import read_run
from ds_hetero.reporting.trace import trace_of
from ds_hetero.values.plans import read_plan
from tests.integration.pipelines.test_pipeline_start import cluster
from tests.integration.pipelines.test_pipelines import (
    adamw,
    batches,
    made_model,
    pipeline,
    plan_of,
    sequence_stage,
    train,
    trained,
)
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

pytestmark = [
    pytest.mark.alone,
    pytest.mark.measured,
]  # it waits in real time for what other work on the cores would delay

PLAN = plan_of(
    pipeline(1, 4, {"ranks": [0], "layers": [0, 3]}, {"ranks": [1], "layers": [3, 4]}),
    pipeline(1, 2, {"ranks": [2], "layers": [0, 4]}),
)


ALONE = plan_of(pipeline(1, 2, sequence_stage([0, 1], [0, 4], [1, 1], [2, 2])))
"""One stage of sequence parallelism, which is a plan of replicas too."""


def watched(rank, folder):
    """What is said while two jobs run, one after the other."""
    import deepspeed

    import ds_hetero
    from ds_hetero.job import monitor as job_monitor

    handle = ds_hetero.register()
    said = []
    job_monitor.announce = lambda text: said[-1].append(text)
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    reports = {"report": folder, "replan": {"report_only": True, "interval_steps": 2}}
    for plan in ({**PLAN, "predicted": {"step_s": 10.0}}, {**ALONE, "predicted": {"step_s": 10.0}}):
        said.append([])
        section = {"schedule": plan, "parallel": "full", "cluster": cluster(4, 3, 2, 1), "seq_len": 32, **reports}
        if plan["pipelines"] == PLAN["pipelines"]:
            section["attention"] = "flash_attn"  # not on CPUs; stages of one rank have nothing to do with it
        model = made_model({}, False)
        config = {"steps_per_print": 2, **(monitor if len(said) == 1 else {}), "heterogeneity": section}
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
        for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            with pytest.raises(ConfigError, match=r"the batch of pipelines is the plan's \(1 x "):
                change(12)
        compute_in(torch.float64)
        train(handle.for_engine(engine), engine, batches(plan, 6, False))
        engine.destroy()
    return said


@pytest.fixture(scope="module")
def watched_folder(tmp_path_factory):
    """What rank 0 says of both jobs, and the folder that they write to."""
    folder = tmp_path_factory.mktemp("watched")
    said, *others = run_deepspeed(watched, 4, str(folder))
    assert others == [[[], []]] * 3
    return said, folder


def test_phases_are_on_the_monitor_and_in_a_table(watched_folder):
    (said, _), folder = watched_folder
    *_, table = said
    assert "Where the time of 4 steps went" in table
    for line in ("0-2", "passes of pipeline 1: predicted", "step: the plan says 10 s, measured"):
        assert line in table
    assert re.search(r"│ +3 +│", table), table  # a stage of one layer
    found = {path.stem.removeprefix("Heterogeneity_"): path for path in Path(folder, "job").glob("*.csv")}
    shares = [last(found[f"rank1_{name}_share"]) for name in ("forward", "backward", "hop", "bubble", "sync", "rest")]
    assert abs(sum(shares) - 1) < 1e-6 and all(share > -1e-6 for share in shares)
    assert last(found["rank3_bubble_share"]) > 0.3
    assert 0 < last(found["pipeline0_predicted_s"]) < 2 * last(found["pipeline0_passes_s"])


def test_a_rank_that_computes_for_longer_than_the_others_is_named(watched_folder):
    (said, _), _ = watched_folder
    assert any("is a straggler" in line and "Moving layers is" in line for line in said)


@pytest.mark.parametrize(("file", "plan"), [("run.json", PLAN), ("run-2.json", ALONE)], ids=["stages", "one stage"])
def test_a_job_of_pipelines_writes_what_it_measured(watched_folder, file, plan):
    _, folder = watched_folder
    run = read_run(folder / file)
    assert run.plan == read_plan(plan) and run.steps == 4 and run.predicted_s == 10 and run.ended == "normally"
    held = set(run.plan.ranks)
    for number, rank in enumerate(run.ranks):
        assert (rank.model_s > 0) == (number in held) and rank.rest_s > 0 and rank.bubble_s >= 0
    length = [24 + 5 * step for step in (2, 3, 4, 5)]
    samples = sum(p["micro_batch_size"] * p["micro_batches"] for p in plan["pipelines"])
    tokens = sum(one["tokens_per_s"] * one["steps"] * one["step_s"] for one in run.observations)
    assert tokens == pytest.approx(samples * sum(length), rel=0.2)  # steps of the ranks are not of one length
    assert {name for name, _, _ in run.trace[0]} >= {"ds_hetero.forward", "ds_hetero.backward", "ds_hetero.step"}
    described = with_scenario_of_run(read_plan(plan), run)
    assert "Measured step" in plan_page(described, run)
    assert any("measured" in json.dumps(event) for event in trace_of(described, run)["traceEvents"])


def last(path):
    with path.open() as file:
        return float(list(csv.reader(file))[-1][1])
