"""Sharded calls: losses of whole sequences train as one process does, and results are those of the whole batch.

Budget: 40 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.integration.tiny import (
    CLIP,
    LENGTH,
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    VOCAB,
    adam,
    assert_same_parameters,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS = 3
# Ranks, ZeRO stage, schedule (of two ranks on four: two replicas).
CASES: dict[str, tuple[int, int, Any]] = {
    "stage 0, contiguous, heads on one rank": (2, 0, ONE_GROUP_2),
    "stage 2, zigzag": (2, 2, UNEVEN_2),
    "stage 3, a rank without tokens": (4, 3, UNEVEN_4),
}
SLOW: dict[str, tuple[int, int, Any]] = {
    "stage 1, two replicas": (4, 1, UNEVEN_2),
    "stage 3, two replicas": (4, 3, UNEVEN_2),
    "stage 2, a rank without tokens": (4, 2, UNEVEN_4),
}


def pairs(count: int) -> list[dict[str, Tensor]]:
    """Batches of two preferred rows and two others, padded on the right."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i in range(count):
        ids = torch.randint(3, VOCAB, (4, LENGTH + i), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -4:] = mask[2, -9:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : 7 + i] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def preference_loss(results: Any, reference: Any, mask: Tensor) -> Tensor:
    """DPO's, with penalties on real tokens' hidden states and logits, so that the loss needs every kind of result."""
    ratio = (results.log_probs - reference.log_probs).sum(dim=1)
    chosen, rejected = ratio.chunk(2)
    loss = -F.logsigmoid(0.5 * (chosen - rejected)).mean() + 0.1 * results.loss
    hidden, logits = results.hidden_state[mask.bool()], results.logits[mask.bool()]
    penalty = hidden[:, ::3].square().mean() + 0.01 * logits.logsumexp(-1).square().mean()
    return loss + 0.1 * penalty


def plain_results(model: Any, batch: dict[str, Tensor]) -> Any:
    """What a sharded call returns, by transformers and torch alone."""
    from types import SimpleNamespace

    outputs = model(**batch, output_hidden_states=True)
    log_p = outputs.logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    taken = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0.0)
    return SimpleNamespace(
        loss=-taken.sum() / labels.ne(-100).sum(),  # transformers' own is of single precision
        log_probs=F.pad(taken, (1, 0)),
        hidden_state=outputs.hidden_states[-1],
        logits=outputs.logits,
    )


@pytest.mark.parametrize(
    ("world_size", "stage", "schedule"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_a_preference_loss_trains_as_on_one_process(world_size: int, stage: int, schedule: Any) -> None:
    run_deepspeed(_train, world_size, stage, schedule)


def _train(rank: int, stage: int, schedule: Any) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    config = ds_config(stage, schedule, train_micro_batch_size_per_gpu=4)
    reference, *_ = deepspeed.initialize(model=llama(hidden_act="gelu"), config=ds_config(stage and 3, schedule))
    reference.eval()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    replica = handle.for_engine(engine).replica
    whole = pairs(STEPS * replica.num_replicas)
    losses, norms = [], []
    for batch in whole[replica.replica_id :: replica.num_replicas]:
        with torch.no_grad():
            expected = handle.sharded_call(reference, **batch)
        results = handle.sharded_call(engine, **batch, hidden_state=True, logits=True)
        loss = preference_loss(results, expected, batch["attention_mask"])
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        norms.append(engine.get_global_grad_norm())

    twin, twin_reference = llama(), llama(hidden_act="gelu")
    steps = [whole[i : i + replica.num_replicas] for i in range(0, len(whole), replica.num_replicas)]
    expected_losses, expected_norms = _train_plainly(twin, twin_reference, steps)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    if stage:
        np.testing.assert_allclose(np.array(norms, dtype=float), expected_norms, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(twin))


def _train_plainly(model: Any, reference: Any, steps: list[list[dict[str, Tensor]]]) -> tuple[list[float], list[float]]:
    optimizer = adam(model)
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        with torch.no_grad():
            expected = [plain_results(reference, batch) for batch in step]
        loss = torch.stack(
            [
                preference_loss(plain_results(model, batch), of_reference, batch["attention_mask"])
                for batch, of_reference in zip(step, expected, strict=True)
            ]
        ).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def test_a_classifier_trains_as_on_one_process() -> None:
    run_deepspeed(_train_classifier, 2)


def _train_classifier(rank: int) -> None:
    import deepspeed
    from transformers import LlamaForSequenceClassification

    import ds_hetero

    def classifier() -> Any:
        config = llama().config
        config.num_labels, config.pad_token_id = 3, 0
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config)

    handle, model, twin = ds_hetero.register(), classifier(), classifier()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(2, UNEVEN_2))
    whole = [
        {"input_ids": batch["input_ids"] * batch["attention_mask"], "attention_mask": batch["attention_mask"]}
        | {"labels": torch.tensor([0, 2, 1, i % 3])}
        for i, batch in enumerate(pairs(STEPS))
    ]
    losses = []
    for batch in whole:
        loss = handle.sharded_call(engine, **batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    expected, _ = train_on_one_process(twin, [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_parameters(parameters(model, 2), parameters(twin))
    with pytest.raises(ds_hetero.ModelError, match="has a head that pools over the whole sequence"):
        next(iter(handle.dataloader([pairs(1)[0]])))


def test_results_are_those_of_the_whole_batch_and_bad_input_is_refused_on_all_ranks() -> None:
    run_deepspeed(_check_results, 2)


def _check_results(rank: int) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama().double()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(0, UNEVEN_2))
    twin, batch = llama().double(), pairs(1)[0]
    ours, expected = handle.sharded_call(engine, **batch, hidden_state=True, logits=True), plain_results(twin, batch)
    real = batch["attention_mask"].bool()
    assert ours.logits.shape == expected.logits.shape
    for name in ("loss", "log_probs"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-12, atol=1e-13)
    for name in ("hidden_state", "logits"):
        torch.testing.assert_close(getattr(ours, name)[real], getattr(expected, name)[real], rtol=1e-12, atol=1e-13)
    alone = handle.sharded_call(engine, input_ids=batch["input_ids"])
    assert alone.log_probs is None and alone.logits is None
    with torch.no_grad():  # a model in evaluation is split too, and generate is not
        engine.eval()
        torch.testing.assert_close(handle.sharded_call(engine, **batch).loss, expected.loss)
        prompt = batch["input_ids"][:, :9]
        assert torch.equal(
            model.generate(prompt, max_new_tokens=4, do_sample=False),
            twin.generate(prompt, max_new_tokens=4, do_sample=False),
        )
    with pytest.raises(ds_hetero.BatchError, match="same whole batch on all ranks of a replica, but input_ids by rank"):
        handle.sharded_call(engine, **{**batch, "input_ids": (batch["input_ids"] + rank) % VOCAB})
    with pytest.raises(ds_hetero.BatchError, match="labels of shape"):
        handle.sharded_call(engine, **{**batch, "labels": batch["labels"][:, 1:]})
    with pytest.raises(ds_hetero.ConfigError, match="model that ds_hetero does not split"):
        handle.sharded_call(twin, **batch)
