"""Pipelines of unequal stages behind an engine of DeepSpeed's train as one process does."""

import itertools

import pytest
import torch
from torch import nn

from tests.integration.tiny import VOCAB, llama
from tests.support import run_deepspeed

LAYERS, HEADS, KV_HEADS = 4, 4, 2


def sequence_stage(ranks, layers, tokens, heads, layout="zigzag"):
    schedule = {"version": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "layout": layout,
                "groups": [{"ranks": list(ranks), "tokens": list(tokens), "heads": list(heads)}]}  # fmt: skip
    return {"ranks": list(ranks), "layers": list(layers), "inner": "sequence", "schedule": schedule}


def plan_of(*pipelines):
    model = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    return {"version": 2, "model": model, "pipelines": list(pipelines)}


def pipeline(size, count, *stages):
    return {"micro_batch_size": size, "micro_batches": count, "stages": list(stages)}


PLANS = {
    "tensor stage and single stages": plan_of(
        pipeline(2, 3, {"ranks": [0, 1], "layers": [0, 3], "inner": "tensor"}, {"ranks": [2], "layers": [3, 4]}),
        pipeline(1, 2, {"ranks": [3], "layers": [0, 1]}, {"ranks": [4], "layers": [1, 4]}),
    ),
    "sequence stage and single stages": plan_of(
        pipeline(2, 3, sequence_stage([0, 1], [0, 3], [3, 1], [3, 1]), {"ranks": [2], "layers": [3, 4]}),
        pipeline(1, 2, {"ranks": [3], "layers": [0, 1]}, {"ranks": [4], "layers": [1, 4]}),
    ),
    "tensor to sequence to single": plan_of(
        pipeline(
            1, 4, {"ranks": [3, 4], "layers": [0, 1], "inner": "tensor"},
            sequence_stage([0, 1], [1, 3], [0, 1], [4, 0]), {"ranks": [2], "layers": [3, 4], "in_flight": 1},
        ),
    ),
    "sequence at the end, an idle rank": plan_of(
        pipeline(2, 2, {"ranks": [0], "layers": [0, 2]}, sequence_stage([1, 2], [2, 4], [1, 2], [4, 0], "contiguous")),
        pipeline(1, 3, {"ranks": [4], "layers": [0, 4]}),
    ),
}  # fmt: skip


def batches(plan, steps, packed):
    """Global batches; labels are missing here and there."""
    generator = torch.Generator().manual_seed(3)
    samples = sum(p["micro_batch_size"] * p["micro_batches"] for p in plan["pipelines"])
    made = []
    for step in range(steps):
        length = 24 + 5 * step
        ids = torch.randint(0, VOCAB, (samples, length), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            cuts = [0, 7, 16, length]
            positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])
            batch["position_ids"] = positions.expand(samples, length).contiguous()
            labels[:, cuts[1:-1]] = -100
        made.append(batch)
    return made


def train_alone(model, steps, optimizer, clip):
    losses, norms = [], []
    for batch in steps:
        logits = model(**{name: entry for name, entry in batch.items() if name != "labels"}, use_cache=False).logits
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def trains_as_one_process(rank, plan, changes, packed=False, lora=False, steps=3):
    import deepspeed

    import ds_hetero

    torch.set_default_dtype(torch.float64)
    handle = ds_hetero.register()
    made = [made_model(changes, lora) for _ in range(2)]
    model, whole = made
    steps = batches(plan, steps, packed)
    losses, norms = train_alone(whole, steps, adamw(trained(whole)), 0.5)
    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": plan}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    worst = 0.0
    for batch, loss, norm in zip(handle.dataloader(steps), losses, norms, strict=True):
        ours = engine(**batch).loss
        engine.backward(ours)
        engine.step()
        worst = max(worst, abs(ours.item() - loss), abs(engine.get_global_grad_norm() - norm))
    assert engine.global_steps == len(steps)
    expected, held = dict(whole.named_parameters()), dict(model.named_parameters())
    names = {"lm_head.weight": "model.embed_tokens.weight"} if changes.get("tie_word_embeddings") else {}
    for name, parameter in held.items():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, (full - expected[names.get(name, name)]).detach().abs().max().item())
    engine.eval()
    whole.eval()
    with torch.no_grad():
        batch = steps[0]
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        logits = whole(**{name: e for name, e in batch.items() if name != "labels"}, use_cache=False).logits
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        worst = max(worst, abs(engine(**batch).loss.item() - wanted.item()))
    return worst, sum(parameter.numel() for parameter in held.values())


def made_model(changes, lora):
    model = llama(**{"num_hidden_layers": LAYERS, **changes}).double()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model = model.double()
    return model.train()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", PLANS)
def test_unequal_stages_train_as_one_process(name, tied):
    outcomes = run_deepspeed(trains_as_one_process, 5, PLANS[name], {"tie_word_embeddings": tied}, tied)
    assert max(worst for worst, _ in outcomes) < 1e-12
    whole = sum(parameter.numel() for parameter in llama(num_hidden_layers=LAYERS).parameters())
    assert all(held < whole for _, held in outcomes[:4])


def test_adapters_are_trained_alone():
    plan = PLANS["sequence stage and single stages"]
    assert max(worst for worst, _ in run_deepspeed(trains_as_one_process, 5, plan, {}, False, True)) < 1e-12
