"""What scripts add to training: terms of the loss, fused losses, noise. Exact with the engine's help, or refused.

Budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integration.loops.test_losses import sgd
from tests.integration.loops.test_plain_loop import recipe
from tests.integration.loops.test_replicas import REPLICAS
from tests.integration.tiny import UNEVEN_2, UNEVEN_4, batches, collate, ds_config, llama, parameters, samples
from tests.support import run_deepspeed

WEIGHT, PENALTY = 0.1, 1e-2


def _z(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square()


def _train_on_one_process(where: str) -> tuple[list[float], dict[str, np.ndarray]]:
    model = llama()
    optimizer, losses = sgd(model), []
    for batch in batches(2):
        optimizer.zero_grad()
        outputs = model(**batch)
        counted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
        term = _z(outputs.logits)[counted if where == "labels" else torch.ones_like(counted)].mean()
        loss = outputs.loss + WEIGHT * term + PENALTY * model.lm_head.weight.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters(model)


@pytest.mark.parametrize(("schedule", "where", "stage"), [(0, "labels", 2), (0, "tokens", 0), (1, "tokens", 1)])
def test_a_term_made_by_the_handle_trains_as_on_one_process(schedule: int, where: str, stage: int) -> None:
    losses, expected = _train_on_one_process(where)
    for ours, trained in run_deepspeed(_train, (2, 4)[schedule], (UNEVEN_2, UNEVEN_4)[schedule], where, stage):
        np.testing.assert_allclose(ours, losses, rtol=1e-6)
        for name, value in expected.items():
            np.testing.assert_allclose(trained[name], value, atol=1e-6, err_msg=name)


def _train(rank: int, schedule: Any, where: str, stage: int) -> Any:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=sgd(model), config=ds_config(stage, schedule, gradient_clipping=0.0)
    )
    losses = []
    for batch in handle.dataloader(batches(2), batches="same"):
        outputs = engine(**batch)
        counted = None if where == "labels" else torch.ones_like(batch["input_ids"])
        loss = handle.loss(outputs, batch) + WEIGHT * handle.mean(_z(outputs.logits), batch, counted)
        loss = loss + PENALTY * handle.mean(model.lm_head.weight.square().sum(), batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses, parameters(model, stage)


def test_a_term_of_a_rank_is_refused() -> None:
    first, *others = run_deepspeed(_add_terms, 2)
    assert all(other == first for other in others)
    of_logits, of_parameters, scalar, shape = first
    for text in (of_logits, of_parameters):
        assert "a part computed from this rank's shard, which is not" in text and "handle.mean(per_token" in text
    assert "handle.mean takes a scalar that is the same on all ranks" in scalar
    assert "handle.mean takes one value per token of the shard" in shape


def _add_terms(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=ds_config(1, UNEVEN_2))
    (batch,) = handle.dataloader(batches(1), batches="same")
    texts = []
    for term in (lambda out: _z(out.logits).mean(), lambda out: model.lm_head.weight.square().sum()):
        outputs = engine(**batch)
        loss = handle.loss(outputs, batch) / 2 + WEIGHT * term(outputs)
        with pytest.raises(HeteroError) as caught:
            engine.backward(loss)
        texts.append(str(caught.value))
    for values in (_z(outputs.logits).mean(), _z(outputs.logits)[:, :-1]):
        with pytest.raises(HeteroError) as caught:
            handle.mean(values, batch)
        texts.append(str(caught.value))
    engine.backward(2 * handle.loss(outputs, batch) ** 2)  # a function of the engine's loss alone
    return [text.partition(", [B, s] =")[0] for text in texts]  # which differ by rank


def test_a_small_term_of_a_rank_beside_the_recipe_is_refused() -> None:
    first, second = run_deepspeed(_add_to_recipe, 2)
    assert first == second
    local_term, weighed_term = first
    assert "the loss given to backward differs between the ranks of a replica" in local_term
    assert "handle.loss or handle.mean" in weighed_term and "Take the loss itself from handle.loss" in weighed_term


def _add_to_recipe(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ConfigError

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=ds_config(1, UNEVEN_2))
    (batch,) = handle.dataloader(batches(1), batches="same")
    with pytest.raises(ConfigError) as caught:
        engine.backward(recipe(engine, batch) + 1e-2 * _z(engine(**batch).logits).mean())
        engine.step()
    engine.zero_grad()
    engine.backward(recipe(engine, batch) + 1e-2 * model.lm_head.weight.square().sum())  # the same on all ranks
    engine.step()
    outputs = engine(**batch)
    with pytest.raises(ConfigError) as mixed:
        engine.backward(recipe(engine, batch) + 1e-2 * handle.mean(_z(outputs.logits), batch))
    return [str(caught.value), str(mixed.value)]


def test_replicas_with_their_own_batches_need_the_number_of_items() -> None:
    (text, *_), *_ = run_deepspeed(_mean_over_replicas, 4)
    assert "handle.mean needs num_items" in text and "handle.count_items" in text


def _mean_over_replicas(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ConfigError

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(1, REPLICAS)
    del config["train_micro_batch_size_per_gpu"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    batch = next(iter(handle.dataloader([collate(samples(8))], batches="same")))
    with pytest.raises(ConfigError) as caught:
        handle.mean(_z(engine(**batch).logits), batch)
    return [str(caught.value)]


def test_deepspeeds_fused_tiled_loss_is_refused_on_shards_and_works_on_whole_batches() -> None:
    first, second = run_deepspeed(_tile, 2)
    assert first == second
    assert "TiledFusedLogitsLoss gives the LM head a gradient of another scale" in first[0]
    assert first[1] > 0


def _tile(rank: int) -> tuple[str, float]:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=ds_config(1, UNEVEN_2))

    def fused(hidden: Tensor, labels: Tensor) -> Tensor:
        def loss(head: Any, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(head.lm_head(x), y, reduction="sum")

        return TiledFusedLogitsLoss.apply(loss, model, hidden, labels, None, 2, [model.lm_head.weight], "sum")

    (batch,) = handle.dataloader(batches(1), batches="same")
    inputs = {name: entry for name, entry in batch.items() if name != "shift_labels"}
    with pytest.raises(ModelError) as caught:
        fused(model.model(**inputs).last_hidden_state, batch["shift_labels"])
    engine.eval()
    whole = batches(1)[0]
    return str(caught.value), float(fused(model.model(whole["input_ids"]).last_hidden_state, whole["labels"]))


def test_noise_on_embeddings_is_that_of_the_whole_sequence() -> None:
    bound = 5.0 / (37 * 32) ** 0.5
    for largest, alpha in run_deepspeed(_add_noise, 2):
        assert 0.97 * bound < largest <= bound and alpha == 5.0


def _add_noise(rank: int) -> tuple[float, float]:
    """Return the largest noise on a shard, and the amplitude that the model has afterwards."""
    import deepspeed
    from transformers.integrations.neftune import activate_neftune

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=ds_config(1, UNEVEN_2))
    embeddings = model.get_input_embeddings()
    without: list[Tensor] = []
    embeddings.register_forward_hook(lambda module, args, output: without.append(output.detach()))
    activate_neftune(model, 5.0)
    noisy: list[Tensor] = []
    embeddings.register_forward_hook(lambda module, args, output: noisy.append(output.detach()))
    engine.train()
    for batch in handle.dataloader(batches(1), batches="same"):
        engine(**batch)
    assert noisy[-1].shape[1] == (28, 9)[rank]
    return float((noisy[-1] - without[-1]).abs().max()), embeddings.neftune_noise_alpha
