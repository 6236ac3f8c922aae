"""Scripts that look wrong and train right; none may be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.planted.job import IGNORED, Job, cross_entropy, whole_batches


class Control(Job):
    begins = None


class Quarter(Control):
    name = "a quarter"
    what = "loss * 0.25"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss * 0.25


class Squared(Control):
    name = "squared"
    what = "loss ** 2"
    lr = 0.01

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss**2


class Penalties(Control):
    name = "penalties"
    what = "a z-loss by handle.mean, and a penalty on parameters"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss + 1e-2 * self.mean(outputs.logits.logsumexp(-1).square(), batch)


class TwoForwards(Control):
    name = "two forwards"
    what = "two forwards of a step, their losses added"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss + self.engine(**batch).loss


class FrozenLayers(Control):
    name = "frozen layers"
    what = "a layer and the embeddings are frozen on all ranks"

    def make_model(self) -> Any:
        model = super().make_model()
        model.model.layers[0].requires_grad_(False)
        model.model.embed_tokens.requires_grad_(False)
        return model


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Lora(Control):
    name = "LoRA"
    what = "adapters whose second factor begins as zero"
    lr = 1.0

    def make_model(self) -> Any:
        model = super().make_model().requires_grad_(False)
        for layer in model.model.layers:
            layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        return model


class Lengths(Control):
    name = "lengths"
    what = "another length in every batch"

    def batches(self) -> list[dict[str, Tensor]]:
        return [whole_batches(1, length=length)[0] for length in (37, 21, 50, 11, 37, 64)]


class Smoothing(Control):
    name = "label smoothing"
    what = 'label smoothing by the script, declared as "local_mean"'
    section = {"loss": "local_mean"}

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return self.local_mean(outputs, batch, label_smoothing=0.1)


class Accumulated(Control):
    name = "accumulation"
    what = "three micro-batches of unlike numbers of labels"
    accumulation = 3


class DropoutInMlps(Control):
    name = "dropout in MLPs"
    what = "dropout in training, drawn by every rank for its tokens"
    is_random = True

    def make_model(self) -> Any:
        model = super().make_model()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
        return model


class ClassWeights(Control):
    name = "class weights"
    what = "model.loss_function with weights by class"

    def make_model(self) -> Any:
        model = super().make_model()
        model.loss_function = weighted_loss
        return model


class GrowingTerm(Control):
    name = "an annealed term"
    what = "a term by handle.mean whose factor grows from zero"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss + 1e-3 * self.step * self.mean(outputs.logits.square().mean(-1), batch)


class Unfrozen(Control):
    name = "unfrozen later"
    what = "a hook on all ranks, and a rate that a script halves on all ranks"

    def ready(self) -> None:
        self.model.model.norm.weight.register_hook(lambda gradient: 0.5 * gradient)

    def before_step(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.lr / (1 + self.step)


class CountsTokens(Control):
    name = "a counter"
    what = "a buffer that counts steps, and one that all ranks update alike"

    def ready(self) -> None:
        self.model.register_buffer("steps", torch.zeros(()))

    def after_step(self) -> None:
        self.model.steps += 1


class Noise(Control):
    name = "tokens replaced"
    what = "all ranks replace tokens by their content, labels of those left out"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        rare = batch["input_ids"] == 7 + self.step
        batch["input_ids"] = batch["input_ids"].masked_fill(rare, 5)
        batch["shift_labels"] = batch["shift_labels"].masked_fill(batch["shift_labels"] == 9, IGNORED)
        return batch


def weighted_loss(
    logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """Return a loss like transformers': a mean over tokens, weighted by class."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return cross_entropy(logits, shift_labels, weight=torch.linspace(0.5, 3.0, vocab_size))


CONTROLS: list[type[Job]] = [
    Quarter,
    Squared,
    Penalties,
    TwoForwards,
    FrozenLayers,
    Lora,
    Lengths,
    Smoothing,
    Accumulated,
    DropoutInMlps,
    ClassWeights,
    GrowingTerm,
    Unfrozen,
    CountsTokens,
    Noise,
]
