"""Replicas of 3 and 1 ranks, each with its own micro-batches, train as one process on the same global batch.

Budget: 60 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.tiny import (
    CLIP,
    LENGTH,
    adam,
    assert_same_parameters,
    collate,
    ds_config,
    llama,
    mean_over_ranks,
    parameters,
    samples,
    train_on_one_process,
)
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed

# Two groups over three ranks, of which rank 2 computes no head, and a fourth rank alone.
THREE = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0, 2], "tokens": [3, 1], "heads": [4, 0]}, {"ranks": [1], "tokens": [2], "heads": [4]}],
}
ALONE = {"version": 1, "num_heads": 4, "num_kv_heads": 2, "groups": [{"ranks": [3], "tokens": [1], "heads": [4]}]}
REPLICAS = {
    "version": 1,
    "replicas": [
        {"schedule": THREE, "micro_batch_size": 2, "micro_batches": 3},
        {"schedule": ALONE, "micro_batch_size": 1, "micro_batches": 2},
    ],
}
LINK = {"bandwidth_gb_per_s": 300, "latency_us": 5}
CLUSTER = {"nodes": [{"name": "n", "device": "A100-SXM-80GB", "count": 4, "link": LINK}]}
# The same global batch the other way round: rank 0 alone.
OTHER_REPLICAS = {
    "version": 1,
    "replicas": [
        {"schedule": {**ALONE, "groups": [{"ranks": [0], "tokens": [1], "heads": [4]}]}},
        {"schedule": {**ALONE, "groups": [{"ranks": [1, 2, 3], "tokens": [1, 2, 1], "heads": [2, 1, 1]}]}},
    ],
}
for _replica, _size, _count in zip(OTHER_REPLICAS["replicas"], (4, 1), (1, 4), strict=True):
    _replica |= {"micro_batch_size": _size, "micro_batches": _count}
GLOBAL_BATCH, MICRO_STEPS = 8, 3
NUM_SAMPLES = 37  # the fifth step of an epoch has five samples
EPOCHS = 2


def data() -> list[dict[str, torch.Tensor]]:
    """Samples of which those of one micro-batch, and those of all of a replica's in one step, have no label."""
    rows = samples(NUM_SAMPLES)
    for i in (2, 3, 14, 15):
        rows[i]["labels"] = torch.full_like(rows[i]["labels"], -100)
    return rows


def config(stage: int, **more: Any) -> dict[str, Any]:
    """With the batch sizes given, if any; they follow from the replicas."""
    made = ds_config(stage, REPLICAS)
    del made["train_micro_batch_size_per_gpu"]
    return {**made, **more}


