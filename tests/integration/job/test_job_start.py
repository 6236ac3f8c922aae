"""A job that names no schedule: ranks are measured, the schedule is searched for, and training is that of one process.

Budget: 60 s.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, adam, assert_same_parameters, batches, ds_config, llama, parameters
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import ROOT, run_deepspeed

LINK = {"bandwidth_gb_per_s": 1, "latency_us": 20}


def cluster(*tflops: float, memory_gib: float = 8) -> dict[str, Any]:
    """A node of devices with the given speeds."""
    devices = {
        f"speed-{speed:g}": {"peak_tflops": speed, "memory_gib": memory_gib, "memory_bandwidth_gb_per_s": 20 * speed}
        for speed in tflops
    }
    node = {"name": "here", "devices": [f"speed-{speed:g}" for speed in tflops], "link": LINK}
    return {"nodes": [node], "devices": devices}


def test_an_empty_section_measures_plans_and_trains_as_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs, trained = one_process(_train, None, str(tmp_path))
    seen = []
    for start in ("measured now", "as measured before"):
        for our_logs, ours in ranks(_train, 2, {}, str(tmp_path)):
            assert_same_logs(our_logs, logs)
            assert_same_parameters(ours, trained)
        told = capfd.readouterr().out
        assert told.count(f"2 ranks, {start}") == told.count("ds_hetero: the schedule") == 1
        assert told.count("predicted: ") == told.count("bottleneck: ") == 1
        assert told.count("ds_hetero: per step, median of ") == 1
        assert "[rank 1] ds_hetero" not in told
        seen.append([path.name for path in (tmp_path / "ds_hetero").iterdir()])
    assert len(seen[0]) == 1 and seen[0] == seen[1]


def _train(rank: int, section: dict[str, Any] | None, cache: str) -> Any:
    import os

    import ds_hetero
    from ds_hetero.profiler import kernel_probe, machine

    os.environ["XDG_CACHE_HOME"] = cache
    machine.MAX_OTHERS = machine.MAX_SPREAD = float("inf")  # tests run beside others
    kernel_probe.measure_cached = functools.partial(kernel_probe.measure_cached, window_s=0.002)
    ds = None
    if section is not None:
        handle = ds_hetero.register()
        ds = ds_config(2, None, train_micro_batch_size_per_gpu=1, heterogeneity=section)
    trainer = make_trainer(ds, 2, per_device_train_batch_size=1, num_train_epochs=1, num_samples=6)
    trainer.train()
    results = logged(trainer), parameters(trainer.model, 0 if ds is None else 2)
    if section is not None:
        handle.undo()
    return results


def test_a_plan_on_a_cluster_file_gives_the_faster_rank_more_and_is_what_the_job_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    results = run_deepspeed(_train_planned, 4)
    assert all(result == results[0] for result in results)
    told = capfd.readouterr().out
    assert told.count("ds_hetero: the schedule") == 2  # of each engine; two replicas alike are told of once
    assert told.count("replica 0, 1: ") == 1


def _train_planned(rank: int) -> Any:
    import deepspeed

    import ds_hetero
    from ds_hetero.decision.facts import workload_of

    handle = ds_hetero.register()
    whole = batches(3)
    found: list[Any] = []
    for number, size in enumerate((4, 2)):  # one replica of all ranks, then two of two ranks
        model = llama()
        if number:
            model.activation_checkpointing_enable()
        section = {"cluster": cluster(0.004, 0.001, 0.004, 0.001), "seq_len": 8192}
        config = ds_config(1, None, sequence_parallel_size=size, heterogeneity=section, gradient_accumulation_steps=3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        tokens = handle.schedule.tokens(8192)
        assert len(tokens) == size and sum(tokens.values()) == 8192
        fast, slow = [tokens[r] for r in tokens if r % 2 == 0], [tokens[r] for r in tokens if r % 2]
        assert min(fast) > 2 * max(slow)
        trained = handle.registry.find(model)
        assert trained.kernel is None
        found.append(handle.schedule.shifted(0).to_json())
        workload = workload_of(trained.start.facts, 4 // size, on_host=False)
        assert (workload.zero_stage, workload.micro_batch, workload.micro_batches, workload.data_parallel) == (
            1,
            2,
            3,
            4 // size,
        )
        assert (workload.seq_len, workload.element_bytes, workload.gradient_bytes) == (8192, 4, 4)
        assert workload.causal and workload.activation_checkpointing == bool(number)
        for batch in handle.dataloader(whole):
            engine.backward(handle.loss(engine(**batch), batch))
            engine.step()
        engine.destroy()
    return found


@pytest.mark.slow  # a launcher and its ranks import everything from nothing
def test_a_script_that_just_ends_gets_the_comparison_with_the_prediction(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """accelerate, with a schedule file and a cluster."""
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["heterogeneity"] |= {"cluster": cluster(4, 3, 2, 1), "seq_len": 512}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    run_deepspeed(_run_script_to_its_end, 4, str(path), env={"ACCELERATE_USE_CPU": "false"})
    told = capfd.readouterr().out
    assert told.count("ds_hetero: the schedule") == told.count("bottleneck: ") == 1 and "speed-4" in told
    assert told.count("ds_hetero: per step, median of 2: predicted ") == 1
    assert told.count("ds_hetero: on, 4 ranks, schedule given inline: groups 2, heads 8+2 | 6+4, tokens 4:1 | 3:2") == 1


def _run_script_to_its_end(rank: int, config: str) -> None:
    import atexit

    sys.argv = ["accelerate_loop.py", "--ds-config", config, "--steps", "4", "--tokens", "256"]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "accelerate_loop.py"), run_name="__main__")
    atexit._run_exitfuncs()  # the ranks of these tests end without


def test_a_job_says_in_one_line_that_it_is_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Also with a schedule that nothing is predicted of, and once although every rank prepares the model."""
    run_deepspeed(_prepare, 2)
    text = capfd.readouterr().out
    assert text.count("ds_hetero: ") == 1
    assert "ds_hetero: on, 2 ranks, schedule given inline: groups 2, heads 4 | 4, tokens 3 | 1\n" in text


