"""Buffers that forwards of training change come to something else in pipelines, which is refused. Budget: 20 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.pipelines.test_pipelines import HEADS, adamw, batches, made_model, pipeline, plan_of, trained
from tests.support import run_deepspeed

PIPELINES = {
    "stages": [pipeline(2, 2, {"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 4]})],
    "copies": [pipeline(1, 1, {"ranks": [rank], "layers": [0, 4]}) for rank in range(2)],
}
# By kind: how a layer's forward treats a buffer, and whether that is refused.
KINDS = {
    "counts": True,
    "follows the batch": True,
    "replaces it": True,
    "caches": False,
    "writes what was there": False,
    "reads": False,
    "between steps": False,
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_buffer_that_passes_change_is_refused_on_every_rank(name: str) -> None:
    of_ranks = run_deepspeed(train, 2, plan_of(*PIPELINES[name], kv_heads=HEADS))
    for texts in of_ranks:
        for kind, is_refused in KINDS.items():
            starts = "forwards of training change buffers of the model, model.layers.0.mlp.seen "
            assert texts[kind].startswith(starts) if is_refused else not texts[kind], (kind, texts[kind])
            assert texts[kind] == of_ranks[0][kind]


def train(rank: int, plan: Any) -> dict[str, str]:
    return {kind: _refusal(kind, plan) for kind in KINDS}


def _refusal(kind: str, plan: Any) -> str:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    model = made_model({"num_key_value_heads": HEADS}, False)
    layer = model.model.layers[0].mlp
    layer.register_buffer("seen", torch.ones(()), persistent=kind != "caches")
    layer.register_forward_hook(_hook(kind))
    config = {"heterogeneity": {"schedule": plan}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    try:
        for batch in handle.for_engine(engine).dataloader(batches(plan, 3, False)):
            engine.backward(engine(**batch).loss)
            engine.step()
            if kind == "between steps":
                layer.seen.add_(1)
    except HeteroError as error:
        assert engine.global_steps == 0  # the first step is not taken
        return str(error)
    finally:
        handle.undo()
    return ""


def _hook(kind: str) -> Any:
    def treat(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if kind in ("counts", "caches"):
            layer.seen += 1
        elif kind == "follows the batch":
            layer.seen.lerp_(output.detach().mean().to(layer.seen), 0.5)
        elif kind == "replaces it":
            layer.seen = layer.seen * 2
        elif kind == "writes what was there":
            layer.seen.copy_(torch.ones(()))
        return output * layer.seen.clone()

    return treat
