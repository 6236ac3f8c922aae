"""16 bits without ZeRO: the first step of every optimizer is its first, as on one process with weights in fp32.

Budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.integration.tiny import CLIP, SMALL_BUCKETS, UNEVEN_2, batches, ds_config, llama
from tests.support import run_deepspeed

STEPS = 2
# Decays that one step more would show; a large eps keeps rounding near zero from becoming a step of full size.
OPTIONS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 1e-2, "eps": 1e-3, "initial_accumulator_value": 0.01},
    "Adam": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.5},
    "NAdam": {"lr": 1e-2, "eps": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}
RTOL = 5e-2  # of a parameter's change: gradients of bf16 have 8 bits, and are rounded elsewhere on shards


def on_one_process(kind: str) -> dict[str, np.ndarray]:
    """Weights after steps in bf16 whose optimizer holds them in fp32."""
    model = llama().to(torch.bfloat16).train()
    copies = {name: nn.Parameter(p.detach().float()) for name, p in llama().named_parameters()}
    for name, parameter in model.named_parameters():
        copies[name].data.copy_(parameter.detach().float())
    optimizer = getattr(torch.optim, kind)(copies.values(), **OPTIONS[kind])
    for batch in batches(STEPS):
        model(**batch, use_cache=False).loss.backward()
        for name, parameter in model.named_parameters():
            copies[name].grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(copies.values(), CLIP)
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(copies[name].detach())
    return {name: parameter.detach().numpy().copy() for name, parameter in copies.items()}


def on_ranks(rank: int, kinds: list[str]) -> dict[str, dict[str, np.ndarray]]:
    return {kind: train(kind) for kind in kinds}


def train(kind: str) -> dict[str, np.ndarray]:
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), llama().train()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIONS[kind])
    config = ds_config(0, UNEVEN_2, bf16={"enabled": True})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for batch in handle.dataloader(batches(STEPS)):
        engine.backward(engine(**batch).loss)
        engine.step()
    copies = [copy for group in engine.optimizer.fp32_groups for copy in group]
    trained = {
        name: copy.detach().numpy().copy() for (name, _), copy in zip(model.named_parameters(), copies, strict=True)
    }
    engine.destroy()
    handle.undo()
    return trained


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, np.ndarray]]:
    by_kind: dict[str, dict[str, np.ndarray]] = run_deepspeed(on_ranks, 2, list(OPTIONS))[0]
    return by_kind


@pytest.mark.parametrize("kind", OPTIONS)
def test_steps_are_those_of_one_process(kind: str, trained: dict[str, dict[str, np.ndarray]]) -> None:
    start = {name: p.detach().to(torch.bfloat16).float().numpy() for name, p in llama().named_parameters()}
    for name, value in on_one_process(kind).items():
        error = np.linalg.norm(trained[kind][name] - value)
        moved = np.linalg.norm(value - start[name]) + 1e-4 * np.linalg.norm(value)
        assert error / moved < RTOL, f"{kind}: {name} is off by {error / moved:.1e} of its change"


def test_no_step_is_taken_while_the_optimizer_of_a_fused_one_is_made() -> None:
    run_deepspeed(_make_fused, 1)


def _make_fused(rank: int) -> None:
    """DeepSpeed's fused Adam, compiled for the machine, has another class around it; torch's takes its place."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    from ds_hetero.frameworks.deepspeed.zero.optimizers import optimizers_in_place

    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    with optimizers_in_place({"zero_optimization": {"stage": 0, **SMALL_BUCKETS}}, (1.0,), None):
        wrapper = FP16_Optimizer(optimizer, low_precision_dtype=torch.bfloat16)
    assert torch.equal(wrapper.fp32_groups_flat[0].detach(), torch.ones(4)) and not optimizer.state
