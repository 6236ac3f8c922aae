"""``model.loss_function = f``: called with the logits and labels of the whole batch, or refused. Budget: 25 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integration.tiny import LR, UNEVEN_2, assert_same_parameters, batches, ds_config, llama, parameters
from tests.support import run_deepspeed

STEPS = 3


def by_class(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Divided by the weights of the classes, which are rare in some parts."""
    weight = torch.linspace(0.1, 3, vocab_size, dtype=logits.dtype)
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), weight)


def of_neighbours(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """With a term over pairs of tokens, and a square of the mean."""
    plain = F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))
    return plain**2 + (logits[:, 1:] - logits[:, :-1]).square().mean()


OWN = {"by class": by_class, "of neighbours": of_neighbours}


@pytest.mark.parametrize("name", OWN)
def test_a_loss_function_of_the_scripts_own_trains_as_in_one_process(name: str) -> None:
    model = llama()
    model.loss_function = OWN[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for values, trained in run_deepspeed(_train, 2, name):
        np.testing.assert_allclose(values, losses, rtol=1e-5)
        assert_same_parameters(trained, parameters(model))


def test_pipelines_refuse_a_loss_that_is_not_of_tokens() -> None:
    ((own, inside, plain),) = run_deepspeed(_check_stages, 1)
    assert "has a custom loss function, by_class" in own and "in its forward" not in own
    assert "computes a loss that is not the cross entropy of its logits" in inside
    assert plain == ""


def _train(rank: int, name: str) -> Any:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    model.loss_function = OWN[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    config = ds_config(2, UNEVEN_2, gradient_clipping=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for batch in handle.dataloader(batches(STEPS), batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, parameters(model, 2)


def _check_stages(rank: int) -> list[str]:
    from transformers import LlamaForCausalLM

    class WithPenalty(LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            outputs = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                outputs.loss = outputs.loss + outputs.logits.logsumexp(-1).square().mean()
            return outputs

    own, inside = llama(), llama()
    own.loss_function = by_class
    inside.__class__ = type("LlamaForCausalLM", (WithPenalty,), {})
    return [_refusal(model) for model in (own, inside, llama())]


def _refusal(model: Any) -> str:
    from ds_hetero.errors import ModelError
    from ds_hetero.frameworks.transformers.stages.stage_checks import check_cuttable

    try:
        check_cuttable(model)
    except ModelError as error:
        return str(error)
    return ""
