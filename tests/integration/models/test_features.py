"""What users do besides training: generate, evaluate, adapters, recomputation, accumulation, checkpoints.

Budget: 80 s.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    assert_same_parameters,
    batches,
    checkpoint_activations,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed


def start(model: Any, stage: int = 2, schedule: Any = UNEVEN_2, **more: Any) -> tuple[Any, Any]:
    """Handle and engine."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage, schedule, **more))
    return handle, engine


def train(handle: Any, engine: Any, whole: list[dict[str, Tensor]], **arguments: Any) -> list[float]:
    """Losses of one step per batch."""
    losses = []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch, **arguments).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_generation_and_evaluation_between_steps_equal_one_process() -> None:
    run_deepspeed(_check_generate_and_evaluate, 2)


def _check_generate_and_evaluate(rank: int) -> None:
    model, whole = llama(), batches(4)
    handle, engine = start(model, stage=1)
    losses = train(handle, engine, whole[:2])
    twin = llama()
    twin.load_state_dict(model.state_dict())
    prompt = whole[0]["input_ids"][:, :9]
    expected = twin.generate(prompt, max_new_tokens=8, do_sample=False)
    assert engine.module.training
    assert torch.equal(engine.module.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    engine.eval()
    assert torch.equal(engine.module.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    with torch.no_grad():
        torch.testing.assert_close(engine(**whole[0]).loss, twin(**whole[0]).loss)
        for batch in handle.dataloader(whole[:1]):  # in evaluation the loader gives whole batches
            assert batch["input_ids"].shape == whole[0]["input_ids"].shape and "labels" in batch
    engine.train()
    losses += train(handle, engine, whole[2:])
    expected_losses, _ = train_on_one_process(llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_lora_adapters_train_as_on_one_process() -> None:
    run_deepspeed(_check_lora, 2)


def _check_lora(rank: int) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(3)
        return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    model, twin = adapted(), adapted()
    whole = batches(3)
    losses = train(*start(model, stage=3), whole)
    expected, _ = train_on_one_process(twin, [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_parameters(parameters(model, 3), parameters(twin))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_trains_as_on_one_process(reentrant: bool) -> None:
    run_deepspeed(_check_recomputation, 2, reentrant)


def _check_recomputation(rank: int, reentrant: bool) -> None:
    model, whole = llama(), batches(3)
    checkpoint_activations(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    losses = train(*start(model, stage=2), whole)
    expected, _ = train_on_one_process(twin := llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_parameters(parameters(model, 2), parameters(twin))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_on_the_host_train_as_on_one_process(stage: int) -> None:
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers keeps them on the device")
    run_deepspeed(_check_checkpoints_on_host, 2, stage)


def _check_checkpoints_on_host(rank: int, stage: int) -> None:
    from torch.autograd.graph import save_on_cpu
    from transformers import modeling_utils

    from ds_hetero.frameworks.transformers.model.facts import read_model_facts

    packed = []

    class Unpinned(save_on_cpu):  # memory can be pinned for an accelerator only
        def __init__(self, pin_memory: bool, device_type: str) -> None:
            super().__init__(pin_memory=False, device_type=device_type)
            pack = self.pack_hook
            self.pack_hook = lambda x: packed.append(x.shape) or pack(x)

    modeling_utils.save_on_cpu = Unpinned
    model, whole = llama(), batches(3)
    assert not read_model_facts(model).offloads_checkpoints
    model.activation_checkpointing_enable()
    facts = read_model_facts(model)
    assert facts.checkpointing and not facts.offloads_checkpoints
    model.activation_checkpointing_enable(offload=True)
    assert read_model_facts(model).offloads_checkpoints
    losses = train(*start(model, stage=stage), whole)
    expected, _ = train_on_one_process(twin := llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(twin))
    inputs = [shape for shape in packed if len(shape) == 3]
    assert {shape[-1] for shape in inputs} == {model.config.hidden_size} and len(packed) >= 2 * len(whole)


def test_micro_batches_weighted_by_tokens_train_as_on_one_process() -> None:
    run_deepspeed(_check_accumulation, 2)


def _check_accumulation(rank: int) -> None:
    """The token-weighted mean over three micro-batches, as one process computes it on all of them."""
    model, whole = llama(), batches(6, batch_size=1)
    handle, engine = start(model, stage=2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=3)
    shards = list(handle.dataloader(whole, batches="same"))
    twin = llama()
    optimizer = adam(twin)
    for first in (0, 3):
        items = handle.count_items(shards[first : first + 3])
        ours = 0.0
        for batch in shards[first : first + 3]:
            loss = handle.loss(engine(**batch), batch, items)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            ours += loss.item()
        optimizer.zero_grad()
        step = {name: torch.cat([batch[name] for batch in whole[first : first + 3]]) for name in whole[0]}
        loss = twin(**step).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
        np.testing.assert_allclose(float(engine.get_global_grad_norm()), float(norm), rtol=1e-5)


def test_bf16_trains_as_on_one_process() -> None:
    run_deepspeed(_check_bf16, 2)


def _check_bf16(rank: int) -> None:
    whole = batches(3)
    losses = train(*start(llama(), stage=2, bf16={"enabled": True}), whole)
    expected, _ = train_on_one_process(llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-2)  # 8 bits of mantissa


def test_rounded_gradients_of_a_ring_train_as_the_exact_ones_but_for_their_rounding() -> None:
    """fp32, whose self-check compares exact gradients; the first loss has seen no gradient, the others few of them."""
    run_deepspeed(_check_rounded_gradients, 2)


def _check_rounded_gradients(rank: int) -> None:
    losses = []
    for ring_gradients in ("fp32", "bf16"):
        section = {"schedule": UNEVEN_2, "ring_gradients": ring_gradients}
        handle, engine = start(llama(), stage=2, heterogeneity=section)
        losses.append(train(handle, engine, batches(3)))
        handle.undo()
    exact, rounded = losses
    assert exact[0] == rounded[0] and exact[1:] != rounded[1:]
    np.testing.assert_allclose(rounded, exact, rtol=1e-3)


@pytest.mark.parametrize("by", ["configuration", pytest.param("loop", marks=pytest.mark.slow)])
def test_autocast_trains_as_on_one_process(by: str) -> None:
    run_deepspeed(_check_autocast, 2, by)


def _check_autocast(rank: int, by: str) -> None:
    """By "torch_autocast" of DeepSpeed, and by a context around a loop."""
    whole, autocast = batches(3), torch.autocast("cpu", torch.bfloat16)
    if by == "configuration":
        losses = train(*start(llama(), stage=2, torch_autocast={"enabled": True, "dtype": "bfloat16"}), whole)
    else:
        with autocast:
            losses = train(*start(llama(), stage=2), whole)
    with autocast:
        expected, _ = train_on_one_process(llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-2)  # 8 bits of mantissa


def test_models_that_were_not_prepared_stay_as_they_were() -> None:
    run_deepspeed(_check_other_models, 2)


def _check_other_models(rank: int) -> None:
    """A model that was not prepared, and an engine without a section, are as they would be without this engine."""
    import deepspeed

    reference, whole = llama(), batches(2)
    handle, engine = start(llama(), stage=1)
    assert reference.config._attn_implementation == "sdpa"
    assert engine.module.config._attn_implementation == "ds_hetero"
    copied = copy.deepcopy(engine.module).eval()
    with torch.no_grad():
        expected = reference(**whole[0]).loss
        torch.testing.assert_close(copied(**whole[0]).loss, expected)
    assert engine.module.training and not copied.model.training
    other, *_ = deepspeed.initialize(model=reference, config=ds_config(0, None, train_batch_size=4))
    torch.testing.assert_close(other(**whole[0]).loss, expected)
    train(handle, engine, whole)
    handle.undo()
    assert engine.module.config._attn_implementation == "sdpa"


def test_a_shard_is_never_taken_for_a_whole_sequence() -> None:
    run_deepspeed(_give_shards, 2)


def _give_shards(rank: int) -> None:
    from ds_hetero.errors import BatchError, ConfigError, ModelError

    reference, whole = llama().eval(), batches(3)
    model = llama()
    handle, engine = start(model, stage=1)
    loader = iter(handle.dataloader(whole))
    shard = next(loader)
    with pytest.raises(BatchError, match=r"this LlamaForCausalLM is not trained by ds_hetero.*Give it whole batches"):
        reference(**shard)
    with handle.sharded(), pytest.raises(BatchError, match="this LlamaModel is not trained by ds_hetero"):
        reference.model(shard["input_ids"], None, shard["position_ids"])
    copies = {name: entry.clone() for name, entry in shard.items()}
    for given in (copies, {"input_ids": copies["input_ids"]}):
        with pytest.raises(BatchError, match="this LlamaForCausalLM is not trained by ds_hetero"):
            reference(**given)
    with pytest.raises(BatchError, match=r"the tokens of a shard without its position_ids.*A loop that puts"):
        engine(input_ids=copies["input_ids"])
    engine.eval()
    for given in (shard, copies):
        with pytest.raises(BatchError, match=r"takes whole batches here.*with handle.sharded\(\):"):
            engine(**given)
    with torch.no_grad(), handle.sharded():
        logits = engine(**shard).logits
        assert logits.shape[:2] == shard["input_ids"].shape
    torch.testing.assert_close(engine(**whole[0]).loss, reference(**whole[0]).loss)
    engine.train()
    with handle.unsharded(), pytest.raises(BatchError, match="takes whole batches here"):
        engine(**shard)
    engine.backward(handle.loss(engine(**shard), shard))
    engine.step()

    # Layers that are called directly, and a decoder that is called past our hooks, as OPT's head does.
    hidden = model.model.embed_tokens(shard["input_ids"])
    rotary = model.model.rotary_emb(hidden, shard["position_ids"])
    with pytest.raises(ModelError, match=r"attention runs outside of the forwards .* Call the model itself"):
        model.model.layers[0](hidden, position_embeddings=rotary)
    with handle.unsharded():
        model.model.layers[0](hidden, position_embeddings=rotary)
    for hook in list(model.model._forward_pre_hooks):
        del model.model._forward_pre_hooks[hook]
    with pytest.raises(ModelError, match="LlamaModel was given a shard, but runs its attention outside of the module"):
        engine(**shard)
    with pytest.raises(ModelError, match="attention runs outside of the forwards"):
        engine(**copies)

    handle.undo()
    with pytest.raises(ConfigError, match="its handle was undone"):
        next(loader)


def test_a_copy_of_a_shard_of_embeddings_is_known() -> None:
    run_deepspeed(_give_embeddings, 2)


def _give_embeddings(rank: int) -> None:
    from ds_hetero.errors import BatchError

    reference, model = llama().eval(), llama()
    handle, engine = start(model, stage=1)
    embed = reference.get_input_embeddings()
    whole = [{"inputs_embeds": embed(b["input_ids"]).detach(), "labels": b["labels"]} for b in batches(2)]
    for shard in handle.dataloader(whole, batches="same"):
        copy_of_shard = {"inputs_embeds": shard["inputs_embeds"].clone()}
        with pytest.raises(BatchError, match="this LlamaForCausalLM is not trained by ds_hetero"):
            reference(**copy_of_shard)
        with pytest.raises(BatchError, match="the tokens of a shard without its position_ids"):
            engine(**copy_of_shard)
        engine.eval()
        with pytest.raises(BatchError, match="takes whole batches here"):
            engine(**copy_of_shard)
        engine.train()
        engine.backward(handle.loss(engine(**shard), shard))
        engine.step()
    assert reference(inputs_embeds=whole[0]["inputs_embeds"]).logits.shape[1] == whole[0]["labels"].shape[1]


def test_a_copied_placeholder_of_a_rank_without_tokens_is_known() -> None:
    run_deepspeed(_give_placeholders, 4)


def _give_placeholders(rank: int) -> None:
    from ds_hetero.errors import BatchError

    handle, _ = start(llama(), stage=1, schedule=UNEVEN_4)
    (shard,) = handle.dataloader(batches(1), batches="same")
    with pytest.raises(BatchError, match="this LlamaForCausalLM is not trained by ds_hetero"):
        llama()(**{name: entry.clone() for name, entry in shard.items()})


def test_calls_of_the_handle_know_their_engine() -> None:
    run_deepspeed(_train_actor_and_critic, 2)


def _train_actor_and_critic(rank: int) -> None:
    """Two engines with different schedules in turns, beside a reference engine without a section."""
    import deepspeed

    from ds_hetero.errors import ConfigError

    whole = batches(2)
    handle, actor = start(llama(), stage=1)
    critic, *_ = deepspeed.initialize(model=(model := llama()), optimizer=adam(model), config=ds_config(1, ONE_GROUP_2))
    reference, *_ = deepspeed.initialize(model=llama(), config=ds_config(0, None, train_batch_size=4))
    with pytest.raises(ConfigError, match=r"handle.dataloader does not know .*handle.for_engine\(engine\).dataloader"):
        handle.dataloader(whole)
    assert handle.for_engine(actor).schedule != handle.for_engine(critic).schedule
    expected, _ = train_on_one_process(llama(), [[batch] for batch in whole])
    losses = {actor: [], critic: []}
    loaders = [zip(handle.for_engine(engine).dataloader(whole), strict=False) for engine in (actor, critic)]
    for of_actor, of_critic, batch in zip(*loaders, handle.for_engine(reference).dataloader(whole), strict=True):
        assert batch["input_ids"].shape == whole[0]["input_ids"].shape
        for engine, (shard,) in ((actor, of_actor), (critic, of_critic)):
            loss = handle.for_engine(engine).loss(engine(**shard), shard)
            with pytest.raises(ConfigError, match=r"handle\.loss does not know"):
                handle.loss(None, shard)
            engine.backward(loss)
            engine.step()
            losses[engine].append(loss.item())
    for engine in losses:
        np.testing.assert_allclose(losses[engine], expected, rtol=1e-5)
    actor.destroy()
    assert handle.dataloader(whole).replica is handle.for_engine(critic).replica
    handle.undo()
    with pytest.raises(ConfigError, match="an engine that ds_hetero does not know"):
        handle.for_engine(actor)


def test_a_folder_that_one_rank_cannot_write_to_is_refused_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = run_deepspeed(_save_in_vain, 2, str(tmp_path))
    assert first == second
    assert first.startswith("the checkpoint cannot be saved: on rank 1, ") and "Not a directory" in first
    assert not (tmp_path / "latest").exists()


def _save_in_vain(rank: int, folder: str) -> str:
    from ds_hetero.errors import CheckpointError

    _, engine = start(llama(), stage=1)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(f"{folder}/file/below" if rank else folder, "first")
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_resumes_under_another_schedule(stage: int, tmp_path: Path) -> None:
    whole = batches(6)
    first = run_deepspeed(_save, 2, stage, str(tmp_path), whole[:3])[0]
    again = run_deepspeed(_resume, 2, stage, str(tmp_path), whole[3:])[0]
    expected, _ = train_on_one_process(twin := llama(), [[batch] for batch in whole])
    np.testing.assert_allclose(first + again[0], expected, rtol=1e-5)
    assert_same_parameters(again[1], parameters(twin))


def _save(rank: int, stage: int, folder: str, whole: list[dict[str, Tensor]]) -> list[float]:
    handle, engine = start(llama(), stage)
    losses = train(handle, engine, whole)
    engine.save_checkpoint(folder)
    return losses


def _resume(rank: int, stage: int, folder: str, whole: list[dict[str, Tensor]]) -> Any:
    model = llama()
    handle, engine = start(model, stage, ONE_GROUP_2)
    assert engine.load_checkpoint(folder)[0] is not None
    losses = train(handle, engine, whole)
    if rank == 0 and stage:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        saved = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert saved["model.embed_tokens.weight"].shape == (64, 32)
    return losses, parameters(model, stage)


def test_dead_rank_is_reported_by_the_others() -> None:
    with pytest.raises(AssertionError) as caught:
        run_deepspeed(_one_dies, 4, timeout_s=60)
    assert str(caught.value).count("PeerError: rank 2 gone: killed, or crashed without a last word") == 3


def _one_dies(rank: int) -> None:
    import os

    handle, engine = start(llama(), 2, UNEVEN_4)
    for step, batch in enumerate(handle.dataloader(batches(3), batches="same")):
        if rank == 2 and step == 1:
            os._exit(7)
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
