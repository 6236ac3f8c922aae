"""What ``ds-hetero doctor`` says of a configuration is what the start of a job raises, word for word.

Budget: 40 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, UNEVEN_4, adam, ds_config, llama
from tests.support import run_deepspeed

REPLICAS = {
    "version": 1,
    "replicas": [
        {
            "schedule": {**UNEVEN_2, "groups": [{"ranks": [rank], "tokens": [1], "heads": [4]}]},
            "micro_batch_size": 1 + rank,
            "micro_batches": 1,
        }
        for rank in (0, 1)
    ],
}
CLUSTER = {"nodes": [{"name": "n", "device": "L4", "count": 3, "link": {"bandwidth_gb_per_s": 8, "latency_us": 9}}]}
UNEVEN = {"schedule": UNEVEN_2}


def pipelines(*ranks: int) -> dict[str, Any]:
    """A plan of version 2: one pipeline, the first of two layers on all ranks but the last one."""
    first = {"ranks": list(ranks[:-1]), "layers": [0, 1], "inner": "tensor" if len(ranks) > 2 else "one"}
    stages = [first, {"ranks": [ranks[-1]], "layers": [1, 2]}]
    model = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return {"version": 2, "model": model, "pipelines": [{"micro_batch_size": 1, "micro_batches": 3, "stages": stages}]}


SMALL = {
    "nodes": [{"name": "n", "device": "s", "count": 2, "link": {"bandwidth_gb_per_s": 8, "latency_us": 9}}],
    "devices": {"s": {"peak_tflops": 1, "memory_gib": 1e-4, "memory_bandwidth_gb_per_s": 10}},
}
FULL = {"parallel": "full", "seq_len": 32, "cluster": SMALL}
THREE = {"train_micro_batch_size_per_gpu": 3}

# The configuration beside that of `ds_config`, changes to the model, and a part of the message.
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "misspelled section": ({"heterogenity": {}}, {}, 'did you mean "heterogeneity"?'),
    "no object": ({"heterogeneity": 3}, {}, "must be an object"),
    "report folder": ({"heterogeneity": {**UNEVEN, "report": "/proc/nowhere"}}, {}, "cannot be written to"),
    "unknown key": ({"heterogeneity": {"schedul": "ring"}}, {}, 'did you mean "schedule"?'),
    "auto": ({"heterogeneity": {"layout": "auto"}}, {}, "accelerate refuses"),
    "wrong value": ({"heterogeneity": {**UNEVEN, "layout": "zig"}}, {}, '"heterogeneity.layout": "zig"'),
    "no file": ({"heterogeneity": {"schedule": "nowhere.json"}}, {}, '"nowhere.json" is neither a file nor a strategy'),
    "other heads": ({"heterogeneity": UNEVEN}, {"num_attention_heads": 8}, "the model has 8 and 2"),
    "other world": ({"heterogeneity": {"schedule": UNEVEN_4}}, {}, "the job has 2"),
    "other size": ({"heterogeneity": UNEVEN, "sequence_parallel_size": 1}, {}, "size of ds_config is 1"),
    "indivisible": ({"heterogeneity": {}, "sequence_parallel_size": 3}, {}, "cannot be divided into replicas of 3"),
    "no size": ({"heterogeneity": UNEVEN, "sequence_parallel_size": 0.5}, {}, "must be a whole number"),
    "other cluster": ({"heterogeneity": {"cluster": CLUSTER, "schedule": "plan"}}, {}, "describes 3 devices"),
    "no cluster": ({"heterogeneity": {"cluster": "nowhere"}}, {}, "cannot read cluster 'nowhere'"),
    "tensor parallelism": ({"heterogeneity": UNEVEN, "tensor_parallel": {"autotp_size": 2}}, {}, "cannot be used here"),
    "kernel": (
        {"heterogeneity": {**UNEVEN, "attention": "flash_attn"}, "bf16": {"enabled": True}},
        {},
        '"flash_attn" does not work here: flash-attn runs on CUDA devices',
    ),
    "dropout": ({"heterogeneity": UNEVEN}, {"attention_dropout": 0.1}, "dropout inside attention is not supported"),
    "pipelines on more ranks": ({"heterogeneity": {"schedule": pipelines(0, 1, 2)}}, {}, "ranks up to 2"),
    "batch of pipelines": ({"heterogeneity": {"schedule": pipelines(0, 1)}}, {}, "take 3 sequences per optimizer step"),
    "heads of pipelines": (
        {"heterogeneity": {"schedule": pipelines(0, 1)}, **THREE},
        {"num_attention_heads": 8},
        "the plan is for a model of 2 layers, 4 heads",
    ),
    "layout of pipelines": ({"heterogeneity": {"schedule": pipelines(0, 1), "layout": "zigzag"}}, {}, "the plan give"),
    "full parallelism by name": ({"heterogeneity": {**FULL, "schedule": "ring"}}, {}, "searches for pipelines"),
    "full parallelism, batch": ({"heterogeneity": FULL, "gradient_accumulation_steps": 2}, {}, "whole optimizer step"),
    "batch of replicas": (
        {"heterogeneity": {"schedule": REPLICAS}, "train_batch_size": 7},
        {},
        "train_batch_size is 7",
    ),
}
WEIGHTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other number of weights": ({"zero_partition": [1, 2, 3]}, {}, "lists 3 weights"),
    "no ZeRO": ({"zero_partition": [1, 2]}, {"zero_optimization": {"stage": 0}}, "needs ZeRO, but"),
    "Muon": (
        {"zero_partition": [1, 2]},
        {"optimizer": {"type": "Muon"}},
        "this optimizer was never compared",
    ),
    "rank without weight": ({"zero_partition": [0, 2]}, {"zero_optimization": {"stage": 3}}, "rank 0 a weight of 0"),
}
REFUSALS |= {
    name: ({"heterogeneity": {**UNEVEN, **section}, **config}, {}, text)
    for name, (section, config, text) in WEIGHTED.items()
}


@pytest.fixture(scope="module")
def raised() -> list[dict[str, str]]:
    """What the start of the job raises, by rank and name."""
    return run_deepspeed(_start_all, 2)


def _config(name: str) -> dict[str, Any]:
    config = {**ds_config(1, None), **REFUSALS[name][0]}
    if name == "batch of replicas":
        del config["train_micro_batch_size_per_gpu"]
    return config


def _start_all(rank: int) -> dict[str, str]:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    messages = {}
    for name, (_, changes, _) in REFUSALS.items():
        model = llama(**changes)
        optimizer = None if name == "Muon" else adam(model)
        with pytest.raises(ds_hetero.HeteroError) as caught:
            deepspeed.initialize(model=model, optimizer=optimizer, config=_config(name))
        messages[name] = str(caught.value)
    return messages


@pytest.mark.parametrize("name", REFUSALS)
def test_doctor_says_what_the_start_of_a_job_raises(name: str, raised: list[dict[str, str]], tmp_path: Path) -> None:
    from ds_hetero.cli.installed.doctor import examine, model_facts, model_of

    source, config = tmp_path / "config.json", tmp_path / "ds_config.json"
    source.write_text(llama(**REFUSALS[name][1]).config.to_json_string(use_diff=False))
    config.write_text(json.dumps(_config(name)))
    model = model_of(str(source))
    assert model is not None
    facts = model_facts(str(source), model, num_heads=1, num_kv_heads=1, seq_len=None, checkpointing=False)
    report = examine(config, facts, 2, model)
    assert not report["healthy"]
    assert REFUSALS[name][2] in report["section"]["problem"]
    assert [report["section"]["problem"]] * 2 == [of_rank[name] for of_rank in raised]
