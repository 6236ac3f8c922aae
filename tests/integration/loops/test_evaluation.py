"""Evaluation over shards in a loop of one's own: one process's losses and logits, the memory of training, no trace.

Budget: 40 s.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    batches,
    collate,
    ds_config,
    llama,
    samples,
    train_on_one_process,
)
from tests.support import run_deepspeed

SHARDED = {"evaluation": "sharded"}


def start(model: Any, stage: int, schedule: Any, **section: Any) -> tuple[Any, Any]:
    """Handle and engine."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    config = ds_config(stage, None, heterogeneity={"schedule": schedule, **section}, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return handle, engine


def adapted(model: Any) -> Any:
    """With an adapter to be trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def packed() -> dict[str, Tensor]:
    """Documents of 9, 3 and 17 tokens in one row."""
    lengths = (9, 3, 17)
    rows = [
        {name: entry[:length] for name, entry in row.items()} for row, length in zip(samples(3), lengths, strict=True)
    ]
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat([torch.cat([torch.tensor([-100]), row["input_ids"][1:]]) for row in rows])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


def evaluated() -> list[dict[str, Tensor]]:
    """Plain, padded, packed and unlabelled batches, and one with fewer tokens than there are ranks."""
    plain, padded = batches(2)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][1, 30:], padded["labels"][1, 30:] = 0, -100
    short = {name: entry[:, -1:] for name, entry in batches(1)[0].items()}
    short = {"input_ids": torch.cat([short["input_ids"]] * 2, 1), "labels": torch.cat([short["labels"]] * 2, 1)}
    return [plain, padded, packed(), {"input_ids": plain["input_ids"]}, short]


@pytest.mark.parametrize(
    ("world_size", "stage", "schedule", "kind"),
    [
        pytest.param(2, 1, UNEVEN_2, "", id="2 ranks, stage 1"),
        pytest.param(4, 3, UNEVEN_4, "", id="a rank without tokens, stage 3"),
        pytest.param(2, 2, ONE_GROUP_2, "lora", id="LoRA, stage 2", marks=pytest.mark.slow),
        pytest.param(2, 2, UNEVEN_2, "tiles", id="tiles, stage 2"),
        pytest.param(4, 3, UNEVEN_2, "lora", id="two replicas, LoRA, stage 3", marks=pytest.mark.slow),
    ],
)
def test_evaluation_amid_a_step_equals_one_process(world_size: int, stage: int, schedule: Any, kind: str) -> None:
    run_deepspeed(_check_evaluation, world_size, stage, schedule, kind)


def _check_evaluation(rank: int, stage: int, schedule: Any, kind: str) -> None:
    make = (lambda: adapted(llama())) if kind == "lora" else llama
    section = {**SHARDED, **({"tile_tokens": 7} if kind == "tiles" else {})}
    model, twin = make(), make()
    handle, engine = start(model, stage, schedule, **section)
    whole, losses = batches(4), []
    for number, batch in enumerate(handle.dataloader(whole, batches="same")):
        loss = engine(**batch).loss
        engine.backward(loss)
        if number == 0:  # amid an accumulation
            before = _state_of_training(handle)
            _evaluate(handle, engine, twin)
            engine.train()
            assert _state_of_training(handle) == before
        engine.step()
        losses.append(loss.item())
    expected, _ = train_on_one_process(twin, [whole[:2], whole[2:]], adam_of_trained(twin))
    np.testing.assert_allclose([np.mean(losses[:2]), np.mean(losses[2:])], expected, rtol=1e-5)


def _state_of_training(handle: Any) -> tuple[Any, ...]:
    """What an evaluation is to leave as it is: batches of the step, its tokens, random numbers, losses."""
    model = handle._trained.sequences
    step = model.clock._step
    random = torch.get_rng_state().numpy().tobytes()
    losses = model.losses
    return id(losses.latest_positions), step.tokens, step.length, random, losses._is_scaled, len(model._observers)


def adam_of_trained(model: Any) -> Any:
    """`adam` of the parameters that are trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


