"""A right model whose losses are made of other operations is compared amid a step, and trains on as on one process.

Budget: 40 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS, ACCUMULATION, CHANGED_AT = 4, 2, 2
CASES: dict[str, tuple[int, Any]] = {
    "stage 0": (0, UNEVEN_2),
    "stage 1": (1, UNEVEN_2),
    "stage 2": (2, ONE_GROUP_2),
    "stage 3": (3, UNEVEN_2),
}


class Branch(nn.Module):
    """An MLP with a branch for each token by itself, which opens later."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale, self.is_open = inner, nn.Parameter(torch.full((32,), 0.5)), False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.scale * (x.tanh() if self.is_open else x)


def branched() -> Any:
    model = llama()
    model.model.layers[1].mlp = Branch(model.model.layers[1].mlp)
    return model


def _train(rank: int, cases: dict[str, tuple[int, Any]]) -> dict[str, Any]:
    return {name: _train_one(stage, schedule) for name, (stage, schedule) in cases.items()}


def _train_one(stage: int, schedule: Any) -> tuple[list[float], list[float], dict[str, np.ndarray], list[int]]:
    """Losses of micro-batches, norms, parameters, and the steps before which a piece was compared."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.self_check import check

    handle, model = ds_hetero.register(), branched()
    config = ds_config(stage, schedule, gradient_accumulation_steps=ACCUMULATION)
    config["heterogeneity"]["checks"] = {"compare_every": 1000}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    compared: list[int] = []
    stock = check._compare

    def counted(*args: Any, **kwargs: Any) -> Any:
        compared.append(engine.global_steps)
        return stock(*args, **kwargs)

    check._compare = counted
    losses, norms = [], []
    try:
        for number, batch in enumerate(handle.dataloader(batches(STEPS * ACCUMULATION))):
            model.model.layers[1].mlp.is_open = number >= CHANGED_AT * ACCUMULATION
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if (number + 1) % ACCUMULATION == 0 and stage:  # on ZeRO 0 DeepSpeed's norm is not of all ranks
                norms.append(float(engine.get_global_grad_norm()))
    finally:
        check._compare = stock
    trained = parameters(model, stage)
    engine.destroy()
    handle.undo()
    return losses, norms, trained, compared


def _of_one_process() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    model, losses, norms = branched(), [], []
    optimizer = adam(model)
    whole = batches(STEPS * ACCUMULATION)
    for step in range(STEPS):
        model.model.layers[1].mlp.is_open = step >= CHANGED_AT
        own, norm = train_on_one_process(model, [whole[step * ACCUMULATION : (step + 1) * ACCUMULATION]], optimizer)
        losses += own
        norms += norm
    return losses, norms, parameters(model)


@pytest.fixture(scope="module")
def trained() -> Any:
    return run_deepspeed(_train, 2, CASES, timeout_s=150)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_amid_a_step_leaves_no_trace(case: str, trained: Any) -> None:
    losses, norms, expected = _of_one_process()
    of_micro_batches, ours, values, compared = trained[case]
    assert compared == [0, CHANGED_AT], compared
    np.testing.assert_allclose(np.reshape(of_micro_batches, (STEPS, ACCUMULATION)).mean(1), losses, rtol=1e-5)
    if ours:
        np.testing.assert_allclose(ours, norms, rtol=1e-5)
    assert_same_parameters(values, expected)