@pytest.fixture(scope="module")
def plain_loop_of_one_process() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and trained parameters."""
    model = llama()
    rows = data()
    steps = [[collate(rows[i : i + GLOBAL_BATCH])] for i in range(0, NUM_SAMPLES, GLOBAL_BATCH)] * EPOCHS
    assert len(steps) == 10
    losses, norms = train_on_one_process(model, steps)
    return losses, norms, parameters(model)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
def test_a_plain_loop_equals_one_process(stage: int, plain_loop_of_one_process: Any) -> None:
    losses, norms, expected = plain_loop_of_one_process
    for our_losses, our_norms, trained in run_deepspeed(_plain_loop, 4, stage):
        np.testing.assert_allclose(our_losses, losses, rtol=1e-5)
        if stage:
            np.testing.assert_allclose(our_norms, norms, rtol=1e-5)
        assert_same_parameters(trained, expected)


def _plain_loop(rank: int, stage: int) -> Any:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    ds = config(stage)
    if stage == 1:
        ds["heterogeneity"] |= {"zero_partition": [3, 1, 2, 1]}
    if stage == 2:
        ds["heterogeneity"] |= {"cluster": CLUSTER, "seq_len": LENGTH}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds)
    if rank == 0 and stage == 2:
        works = [forecast.cost.workload for forecast in handle.registry.find(model).start.forecasts]
        assert [(work.micro_batch, work.micro_batches) for work in works] == [(2, 3), (1, 2)]
    assert engine.train_batch_size() == GLOBAL_BATCH
    assert engine.gradient_accumulation_steps() == MICRO_STEPS
    loader = handle.dataloader(DataLoader(data(), batch_size=5))
    assert len(loader) == 5 * MICRO_STEPS
    losses, norms = [], []
    for _ in range(EPOCHS):
        for i, batch in enumerate(loader):
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            losses += [mean_over_ranks(loss)]
            if i % MICRO_STEPS == MICRO_STEPS - 1:
                norms.append(float(engine.get_global_grad_norm() or 0.0))
    assert engine.global_steps == 10 and engine.global_samples == 10 * GLOBAL_BATCH
    return np.reshape(losses, (-1, MICRO_STEPS)).mean(axis=1), norms, parameters(model, stage)


def test_another_global_batch_is_refused() -> None:
    first, *others = run_deepspeed(_refuse, 4)
    assert all(other == first for other in others)
    stated, product, missing, changed = first
    assert "take 2 x 3 + 1 x 2 = 8 samples per optimizer step, but train_batch_size is 6" in stated
    assert "but train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 3 x 1 is 6" in product
    assert "the schedules of the replicas hold ranks [[0, 1, 2]], the job has 4 processes" in missing
    assert "the batch cannot be changed while replicas take different ones" in changed


def _refuse(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ConfigError, HeteroError

    ds_hetero.register()
    said = []
    for wrong in ({"train_batch_size": 6}, {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}):
        model = llama()
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=model, optimizer=adam(model), config=config(1, **wrong))
        said.append(str(caught.value))
    missing = {"schedule": {"version": 1, "replicas": REPLICAS["replicas"][:1]}}
    with pytest.raises(HeteroError) as caught:
        deepspeed.initialize(model=model, optimizer=adam(model), config=config(1, heterogeneity=missing))
    said.append(str(caught.value))
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config(1, train_batch_size=8))
    with pytest.raises(ConfigError) as caught:
        engine.set_train_batch_size(16)
    return [*said, str(caught.value)]


# --- accelerate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "stream"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        (1, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
    ids=["0", "1, a stream", "2", "3"],
)
def test_an_accelerate_loop_equals_one_process(stage: int, stream: bool) -> None:
    (expected,) = run_deepspeed(_accelerate_loop, 1, None, stream, env={"ACCELERATE_USE_CPU": "true"})
    for ours in run_deepspeed(_accelerate_loop, 4, stage, stream, env={"ACCELERATE_USE_CPU": "false"}):
        assert ours["rates"] == expected["rates"]
        np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=1e-5)
        if stage:
            np.testing.assert_allclose(ours["norms"], expected["norms"], rtol=1e-5)
        assert_same_parameters(ours["parameters"], expected["parameters"])


class Stream(IterableDataset[Any]):
    """The samples without a length."""

    def __iter__(self) -> Any:
        return iter(data())


def _accelerate_loop(rank: int, stage: int | None, stream: bool) -> dict[str, Any]:
    """Shuffled, if it is no stream, whose length is not known; ``stage`` None is one process without DeepSpeed."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, set_seed

    import ds_hetero

    options: dict[str, Any] = {"cpu": True}
    if stage is not None:
        handle = ds_hetero.register()
        sequences = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        ds = config(stage, train_micro_batch_size_per_gpu=GLOBAL_BATCH)
        options = {
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ds),
            "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=4, sp_handler=sequences),
        }
    accelerator = Accelerator(**options)
    model = llama()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    loader: Any = DataLoader(Stream() if stream else data(), GLOBAL_BATCH, shuffle=not stream)
    evaluation: Any = DataLoader(samples(3), 3)
    set_seed(0)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    losses, norms, rates = [], [], []
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss if stage is None else handle.loss(outputs, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    norms.append(float(norm if stage is None else model.get_global_grad_norm() or 0.0))
                    rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(loss) if stage is None else mean_over_ranks(loss))
        model.eval()
        for batch in evaluation:  # whole, and on every rank
            with torch.no_grad():
                rates.append(round(model(**batch).loss.item(), 4))
    return {
        "losses": losses if stage is None else np.reshape(losses, (-1, MICRO_STEPS)).mean(axis=1),
        "norms": norms,
        "rates": rates,
        "parameters": parameters(accelerator.unwrap_model(model), stage or 0),
    }


# --- the Trainer ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_of_one_process() -> Any:
    """Logs and trained parameters."""
    return one_process(_train, None, {"eval_strategy": "epoch"})


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3])
def test_the_trainer_equals_one_process(stage: int, trainer_of_one_process: Any) -> None:
    expected_logs, expected = trainer_of_one_process
    for logs, trained in ranks(_train, 4, stage, {"eval_strategy": "epoch"}):
        assert_same_logs(logs, expected_logs, norm=stage > 0)
        assert_same_parameters(trained, expected)


@pytest.mark.slow
def test_the_trainer_resumes_with_other_replicas(tmp_path: Path) -> None:
    options = {"save_steps": 3, "max_steps": 7, "save_strategy": "steps"}
    expected, _ = one_process(_train, None, {**options, "output_dir": str(tmp_path / "one")})
    resume = f"{tmp_path}/ours/checkpoint-3"
    options["output_dir"] = str(tmp_path / "ours")
    ours = ranks(_train_twice, 4, options, resume)
    for whole, resumed in ours:
        assert_same_logs(whole, expected)
        assert_same_logs(resumed[3:-1], expected[3:-1])


def _train_twice(rank: int, options: dict[str, Any], checkpoint: str) -> list[Any]:
    whole, _ = _train(rank, 2, options)
    resumed, _ = _train(rank, 2, options, checkpoint, OTHER_REPLICAS)
    return [whole, resumed]


def _train(
    rank: int, stage: int | None, options: dict[str, Any], checkpoint: str | None = None, replicas: Any = None
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Logs and trained parameters; ``stage`` None is one process without DeepSpeed."""
    import ds_hetero

    ds = None
    if stage is not None:
        ds_hetero.register()
        ds = ds_config(stage, replicas or REPLICAS, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    trainer = make_trainer(
        ds, 4, dataset=data(), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.args.gradient_accumulation_steps == 2
    return logged(trainer), parameters(trainer.model, stage or 0)
