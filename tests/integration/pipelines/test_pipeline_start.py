"""``"parallel": "full"``: the pipelines of a job are searched for when it starts, and what is wrong is said by name."""

import argparse
import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from tests.integration.pipelines.test_pipelines import ALONE, adamw, batches, made_model, train_alone, trained
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

LINK = {"bandwidth_gb_per_s": 0.1, "latency_us": 100}


def cluster(*speeds, memory_gib=4.0):
    """One node of CPU-like devices of unequal speeds."""
    names = [f"cpu-{speed}" for speed in speeds]
    nodes = [
        {"name": f"n{i}", "device": name, "count": 1, "link": LINK, "network_port": None}
        for i, name in enumerate(names)
    ]
    for node in nodes:
        del node["network_port"]
    devices = {
        name: {"peak_tflops": 0.01 * speed, "memory_gib": memory_gib, "memory_bandwidth_gb_per_s": 10}
        for name, speed in zip(names, speeds, strict=True)
    }
    return {"nodes": nodes, "network": LINK, "devices": devices}


def section(**changes):
    return {"parallel": "full", "cluster": cluster(4, 3, 2), "seq_len": 32, **changes}


def searches_and_trains(rank, folder, given):
    """Differences from one process, the plan of this rank, and the plan of a second job that is given the kept file."""
    import deepspeed

    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    results = []
    for written in (given, None):
        if written is None:
            (path,) = Path(folder, "ds_hetero", "plans").glob("*.json")
            written = {**given, "schedule": str(path)}
        model, whole = (made_model({}, False) for _ in range(2))
        said = io.StringIO()
        config = {"train_batch_size": 8, "gradient_clipping": 0.5, "heterogeneity": written}
        args = argparse.Namespace(deepspeed_config=config)  # as of the command line
        how = {"config": config} if written is given else {"args": args}
        with contextlib.redirect_stderr(said):
            engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), **how)
        of_engine = handle.for_engine(engine)
        plan = of_engine.plan
        steps = batches(plan.to_dict(), 3, False)
        losses, norms = train_alone(whole, steps, adamw(trained(whole)), 0.5)
        worst = 0.0
        for batch, loss, norm in zip(of_engine.dataloader(steps), losses, norms, strict=True):
            ours = engine(**batch).loss
            engine.backward(ours)
            engine.step()
            worst = max(worst, abs(ours.item() - loss), abs(engine.get_global_grad_norm() - norm))
        results.append((worst, plan.to_dict(), plan.fingerprint, said.getvalue()))
        engine.destroy()
    return results


def test_a_job_searches_for_its_pipelines_and_trains_as_one_process(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    outcomes = run_deepspeed(searches_and_trains, 3, str(tmp_path), section(), env=env)
    searched, again = outcomes[0]
    assert all(of_rank[0][1:3] == searched[1:3] for of_rank in outcomes)
    assert max(job[0] for of_rank in outcomes for job in of_rank) < 1e-12
    assert searched[2] == again[2]
    assert sum(p["micro_batch_size"] * p["micro_batches"] for p in searched[1]["pipelines"]) == 8
    assert all(part in searched[3] for part in ("pipeline", "predicted:", "memory:", "gain:", str(tmp_path)))
    assert "pipeline" in again[3] and "gain:" not in again[3]


def is_refused(rank, jobs):
    """What `deepspeed.initialize` says of every job, as (model, section, further configuration)."""
    import deepspeed
    from transformers import BertConfig, BertLMHeadModel

    import ds_hetero
    from ds_hetero.errors import HeteroError

    ds_hetero.register()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    models = {
        "llama": lambda: made_model({}, False).float(),
        "bert": lambda: BertLMHeadModel(BertConfig(vocab_size=64, is_decoder=True, **small)),
    }
    said = []
    for name, written, more in jobs:
        with pytest.raises(HeteroError) as caught:
            deepspeed.initialize(
                model=models[name](),
                config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "heterogeneity": written, **more},
            )
        said.append(str(caught.value))
    return said


def test_what_cannot_be_searched_for_is_refused_by_name_on_every_rank():
    batch = {"train_batch_size": 8}
    jobs = {
        "train_batch_size": ("llama", section(), {}),
        "gradient_accumulation_steps": ("llama", section(), {**batch, "gradient_accumulation_steps": 2}),
        "are one worker": ("llama", section(), {**batch, "train_micro_batch_size_per_gpu": 4}),
        "BertLMHeadModel cannot be cut": ("bert", section(), batch),
        "describes 2 devices, the job has 3": ("llama", section(cluster=cluster(1, 2)), batch),
        "GiB": ("llama", section(cluster=cluster(4, 3, 2, memory_gib=1e-4)), batch),
        '"schedule" is "ring"': ("llama", section(schedule="ring"), batch),
        '"heterogeneity.layout"': ("llama", section(layout="zigzag"), batch),
        '"heterogeneity.verify": "always"': ("llama", section(schedule=ALONE, verify="always"), batch),
        "with pipelines it is 1": ("llama", section(schedule=ALONE), {**batch, "gradient_accumulation_steps": 2}),
        '"heterogeneity.placement.mode": "documents"': ("llama", section(placement="documents"), batch),
    }
    outcomes = run_deepspeed(is_refused, 3, list(jobs.values()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for expected, text in zip(jobs, outcomes[0], strict=True):
        assert expected in text, text


def measures_and_plans(rank):
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = made_model({}, False).float()
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "heterogeneity": {"parallel": "full", "seq_len": 32},
        },
    )
    (batch,) = handle.for_engine(engine).dataloader([{name: e[:4] for name, e in batches(PLAN, 1, False)[0].items()}])
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return handle.plan.fingerprint, loss.item()


PLAN = {"pipelines": [{"micro_batch_size": 4, "micro_batches": 1}]}


@pytest.mark.slow
def test_pipelines_are_searched_for_on_measured_ranks(tmp_path):
    outcomes = run_deepspeed(measures_and_plans, 2, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert outcomes[0] == outcomes[1]
    (path,) = Path(tmp_path, "ds_hetero", "plans").glob("*.json")
    assert json.loads(path.read_text())["predicted"]["step_s"] > 0
