"""``"tile_tokens"``: MLPs and the loss computed tile by tile train as one process does without tiles.

Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hetero.errors import ModelError
from tests.integration.pipelines.test_pipelines import (
    errors_against_one_process,
    made_model,
    pipeline,
    plan_of,
    sequence_stage,
)
from tests.integration.tiny import (
    UNEVEN_2,
    adam,
    assert_same_parameters,
    batches,
    compute_in,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed, run_ranks

TILE = 5  # of 3:1 of the batches' tokens; the smaller shard gets empty tiles
_IDLE_2 = {**UNEVEN_2, "groups": [{**UNEVEN_2["groups"][0], "tokens": [1]}, {**UNEVEN_2["groups"][1], "tokens": [0]}]}


@pytest.mark.parametrize(
    ("stage", "schedule", "checkpointing"),
    [
        pytest.param(3, UNEVEN_2, True, id="ZeRO-3, recomputed"),
        pytest.param(2, UNEVEN_2, False, id="ZeRO-2", marks=pytest.mark.slow),
        pytest.param(1, _IDLE_2, True, id="ZeRO-1, a rank without tokens", marks=pytest.mark.slow),
    ],
)
def test_training_in_tiles_equals_one_process_without(
    stage: int, schedule: dict[str, Any], checkpointing: bool
) -> None:
    run_deepspeed(_check_training, 2, stage, schedule, checkpointing)


def _check_training(rank: int, stage: int, schedule: dict[str, Any], checkpointing: bool) -> None:
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.model.tiles import Tiles

    whole, expected = batches(3), llama()
    losses, norms = train_on_one_process(expected, [[batch] for batch in whole])
    handle, model, widest = ds_hetero.register(), llama(), [0, 0]
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    config = ds_config(stage, schedule)
    config["heterogeneity"]["tile_tokens"] = TILE
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    for place, module in enumerate((model.model.layers[0].mlp.down_proj, model.lm_head)):
        module.register_forward_hook(_noting(widest, place))
    ours, own_norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        widest[:] = 0, 0  # the self-check, at the first batch, runs a piece whole
        outputs = engine(**batch)
        assert outputs.logits.shape[1] == 0
        engine.backward(outputs.loss)
        engine.step()
        ours.append(outputs.loss.item())
        own_norms.append(float(engine.get_global_grad_norm()))
    assert all(0 < tokens <= TILE for tokens in widest), widest
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_norms, norms, rtol=1e-5, atol=0)
    assert_same_parameters(parameters(model, stage), parameters(expected))
    assert isinstance(handle.registry.find(model).sequences._forward_wrapper.tiles, Tiles)
    handle.undo()
    assert all("forward" not in vars(layer.mlp) for layer in model.model.layers)


def _noting(widest: list[int], place: int) -> Any:
    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        widest[place] = max(widest[place], output.shape[1])

    return note


def test_a_checkpointed_layer_computes_its_tiles_twice_and_not_three_times() -> None:
    """Its own recomputation ends where the MLP begins; it ran all tiles but one, which were then computed again."""
    from ds_hetero.frameworks.transformers.model.tiles import Tiles

    tiled, plain = llama(), llama()
    for model in (tiled, plain):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    tokens = [0] * len(tiled.model.layers)

    def counting(layer: int) -> Any:
        def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            tokens[layer] += output.shape[1]

        return count

    for number, layer in enumerate(tiled.model.layers):
        layer.mlp.up_proj.register_forward_hook(counting(number))
    (batch,) = batches(1)
    length = batch["input_ids"].shape[1]
    tiles = Tiles(tiled, tiled.model, TILE)
    tiles.begin((length,))
    for _ in range(2):  # what a backward unpacks once can be had again in the next
        loss = tiled(**batch).loss
        loss.backward(retain_graph=True)
        assert set(tokens) == {2 * length}
        loss.backward()
        assert set(tokens) == {3 * length}
        tokens[:] = [0] * len(tokens)
        plain(**batch).loss.backward()
    for ours, expected in zip(tiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad / 2, expected.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_every_kind_of_stage_of_a_pipeline_trains_in_tiles() -> None:
    plan = plan_of(
        pipeline(1, 2, {"ranks": [0, 1], "layers": [0, 4], "inner": "tensor"}),
        pipeline(1, 2, {"ranks": [4], "layers": [0, 2]}, sequence_stage([2, 3], [2, 4], [3, 1], [3, 1])),
    )
    for worst, widest in run_deepspeed(_check_stages, 5, plan):
        assert worst < 1e-12
        assert 0 < widest <= TILE, widest


def _check_stages(rank: int, plan: dict[str, Any]) -> tuple[float, int]:
    import ds_hetero

    compute_in(torch.float64)
    model, widest = made_model({}, False), [0]

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # evaluation has no tiles of MLPs
            widest[0] = max(widest[0], output.shape[1])

    for module in (model.lm_head, *(layer.mlp.down_proj for layer in model.model.layers)):
        module.register_forward_hook(note)
    section = {"tile_tokens": TILE}
    worst, _ = errors_against_one_process(ds_hetero.register(), plan, {}, model=model, section=section)
    return worst, widest[0]


def test_what_a_model_does_to_its_logits_is_in_the_loss_of_a_tile() -> None:
    run_ranks(_check_scaled_logits, 2, nccl_rules=False)


def _check_scaled_logits(rank: int) -> None:
    """Granite divides its logits; its hybrid has MLPs of another name and layers that carry a state."""
    import ds_hetero
    from tests.integration.models.test_recurrent import batch_of, make, schedule_of

    losses = []
    for tiles in ({}, {"tile_tokens": 16}):
        model = make("GraniteMoeHybrid").float()
        model.logits_scaling = 3.0
        handle = ds_hetero.register()
        section = {"schedule": schedule_of(model, "plain", (3, 1)), "verify": "off", **tiles}
        handle.registry.prepare(model, {"heterogeneity": section}, {})
        (shard,) = handle.dataloader([batch_of("plain")])
        loss = model(**shard).loss
        loss.backward()
        losses.append([float(loss), *(float(p.grad.norm()) for p in model.parameters())])
        handle.undo()
    torch.testing.assert_close(*losses, rtol=2e-5, atol=1e-7)


def test_a_model_without_plain_mlps_is_refused() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    from ds_hetero.frameworks.transformers.model.tiles import Tiles

    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = MixtralForCausalLM(config)
    with pytest.raises(
        ModelError, match='"tile_tokens": 4: MixtralForCausalLM does not have a decoder with plain MLPs'
    ):
        Tiles(model, model.model, 4)
