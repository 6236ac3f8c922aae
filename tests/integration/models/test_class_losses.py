"""A loss that a model's class computes in its forward is refused by name at the step where it shows, on every rank.

One start trains a few steps of every class in an own loop on shards. Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integration.tiny import UNEVEN_2, VOCAB, batches, ds_config, llama, mean_over_group
from tests.support import run_deepspeed

STEPS = 3

# By class: the step at which it is refused, None for never.
EXPECTED = {
    "ByClass": 0,
    "Smoothing": 0,
    "WithSmallPenalty": 0,
    "WithTerm": 0,
    "WithLaterTerm": 1,
    "OfLabelsItMoves": 0,
    "AsTransformers": None,
    "Plain": None,
    "OfScript": None,
    "LlamaForCausalLM": None,
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[int | None, str]]]:
    return run_deepspeed(_train_all, 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_loss_of_the_class_is_refused_at_its_step(name: str, outcomes: Any) -> None:
    (step, text), (step_1, text_1) = (of_rank[name] for of_rank in outcomes)
    assert (step, text) == (step_1, text_1)
    assert step == EXPECTED[name], text
    if step is not None:
        assert text.startswith(f"the forward of {name} computes a loss of its own: ")
        assert "model.loss_function = f" in text


def _classes() -> dict[str, type]:
    from transformers import LlamaForCausalLM

    class WithOwn(LlamaForCausalLM):
        step = 0

        def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            outputs = super().forward(*args, labels=labels, **kwargs)
            if labels is not None:
                outputs.loss = self.own(outputs, labels)
            return outputs

        def of_tokens(self, outputs: Any, labels: Tensor, **options: Any) -> Tensor:
            return F.cross_entropy(outputs.logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), **options)

    class ByClass(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            return self.of_tokens(outputs, labels, weight=torch.linspace(0.1, 3, VOCAB))

    class Smoothing(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            return self.of_tokens(outputs, labels, label_smoothing=0.1)

    class WithSmallPenalty(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            return outputs.loss + 1e-4 * outputs.logits.logsumexp(-1).square().mean()

    class WithTerm(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            return outputs.loss + 0.1 * (outputs.logits[:, 1:] - outputs.logits[:, :-1]).square().mean()

    class WithLaterTerm(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            self.step += 1
            return outputs.loss + 0.1 * (self.step > 1) * outputs.logits.square().mean()

    class OfLabelsItMoves(WithOwn):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            outputs = LlamaForCausalLM.forward(self, input_ids, **kwargs)
            if labels is not None:
                outputs.loss = self.of_tokens(outputs, labels, reduction="sum")
            return outputs

    class AsTransformers(WithOwn):
        def own(self, outputs: Any, labels: Tensor) -> Tensor:
            return self.of_tokens(outputs, labels)

    class Plain(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class OfScript(ByClass):
        pass  # its loop takes the logits, and makes its loss of these

    classes = (ByClass, Smoothing, WithSmallPenalty, WithTerm, WithLaterTerm, OfLabelsItMoves)
    right = (AsTransformers, Plain, OfScript, LlamaForCausalLM)
    return {kind.__name__: kind for kind in (*classes, *right)}


def _of_logits(outputs: Any, batch: Any, handle: Any) -> Tensor:
    local = F.cross_entropy(outputs.logits.flatten(0, 1), batch["shift_labels"].flatten())
    return mean_over_group(local, batch["shift_labels"], handle.replica.sp_group)


def _train_all(rank: int) -> dict[str, tuple[int | None, str]]:
    return {name: _train(kind) for name, kind in _classes().items()}


def _train(kind: type) -> tuple[int | None, str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    model = kind(llama().config)
    config = ds_config(1, UNEVEN_2)
    config["heterogeneity"]["checks"] = {"compare_every": "off"}  # whatever a piece would show
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        for batch in handle.dataloader(batches(STEPS), batches="same"):
            outputs = engine(**batch)
            assert outputs.logits.shape[:2] == batch["shift_labels"].shape
            engine.backward(_of_logits(outputs, batch, handle) if kind.__name__ == "OfScript" else outputs.loss)
            engine.step()
    except HeteroError as error:
        return engine.global_steps, str(error)
    finally:
        handle.undo()
    return None, ""
