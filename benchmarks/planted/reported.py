"""Faults A1 to A11, found by trying an earlier revision, in one form or more each.

Steps are counted from 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.planted.controls import weighted_loss
from benchmarks.planted.job import STEPS, Job, num_ranks, whole_batches
from tests.integration.tiny import UNEVEN_2


class MeanOfMeans(Job):
    name = "A1 mean of means"
    what = "an average of the ranks' means, after three right steps"
    says = "weighs labels by rank"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        if not self.has_begun or self.alone:
            return self.recipe(outputs, batch)
        from torch.distributed.nn.functional import all_reduce

        return all_reduce(self.local_mean(outputs, batch)) / num_ranks()


class ZeroHead(Job):
    name = "A1 head of zeros"
    what = "a local mean under a head of zeros, where all values are equal"
    begins = 0
    says = "weighs labels by rank"

    def make_model(self) -> Any:
        model = super().make_model()
        nn.init.zeros_(model.lm_head.weight)
        return model

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return self.local_mean(outputs, batch)


class LocalLater(Job):
    name = "A1 local means later"
    what = "a right first loss, then local means"
    begins = 1
    says = "differs between the ranks of a replica"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return (self.local_mean if self.has_begun else self.recipe)(outputs, batch)


class LossFunction(Job):
    name = "A2 loss_function"
    what = "model.loss_function is set amid training"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.has_begun:
            self.model.loss_function = weighted_loss
        return batch


class SkippedExperts(Job):
    name = "A4 experts skipped"
    what = "of two experts each is used by the tokens of one rank alone, ZeRO 2"
    begins = 1
    stage = 2
    schedule = {**UNEVEN_2, "layout": "contiguous"}

    def make_model(self) -> Any:
        model = super().make_model()
        torch.manual_seed(5)
        model.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            added = torch.zeros_like(out)
            for number, expert in enumerate(model.experts):
                hit = args[0] % 2 == number
                if hit.any():
                    added[hit] = expert(out[hit])
            return out + added

        model.model.embed_tokens.register_forward_hook(add)
        return model

    def batches(self) -> list[dict[str, Tensor]]:
        batches = whole_batches(STEPS, length=40)
        for batch in batches[1:]:
            ids = batch["input_ids"]
            ids[:, :30] -= ids[:, :30] % 2
            ids[:, 30:] += 1 - ids[:, 30:] % 2
            ids.clamp_(max=63)
            batch["labels"][batch["labels"] != -100] = ids[batch["labels"] != -100]
        return batches


class Adagrad(Job):
    name = "A6 Adagrad"
    what = "Adagrad of two groups with a scheduler of the script, ZeRO 2"
    begins = 0
    stage = 2

    def make_optimizer(self, model: nn.Module) -> Any:
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "lr": 0.03, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]
        optimizer = torch.optim.Adagrad(groups, lr=0.01)
        self.memory["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    def after_step(self) -> None:
        self.memory["scheduler"].step()

    keys = {"zero_force_ds_cpu_optimizer": False}


class Canon(nn.Module):
    """Adds a causal convolution of four tokens, whose weights are zero at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kernel = inner, nn.Parameter(torch.zeros(32, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.conv1d(x.transpose(1, 2), self.kernel, groups=32, padding=3)[..., : x.shape[1]]
        return self.inner(x + mixed.transpose(1, 2))


class ZeroMixer(Job):
    name = "A11 zero mixer"
    what = "a convolution over tokens that begins as zero"
    begins = 0
    says = r"gradient|differs"

    def make_model(self) -> Any:
        model = super().make_model()
        for layer in model.model.layers:
            layer.mlp = Canon(layer.mlp)
        return model


REPORTED: list[type[Job]] = [MeanOfMeans, ZeroHead, LocalLater, LossFunction, SkippedExperts, Adagrad, ZeroMixer]