def _prepare(rank: int) -> None:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    model = llama()
    deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(1, UNEVEN_2))


def test_what_cannot_be_planned_is_refused_alike_on_every_rank() -> None:
    told = run_deepspeed(_collect_errors, 2)
    assert told[0] == told[1]
    memory, layers, mismatch, unknown = told[0]
    assert memory[0] == "PlanError" and "GiB too much" in memory[1] and '"heterogeneity.seq_len"' in memory[1]
    assert layers[0] == "ModelError" and "hrm_text cannot be planned" in layers[1] and '"proportional"' in layers[1]
    assert mismatch[0] == "ConfigError" and "describes 3 devices, the job has 2 processes" in mismatch[1]
    assert unknown[0] == "ClusterError" and "'H1000' is not known" in unknown[1]


def _collect_errors(rank: int) -> list[tuple[str, str]]:
    import deepspeed
    from transformers import HrmTextConfig, HrmTextForCausalLM

    import ds_hetero
    from ds_hetero.errors import HeteroError

    ds_hetero.register()
    sizes = {name: getattr(llama().config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    in_cycles = HrmTextForCausalLM(HrmTextConfig(**sizes, num_layers_per_stack=1, num_attention_heads=4, head_dim=8))
    told = []
    for model, described in (
        (llama(), cluster(2, 1, memory_gib=0.0001)),
        (in_cycles, cluster(2, 1)),
        (llama(), cluster(2, 1, 1)),
        (llama(), {"nodes": [{"name": "a", "device": "H1000", "count": 2}]}),
    ):
        config = ds_config(1, None, heterogeneity={"cluster": described})
        with pytest.raises(HeteroError) as caught:
            deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        told.append((type(caught.value).__name__, str(caught.value)))
    return told
