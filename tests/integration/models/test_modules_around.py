"""A module of the script's own around a language model: it hands shards on, or is told by name how to be called.

Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.integration.tiny import UNEVEN_2, VOCAB, ds_config, llama
from tests.support import run_deepspeed

LENGTH, NUM_FEATURES, WIDTH = 40, 4, 8


class Prefixed(nn.Module):
    """A language model with features before its embeddings, as of an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = llama()
        self.project = nn.Linear(WIDTH, self.lm.config.hidden_size)

    def forward(self, features: Tensor, input_ids: Tensor, labels: Tensor) -> Any:
        return self.run(features, input_ids, labels)

    def run(self, features: Tensor, input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
        embeddings = torch.cat([self.project(features), self.lm.get_input_embeddings()(input_ids)], 1)
        labels = torch.cat([labels.new_full(features.shape[:2], -100), labels], 1)
        return self.lm(inputs_embeds=embeddings, labels=labels, **more)


class HandsOn(Prefixed):
    """The same, which hands on what else a batch has."""

    def forward(self, features: Tensor, input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
        return self.run(features, input_ids, labels, **more)


class Wrapped(nn.Module):
    """A language model inside a module that does nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = llama()

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        return self.lm(input_ids=input_ids, **more)


class WithoutCache(Wrapped):
    """The same, which takes what it knows alone."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor | None = None, shift_labels: Any = None, labels: Any = None
    ) -> Any:
        given = {"position_ids": position_ids, "shift_labels": shift_labels, "labels": labels}
        return self.lm(input_ids=input_ids, **{name: entry for name, entry in given.items() if entry is not None})


def batches(with_features: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    out = []
    for _ in range(3):
        ids = torch.randint(8, VOCAB, (2, LENGTH), generator=generator)
        features = {"features": torch.randn(2, NUM_FEATURES, WIDTH, generator=generator)} if with_features else {}
        out.append({"input_ids": ids, "labels": ids.clone(), **features})
    return out


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def on_one_process(make: type[nn.Module], with_features: bool) -> dict[str, np.ndarray]:
    model = make()
    optimizer = sgd(model)
    for batch in batches(with_features):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def start(make: type[nn.Module]) -> tuple[Any, Any]:
    """Handle and engine."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = make()
    config = ds_config(
        1, UNEVEN_2, gradient_clipping=0.0, train_micro_batch_size_per_gpu=2, zero_force_ds_cpu_optimizer=False
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    return handle, engine


def trained(engine: Any) -> dict[str, np.ndarray]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).numpy().copy() for name, p in engine.module.named_parameters()}


def assert_same(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():  # sums in fp32 in another order
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("make", [Wrapped, WithoutCache])
def test_a_module_that_hands_shards_on_trains_as_on_one_process(make: type[nn.Module]) -> None:
    ours, *_ = run_deepspeed(_train, 2, make)
    assert_same(ours, on_one_process(make, with_features=False))


def _train(rank: int, make: type[nn.Module]) -> dict[str, np.ndarray]:
    handle, engine = start(make)
    for batch in handle.dataloader(batches(with_features=False)):
        engine.backward(engine(**batch).loss)
        engine.step()
    return trained(engine)


def test_features_before_embeddings_train_by_sharded_calls() -> None:
    ours, *_ = run_deepspeed(_call, 2)
    assert_same(ours, on_one_process(Prefixed, with_features=True))


def _call(rank: int) -> dict[str, np.ndarray]:
    handle, engine = start(Prefixed)
    for batch in batches(with_features=True):
        engine.backward(handle.sharded_call(engine, **batch).loss)
        engine.step()
    return trained(engine)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (Prefixed, "Prefixed.forward takes no position_ids and no shift_labels, which batches of handle.dataloader"),
        (HandsOn, "something puts tokens of its own, such as features or prompts, among those of a shard"),
    ],
)
def test_features_before_embeddings_of_shards_are_refused_by_name(make: type[nn.Module], rule: str) -> None:
    first, second = run_deepspeed(_refused, 2, make)
    for text in (first, second):
        assert rule in text and "handle.sharded_call(engine, **batch)" in text and "sequence_parallel_size" in text


def _refused(rank: int, make: type[nn.Module]) -> str:
    from ds_hetero.errors import HeteroError

    handle, engine = start(make)
    with pytest.raises(HeteroError) as caught:
        for batch in handle.dataloader(batches(with_features=True)):
            engine(**batch)
    return str(caught.value)
