"""``"keep_attention"``: losses and weights to the bit of a job that recomputes attention, without its messages.

Budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.proof.events import Call
from benchmarks.proof.recording import recording
from ds_hetero.engine.trained.whole_model_checks import expect_section_of_whole_model
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import read_section
from tests.integration.models.test_recurrent import batch_of, make, schedule_of
from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    batches,
    checkpoint_activations,
    ds_config,
    llama,
    parameters,
)
from tests.support import run_deepspeed, run_ranks

# How layers are checkpointed; with "kept", so that attention stays.
_WHOLE, _RECOMPUTED, _KEPT = "not checkpointed", "recomputed", "kept"
_EXCHANGES = ("", "all_to_all_single", "alltoall_base")  # names of messages and all-to-alls, by release of torch


@pytest.mark.parametrize(
    ("stage", "schedule", "reentrant", "tile", "compiled"),
    [
        pytest.param(1, UNEVEN_2, False, None, False, id="ring, ZeRO-1, non-reentrant"),
        pytest.param(3, ONE_GROUP_2, True, 5, False, id="all-to-all, ZeRO-3, reentrant, tiles"),
        pytest.param(2, UNEVEN_4, True, None, False, id="both, ZeRO-2, reentrant", marks=pytest.mark.slow),
        pytest.param(1, UNEVEN_2, False, None, True, id="compiled, non-reentrant", marks=pytest.mark.slow),
        pytest.param(3, UNEVEN_2, True, None, True, id="compiled, ZeRO-3, reentrant", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_have_the_same_bits_and_the_recomputation_sends_nothing(
    stage: int, schedule: dict[str, Any], reentrant: bool, tile: int | None, compiled: bool
) -> None:
    num_ranks = sum(len(group["ranks"]) for group in schedule["groups"])
    kept, recomputed, whole = (
        run_deepspeed(_train, num_ranks, stage, schedule, reentrant, tile, compiled, how)
        for how in (_KEPT, _RECOMPUTED, _WHOLE)
    )
    for ours, again, without in zip(kept, recomputed, whole, strict=True):
        assert ours[0] == again[0]
        assert all(np.array_equal(ours[1][name], weight) for name, weight in again[1].items())
        assert ours[2] == without[2] < again[2]


def _train(
    rank: int, stage: int, schedule: dict[str, Any], reentrant: bool, tile: int | None, compiled: bool, how: str
) -> tuple[list[float], dict[str, np.ndarray], int]:
    """Train two steps of two micro-batches, with an evaluation inside the first, and count messages and all-to-alls."""
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), llama()
    if how != _WHOLE:
        checkpoint_activations(model, reentrant)
        model.enable_input_require_grads()
    config = ds_config(stage, schedule, gradient_accumulation_steps=2)
    config["heterogeneity"] |= {"checks": "off", "keep_attention": how == _KEPT}
    if tile is not None:
        config["heterogeneity"]["tile_tokens"] = tile
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    if compiled:
        engine.compile(backend="aot_eager")
    losses, posted = [], []
    for number, batch in enumerate(handle.dataloader(batches(4), batches="same")):
        with recording() as events:
            loss = engine(**batch).loss
            if number == 0:
                with torch.no_grad():
                    engine(**batch)
            engine.backward(loss)
        posted += events
        engine.step()
        losses.append(loss.item())
    weights = parameters(model, stage)
    handle.undo()
    return losses, weights, len(_exchanges(posted))


def _exchanges(events: list[Any]) -> list[Call]:
    """Return the messages and all-to-alls among all calls."""
    return [event for event in events if isinstance(event, Call) and event.name in _EXCHANGES]


def test_recurrent_layers_are_computed_again_beside_attention_that_stays() -> None:
    for kept, recomputed in zip(
        run_ranks(_hybrid, 2, True, nccl_rules=False), run_ranks(_hybrid, 2, False, nccl_rules=False), strict=True
    ):
        assert kept[0] == recomputed[0]
        assert all(np.array_equal(ours, again) for ours, again in zip(kept[1], recomputed[1], strict=True))
        assert kept[2] < recomputed[2]


def _hybrid(rank: int, keeps: bool) -> tuple[float, list[np.ndarray], int]:
    import ds_hetero

    model = make("Qwen3_5").float()
    checkpoint_activations(model, False)
    handle = ds_hetero.register()
    section = {"schedule": schedule_of(model, "packed", (3, 1)), "verify": "off", "keep_attention": keeps}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    (shard,) = handle.dataloader([batch_of("packed")])
    with recording() as events:
        loss = handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard)
        loss.backward()
    handle.undo()
    grads = [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), grads, len(_exchanges(events))


def test_a_module_that_is_never_split_refuses_the_key() -> None:
    with pytest.raises(ConfigError, match="and Regression is not one"):
        expect_section_of_whole_model("Regression", read_section({"keep_attention": True}), takes_unlike_batches=False)
    with pytest.raises(ConfigError, match="and Regression runs whole on every rank"):
        expect_section_of_whole_model(
            "Regression", read_section({"ring_gradients": "bf16"}), takes_unlike_batches=False
        )
