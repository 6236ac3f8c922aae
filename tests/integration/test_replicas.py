"""Replicas of 3 and 1 ranks, each with its own micro-batches, train as one process on the same global batch.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.integration.tiny import (
    adam,
    assert_same_parameters,
    collate,
    ds_config,
    llama,
    parameters,
    samples,
    train_on_one_process,
)
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
    """Without batch sizes, which follow from the replicas."""
    made = ds_config(stage, REPLICAS, **more)
    del made["train_micro_batch_size_per_gpu"]
    return made


def test_a_plain_loop_equals_one_process() -> None:
    expected = llama()
    rows = data()
    steps = [[collate(rows[i : i + GLOBAL_BATCH])] for i in range(0, NUM_SAMPLES, GLOBAL_BATCH)] * EPOCHS
    losses, norms = train_on_one_process(expected, steps)
    assert len(steps) == 10
    for results in run_deepspeed(_plain_loops, 4, [0, 1, 2, 3]):
        for stage, (our_losses, our_norms, trained) in results.items():
            np.testing.assert_allclose(our_losses, losses, rtol=1e-5, err_msg=f"stage {stage}")
            if stage:
                np.testing.assert_allclose(our_norms, norms, rtol=1e-5, err_msg=f"stage {stage}")
            assert_same_parameters(trained, parameters(expected))


def _plain_loops(rank: int, stages: list[int]) -> dict[int, Any]:
    import ds_hetero

    handle = ds_hetero.register()
    return {stage: _plain_loop(handle, stage) for stage in stages}


def _plain_loop(handle: Any, stage: int) -> Any:
    import deepspeed

    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config(stage))
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
            losses += [_mean_over_ranks(loss)]
            if i % MICRO_STEPS == MICRO_STEPS - 1:
                norms.append(float(engine.get_global_grad_norm() or 0.0))
    assert engine.global_steps == 10 and engine.global_samples == 10 * GLOBAL_BATCH
    trained = parameters(model, stage)
    engine.destroy()
    return np.reshape(losses, (-1, MICRO_STEPS)).mean(axis=1), norms, trained


def _mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()
