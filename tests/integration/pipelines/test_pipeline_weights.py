"""Models without weights: every rank of the pipelines reads or draws what it holds, and nothing else."""

from pathlib import Path

import pytest
import torch

from tests.integration.pipelines.test_pipelines import (
    ALONE,
    PLANS,
    adamw,
    batches,
    errors_against_one_process,
    made_model,
    of_eight_samples,
    trained,
)
from tests.integration.tiny import compute_in, llama
from tests.support import run_deepspeed


def saved(rank, folder, changes, **options):
    """A folder of transformers that rank 0 has written."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    if rank == 0:
        made_model(changes, False).save_pretrained(folder, **options)
    dist.barrier()
    return folder


def trains_from_a_folder(rank, folder, cases):
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    outcomes = []
    for number, (plan, changes, options) in enumerate(cases):
        at = saved(rank, f"{folder}/{number}", changes, **options)
        outcomes.append(errors_against_one_process(handle, plan, changes, model=ds_hetero.empty_model(at).train()))
    return outcomes


def test_weights_are_read_by_stage(tmp_path):
    cases = [
        (PLANS["tensor stage and single stages"], {"tie_word_embeddings": True}, {"max_shard_size": "30KB"}),
        (PLANS["tensor to sequence to single"], {}, {}),
    ]
    outcomes = run_deepspeed(trains_from_a_folder, 5, str(tmp_path), cases)
    assert len(list(Path(tmp_path, "0").glob("model-*.safetensors"))) > 2
    assert max(worst for of_rank in outcomes for worst, _ in of_rank) < 1e-12


def draws_its_values(rank, folder, plans):
    """Loss of the first step and the whole weights of a model that nobody ever built whole, under every plan."""
    import deepspeed
    from transformers import LlamaForCausalLM

    import ds_hetero

    handle = ds_hetero.register()
    losses = []
    for number, plan in enumerate(plans):
        with torch.device("meta"):
            model = llama(num_hidden_layers=4, tie_word_embeddings=True)
        torch.manual_seed(7)
        config = {"heterogeneity": {"schedule": plan}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
        (batch,) = handle.for_engine(engine).dataloader(batches(plan, 1, False))
        losses.append(engine(**batch).loss.item())
        handle.registry.find_stage(model).save_pretrained(f"{folder}/{number}")
        engine.destroy()
    if rank > 0:
        return losses, None
    models = [LlamaForCausalLM.from_pretrained(f"{folder}/{number}") for number in range(len(plans))]
    return losses, [{name: p.detach().numpy() for name, p in model.named_parameters()} for model in models]


def test_values_are_drawn_alike_under_every_plan(tmp_path):
    plans = [of_eight_samples(PLANS["tensor stage and single stages"]), ALONE]
    losses, weights = run_deepspeed(draws_its_values, 5, str(tmp_path), plans)[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and 4 < losses[0] < 4.4  # ln 64 = 4.16
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[1])
    assert 0.015 < weights[0]["model.layers.2.self_attn.q_proj.weight"].std() < 0.025
    assert (weights[0]["model.norm.weight"] == 1).all()


def is_refused(rank, folder):
    """What is said of folders and models that cannot be used."""
    import deepspeed
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    import ds_hetero
    from ds_hetero.errors import ModelError

    ds_hetero.register()
    at = saved(rank, folder, {})
    plan = of_eight_samples(PLANS["tensor to sequence to single"])
    said = []

    def refused(model):
        config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "heterogeneity": {"schedule": plan}}
        with pytest.raises(ModelError) as caught:
            deepspeed.initialize(model=model(), config=config)
        said.append(str(caught.value))

    refused(lambda: made_model({}, False) if rank == 1 else ds_hetero.empty_model(at))
    refused(lambda: get_peft_model(ds_hetero.empty_model(at), LoraConfig(target_modules=["q_proj"])))
    refused(lambda: ds_hetero.empty_model("/nowhere"))
    whole = load_file(f"{at}/model.safetensors")
    for change in ({"model.layers.2.input_layernorm.weight": None}, {"model.norm.weight": torch.ones(3)}):
        model = ds_hetero.empty_model(at)  # its folder changes behind its back
        torch.distributed.barrier()
        if rank == 0:
            changed = {name: tensor for name, tensor in {**whole, **change}.items() if tensor is not None}
            save_file(changed, f"{at}/model.safetensors", metadata={"format": "pt"})
        torch.distributed.barrier()
        refused(lambda: model)  # noqa: B023
    if rank == 0:
        Path(at, "model.safetensors").unlink()
    torch.distributed.barrier()
    refused(lambda: ds_hetero.empty_model(at))
    return said


def test_what_cannot_be_read_is_refused_by_name_on_every_rank(tmp_path):
    expected = [
        "on ranks [0, 2, 3, 4] of 5",
        "adapters",
        "/nowhere has no config.json",
        "no model.layers.2.input_layernorm.weight",
        "model.norm.weight has shape [3] in the folder and [32] in the model",
        "neither model.safetensors nor",
    ]
    outcomes = run_deepspeed(is_refused, 5, str(tmp_path))
    for texts in outcomes:
        assert len(texts) == len(expected)
        assert all(part in text for part, text in zip(expected, texts, strict=True)), texts
