"""Images and sounds before a text decoder that is split unevenly: loss and every gradient, towers' too, are those of
one process.

In float64 this shows a fault of one part in 1e12; the modelling files cast to float32 inside, so these casts are casts
to float64 here.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.self_checking import verdict
from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    adam,
    assert_same_parameters,
    ds_config,
    parameters,
    train_on_one_process,
)
from tests.integration.tower_models import TOWERS, batch_of, make
from tests.support import run_deepspeed, run_ranks

_SCHEDULES: dict[str, dict[str, Any]] = {
    "ring": {**UNEVEN_2, "layout": "contiguous"},
    "zigzag": {**UNEVEN_2, "layout": "zigzag"},
    "one group": ONE_GROUP_2,
    "no tokens": {
        "version": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "groups": [{"ranks": [0, 1], "tokens": [1, 0], "heads": [3, 1]}],
    },
}
_QUICK = {("Qwen2_5_VL", "left", "zigzag"), ("SmolVLM", "plain", "one group"), ("Voxtral", "right", "ring")}
CASES = [(name, kind, schedule) for name in TOWERS for kind, schedule in (("left", "zigzag"), ("plain", "one group"))]
CASES += [("Qwen3VL", "right", "ring"), ("Qwen3VL", "plain", "no tokens"), ("Voxtral", "right", "ring")]
CASES += [("Qwen2_5_VL", "checkpointing", "zigzag"), ("Qwen3_5", "checkpointing", "zigzag")]


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize(
    ("name", "kind", "schedule"),
    [pytest.param(*case, id=", ".join(case), marks=() if case in _QUICK else pytest.mark.slow) for case in CASES],
)
def test_gradients_equal_those_of_the_undivided_model(name: str, kind: str, schedule: str) -> None:
    run_ranks(_check, 2, name, kind, schedule)


def _check(rank: int, name: str, kind: str, schedule: str) -> None:
    import ds_hetero

    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[misc, method-assign]
    batch, whole, model = batch_of(name, kind.replace("checkpointing", "plain")), make(name), make(name)
    loss = whole(**batch).loss
    loss.backward()
    if kind == "checkpointing":
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    handle = ds_hetero.register()
    section = {"schedule": _SCHEDULES[schedule], "verify": "off"}
    handle.registry.prepare(model, {"heterogeneity": section}, {})
    (shard,) = handle.dataloader([batch])
    labels = {} if name == "Qwen2Audio" else {"labels": shard["shift_labels"]}  # it would move them once more
    ours = handle.loss(model(**shard, **labels), shard)
    ours.backward()
    handle.undo()
    assert abs(ours.item() - loss.item()) < 1e-12 * loss.item()
    largest = max(float(parameter.grad.norm()) for parameter in whole.parameters() if parameter.grad is not None)
    for (parameter, expected), own in zip(whole.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None or not own.grad.any(), parameter
            continue
        grad = torch.zeros_like(own) if own.grad is None else own.grad
        dist.all_reduce(grad)
        error = (grad / dist.get_world_size() - expected.grad).norm() / (expected.grad.norm() + 1e-3 * largest)
        assert error < 1e-12, f"{parameter} is off by {float(error):.1e}"


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_one_process(stage: int) -> None:
    run_deepspeed(_check_training, 2, stage)


def _check_training(rank: int, stage: int) -> None:
    import deepspeed

    import ds_hetero

    whole = [batch_of("Qwen3VL", kind, torch.float32) for kind in ("plain", "left", "right")]
    expected = make("Qwen3VL", torch.float32)
    losses, norms = train_on_one_process(expected, [[batch] for batch in whole])
    handle, model = ds_hetero.register(), make("Qwen3VL", torch.float32)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(stage, UNEVEN_2))
    ours, own_norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        ours.append(loss.item())
        own_norms.append(float(engine.get_global_grad_norm()))
    handle.undo()
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_norms, norms, rtol=1e-5, atol=0)
    assert_same_parameters(parameters(model, stage), parameters(expected))


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in TOWERS if name != "Qwen3VL"])
def test_the_self_check_passes_them(name: str) -> None:
    run_ranks(_check_self_check, 2, name, nccl_rules=False)


def test_the_self_check_passes_images_and_finds_features_in_the_wrong_places() -> None:
    run_ranks(_check_wrong_places, 2, nccl_rules=False)


def _check_self_check(rank: int, name: str) -> None:
    for kind in ("plain", "left", "right"):
        for dtype in (torch.float32, torch.bfloat16):
            said = verdict(make(name, dtype), batch_of(name, kind, dtype), UNEVEN_2)
            assert not said, (kind, dtype, said)


def _check_wrong_places(rank: int) -> None:
    from ds_hetero.frameworks.transformers.model import towers

    _check_self_check(rank, "Qwen3VL")
    correct = towers._Selector.added_features
    towers._Selector.added_features = lambda selector, *features: [x.flip(0) for x in correct(selector, *features)]  # type: ignore
    try:
        said = verdict(make("Qwen3VL", torch.float32), batch_of("Qwen3VL", "plain", torch.float32), UNEVEN_2)
    finally:
        towers._Selector.added_features = correct  # type: ignore[method-assign]
    assert "the output of model.language_model" in said, said


def test_batches_that_are_not_the_loaders_are_refused() -> None:
    run_ranks(_check_other_batches, 2, nccl_rules=False)


def _check_other_batches(rank: int) -> None:
    import ds_hetero
    from ds_hetero.errors import BatchError, ConfigError

    handle, model, batch = ds_hetero.register(), make("Llava"), batch_of("Llava")
    handle.registry.prepare(model, {"heterogeneity": {"schedule": UNEVEN_2, "verify": "off"}}, {})
    with pytest.raises(BatchError, match="LlavaForConditionalGeneration puts images or sounds before its text decoder"):
        model(**batch)
    (shard,) = handle.dataloader([batch])
    with pytest.raises(BatchError, match="not a copy"):
        model(**{**shard, "position_ids": shard["position_ids"].clone()})
    with pytest.raises(BatchError, match="the text decoder of LlavaForConditionalGeneration is called outside"):
        model.model.language_model(input_ids=shard["input_ids"])
    model.eval()
    with pytest.raises(BatchError, match="takes whole batches here"):
        model(**shard)
    whole = model(**batch).logits
    assert whole.shape[1] == batch["input_ids"].shape[1]
    generated = model.generate(**{key: batch[key] for key in ("input_ids", "pixel_values")}, max_new_tokens=2)
    assert generated.shape[1] == batch["input_ids"].shape[1] + 2
    model.train()
    handle.undo()
    handle = ds_hetero.register()
    with pytest.raises(ConfigError, match='"placement": "documents" is for batches of tokens alone'):
        section = {"schedule": UNEVEN_2, "placement": {"mode": "documents"}}
        handle.registry.prepare(make("Llava"), {"heterogeneity": section}, {})
