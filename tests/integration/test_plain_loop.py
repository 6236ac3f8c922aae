"""A plain DeepSpeed loop trains as one process does: every ZeRO stage, uneven schedules, two replicas, both losses.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn

from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS = 5
CASES_2 = [
    (0, UNEVEN_2, {}),
    (1, UNEVEN_2, {}),
    (2, ONE_GROUP_2, {"reduce_scatter": False}),
    (2, UNEVEN_2, {}),
    (3, ONE_GROUP_2, {}),
    (3, UNEVEN_2, {"reduce_scatter": False}),
]
CASES_4 = [(0, UNEVEN_4, {}), (1, UNEVEN_2, {}), (2, UNEVEN_4, {}), (3, UNEVEN_2, {}), (3, UNEVEN_4, {})]


@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES_2), (4, CASES_4)])
def test_training_equals_one_process(world_size: int, cases: list[Any]) -> None:
    run_deepspeed(_train_all, world_size, cases)


def _train_all(rank: int, cases: list[Any]) -> None:
    import ds_hetero

    handle = ds_hetero.register()
    for stage, schedule, zero in cases:
        _train(handle, stage, schedule, zero, "loss")
    for stage in (1, 3):
        _train(handle, stage, cases[0][1], {}, "recipe")


def _train(handle: Any, stage: int, schedule: Any, zero: dict[str, Any], how: str) -> None:
    import deepspeed

    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(stage, schedule, zero=zero))
    replica = handle.replica
    assert engine.train_batch_size() == 2 * replica.num_replicas
    whole = batches(STEPS * replica.num_replicas)
    losses, norms = [], []
    for batch in handle.dataloader(whole[replica.replica_id :: replica.num_replicas], batches="same"):
        loss = handle.loss(engine(**batch), batch) if how == "loss" else _recipe(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(_mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())

    expected = llama()
    steps = [whole[i : i + replica.num_replicas] for i in range(0, len(whole), replica.num_replicas)]
    expected_losses, expected_norms = train_on_one_process(expected, steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    if stage:  # DeepSpeed keeps no norm without ZeRO
        np.testing.assert_allclose(np.array(norms, dtype=float), expected_norms, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(expected))
    engine.destroy()


def _recipe(engine: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that DeepSpeed and accelerate document for sequence parallelism."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    all_gather = torch.distributed.nn.functional.all_gather
    losses = torch.stack(all_gather(engine(**batch, labels=batch["shift_labels"]).loss, group=group))
    tokens = torch.stack(all_gather((batch["shift_labels"] != -100).sum(), group=group))
    losses = torch.where(tokens > 0, losses, torch.zeros_like(losses))
    return (losses * tokens).sum() / tokens.sum()


def _mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()
