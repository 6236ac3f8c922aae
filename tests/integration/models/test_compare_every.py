"""A model that changes while it trains is refused: at its step where operations change, else at the next comparison.

Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.combinations.modules import change as change_module
from tests.integration.self_checking import batch_of
from tests.integration.tiny import UNEVEN_2, ds_config, llama
from tests.support import run_deepspeed

_CHANGED_AT = 3  # optimizer steps have been taken by then


class _Gated(nn.Module):
    """An MLP of each token with something of the one before, behind a gate that the script opens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.is_open, self.factor = inner, False, 0.0

    def forward(self, x: Tensor) -> Tensor:
        before = self.factor * x.roll(1, dims=1)
        return self.inner(x + before + 0.5 * x.roll(1, dims=1) if self.is_open else x + before)


def _open_gate(model: Any) -> None:
    model.model.layers[1].mlp.is_open = True


def _replace_module(model: Any) -> None:
    model.model.layers[1].mlp = _Gated(model.model.layers[1].mlp.inner)
    _open_gate(model)


def _raise_factor(model: Any) -> None:
    """Mix tokens by the operations that were there before."""
    model.model.layers[1].mlp.factor = 0.5


def _open_gate_of_rank_1(model: Any) -> None:
    if torch.distributed.get_rank() == 1:
        _open_gate(model)


CHANGES = {
    "a gate": _open_gate,
    "another module": _replace_module,
    "a gate of one rank": _open_gate_of_rank_1,
    "a factor": _raise_factor,
}


# By "checks.compare_every": batches that are trained on, where operations change and where they do not; all eight where
# nothing is compared again.
@pytest.mark.parametrize(
    ("every", "trained_on", "by_factor"), [(2, 3, 4), (1, 3, 3), ("by_cost", 3, 8), ("first_batch", 8, 8)]
)
def test_a_model_that_changes_is_refused_at_its_step_or_at_the_next_comparison(
    every: int | str, trained_on: int, by_factor: int
) -> None:
    for by_change in run_deepspeed(_train, 2, every):
        for change, (steps, text) in by_change.items():
            expected = by_factor if change == "a factor" else trained_on
            assert steps == expected, (change, steps, text)
            assert text == "trained" if expected == 8 else "model.layers.1." in text, (change, text)


def _train(rank: int, every: int | str) -> dict[str, tuple[int, str]]:
    """By change: batches that were trained on, and the refusal."""
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    results = {}
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        model = llama()
        for layer in model.model.layers:
            layer.mlp = _Gated(layer.mlp)
        config = ds_config(1, UNEVEN_2, gradient_accumulation_steps=1)
        config["heterogeneity"]["checks"] = {"compare_every": every}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        steps, text = 0, "trained"
        try:
            for batch in handle.dataloader([batch_of()] * 8, batches="same"):
                engine.backward(handle.loss(engine(**batch), batch))
                engine.step()
                steps += 1
                if steps == _CHANGED_AT:
                    change(model)
        except ModelError as error:
            text = str(error)
        results[name] = steps, text
        engine.destroy()
    return results


def test_a_layer_behind_a_head_of_zeros_is_refused_after_the_first_step() -> None:
    for steps, text in run_deepspeed(_train_behind_zeros, 2):
        assert steps == 1, (steps, text)
        assert "the gradient of the parameter model.layers.0.self_attn.kernel differs" in text, text


def _train_behind_zeros(rank: int) -> tuple[int, str]:
    """Steps that a model with mixing layers of zeros trained, and the refusal."""
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    model = llama()
    change_module(model, "zero mixer")
    nn.init.zeros_(model.lm_head.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    config = ds_config(1, UNEVEN_2, gradient_accumulation_steps=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    text = "trained"
    try:
        for batch in handle.dataloader([batch_of()] * 8, batches="same"):
            engine.backward(handle.loss(engine(**batch), batch))
            engine.step()
    except ModelError as error:
        text = str(error)
    steps = engine.global_steps
    engine.destroy()
    return steps, text


def test_by_cost_repeats_comparisons_that_cost_little_of_the_steps() -> None:
    assert run_deepspeed(_repeat_by_cost, 2) == [[0, 6, 12], [0, 6, 12]]


def _repeat_by_cost(rank: int) -> list[int]:
    """Steps before which the model ran whole, where a comparison takes 6 % of a thousandth of a step's time."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.self_check import check

    compared: list[int] = []
    steps = 0
    stock = check.check_batch

    def note(*args: Any) -> None:
        compared.append(steps)
        stock(*args)

    check.check_batch = note  # type: ignore[assignment]
    handle = ds_hetero.register()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(1, UNEVEN_2))
    pace = handle.registry.find(model).sequences.pace
    measured = pace.numbers
    # Rank 1 measures the more expensive comparisons; which counts on both.
    pace.numbers = lambda: [0.05 * rank + 0.009 if measured() and compared else 0.0, 0.0]
    for batch in handle.dataloader([batch_of()] * 14, batches="same"):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
        steps += engine.is_gradient_accumulation_boundary()
    engine.destroy()
    check.check_batch = stock
    return compared