@torch.no_grad()
def _evaluate(handle: Any, engine: Any, twin: Any) -> None:
    engine.eval()
    twin.eval()
    for batch in handle.dataloader(evaluated(), batches="same"):
        ours, theirs = engine(**batch), twin(**batch, use_cache=False)  # with a cache it does not look for documents
        held = [weight for group in handle.schedule.groups for weight in group.tokens if weight]
        is_short = batch["input_ids"].shape[1] < len(held)
        if "labels" in batch:
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        assert is_short == ("logits" in list(ours))  # nothing is put together before it is read
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        assert type(ours).__name__ == type(theirs).__name__ and "logits" in ours
        torch.testing.assert_close(ours.logits[real], theirs.logits[real], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours["logits"], ours.to_tuple()[int("labels" in batch)])
    whole = batches(1)[0]
    with handle.unsharded():
        torch.testing.assert_close(engine(**whole).loss, twin(**whole).loss)
        assert "logits" in list(engine(**whole))
    with handle.sharded():
        (shard,) = handle.dataloader([whole], batches="same")
        assert "shift_labels" in shard and shard["input_ids"].shape[1] < whole["input_ids"].shape[1]
        torch.testing.assert_close(engine(**shard).loss, twin(**whole).loss, rtol=1e-5, atol=1e-6)
    prompt = whole["input_ids"][:, :9]
    generated = engine.module.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, twin.generate(input_ids=prompt, max_new_tokens=4, do_sample=False))
    twin.train()


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that were made inside and are alive; ``peak``, the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize("tiles", [None, 32])
def test_an_evaluation_takes_no_more_memory_than_a_step(tiles: int | None) -> None:
    for of_step, of_evaluation, of_whole in run_deepspeed(_peaks, 2, tiles):
        assert of_evaluation <= of_step
        assert of_whole > of_evaluation


def _peaks(rank: int, tiles: int | None) -> tuple[int, int, int]:
    """Most bytes of a forward and backward, of an evaluation over shards, and of one of whole sequences."""
    model = llama(vocab_size=512, max_position_embeddings=256)
    section = {**SHARDED, **({} if tiles is None else {"tile_tokens": tiles}), "verify": "off"}
    handle, engine = start(model, 2, UNEVEN_2, **section)
    rows = batches(2, length=240)
    peaks = []
    for batch in handle.dataloader(rows[:1], batches="same"):
        with Live() as live:
            loss = engine(**batch).loss
            engine.backward(loss)
            del loss
        peaks.append(live.peak)
        engine.step()
    engine.eval()
    for context in (contextlib.nullcontext, handle.unsharded):
        with torch.no_grad(), context(), Live() as live:
            engine(**rows[1]).loss.item()
        peaks.append(live.peak)
    return peaks[0], peaks[1], peaks[2]


def test_batches_and_modules_that_cannot_be_evaluated_over_shards_are_refused() -> None:
    first, second = run_deepspeed(_give_unequal_batches, 2)
    assert first == second
    assert "a sharded call needs the same whole batch on all ranks of a replica" in first
    first, second = run_deepspeed(_ask_for_shards_of_samples, 2)
    assert first == second
    assert '"sharded" splits the sequences of an evaluation over ranks, but LlamaForCausalLM runs whole' in first


def _give_unequal_batches(rank: int) -> str:
    from ds_hetero.errors import HeteroError

    _, engine = start(llama(), 1, UNEVEN_2, **SHARDED)
    engine.eval()
    with torch.no_grad(), pytest.raises(HeteroError) as caught:
        engine(**collate(samples(3)[rank : rank + 2]))
    return str(caught.value)


def _ask_for_shards_of_samples(rank: int) -> str:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    ds_hetero.register()
    model = llama()
    config = {**ds_config(1, None, heterogeneity={"batch": [2, 1], **SHARDED}), "sequence_parallel_size": 1}
    with pytest.raises(HeteroError) as caught:
        deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    return str(caught.value)
