"""A plain DeepSpeed loop trains as one process does: every ZeRO stage, uneven schedules, two replicas, both losses.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    mean_over_group,
    mean_over_ranks,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS = 5
NO_SCATTER = {"reduce_scatter": False}
# Ranks, ZeRO stage, schedule (of two ranks on four: two replicas), changes of "zero_optimization".
CASES: dict[str, tuple[int, int, Any, dict[str, Any]]] = {
    "stage 0, 2 ranks": (2, 0, UNEVEN_2, {}),
    "stage 1, 2 ranks": (2, 1, UNEVEN_2, {}),
    "stage 2, 2 ranks": (2, 2, UNEVEN_2, {}),
    "stage 2, one group, all-reduce": (2, 2, ONE_GROUP_2, NO_SCATTER),
    "stage 3, one group": (2, 3, ONE_GROUP_2, {}),
    "stage 3, 2 ranks, all-reduce": (2, 3, UNEVEN_2, NO_SCATTER),
    "stage 0, 4 ranks": (4, 0, UNEVEN_4, {}),
    "stage 1, two replicas": (4, 1, UNEVEN_2, {}),
    "stage 2, 4 ranks": (4, 2, UNEVEN_4, {}),
    "stage 3, two replicas": (4, 3, UNEVEN_2, {}),
    "stage 3, 4 ranks": (4, 3, UNEVEN_4, {}),
}


# What another one of them shows as well: the stage on other ranks, and so many ranks on other stages.
SLOW = ("stage 1, 2 ranks", "stage 2, 2 ranks", "stage 3, one group", "stage 0, 4 ranks")


@pytest.mark.parametrize(
    ("world_size", "stage", "schedule", "zero"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
)
def test_training_equals_one_process(world_size: int, stage: int, schedule: Any, zero: dict[str, Any]) -> None:
    run_deepspeed(_train, world_size, stage, schedule, zero, "loss")


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        pytest.param(UNEVEN_2, 3, id="2 ranks, stage 3"),
        pytest.param(UNEVEN_4, 1, id="4 ranks, stage 1"),
        pytest.param(UNEVEN_2, 1, id="2 ranks, stage 1", marks=pytest.mark.slow),
        pytest.param(UNEVEN_4, 3, id="4 ranks, stage 3", marks=pytest.mark.slow),
    ],
)
def test_training_with_the_documented_loss_equals_one_process(schedule: Any, stage: int) -> None:
    run_deepspeed(_train, 2 if schedule is UNEVEN_2 else 4, stage, schedule, {}, "recipe")


@pytest.mark.parametrize(
    ("world_size", "schedule", "stage"),
    [
        pytest.param(2, UNEVEN_2, 2, id="2 ranks"),
        pytest.param(4, UNEVEN_4, 3, id="a rank without tokens"),
        pytest.param(4, UNEVEN_2, 1, id="two replicas", marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_the_outputs_trains_as_on_one_process(world_size: int, schedule: Any, stage: int) -> None:
    run_deepspeed(_train, world_size, stage, schedule, {}, "outputs")


def _train(rank: int, stage: int, schedule: Any, zero: dict[str, Any], how: str) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(stage, schedule, zero=zero))
    replica = handle.replica
    assert engine.train_batch_size() == 2 * replica.num_replicas
    whole = batches(STEPS * replica.num_replicas)
    losses, norms = [], []
    for batch in handle.dataloader(whole[replica.replica_id :: replica.num_replicas], batches="same"):
        loss = _LOSSES[how](handle, engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())

    expected = llama()
    steps = [whole[i : i + replica.num_replicas] for i in range(0, len(whole), replica.num_replicas)]
    expected_losses, expected_norms = train_on_one_process(expected, steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    if stage:  # DeepSpeed keeps no norm without ZeRO
        np.testing.assert_allclose(np.array(norms, dtype=float), expected_norms, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(expected))


_LOSSES: dict[str, Any] = {
    "loss": lambda handle, engine, batch: handle.loss(engine(**batch), batch),
    "outputs": lambda handle, engine, batch: engine(**batch).loss,
    "recipe": lambda handle, engine, batch: recipe(engine, batch),
}


def recipe(engine: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that DeepSpeed and accelerate document for sequence parallelism."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    return mean_over_group(engine(**batch, labels=batch["shift_labels"]).loss, batch["shift_labels"], group)
