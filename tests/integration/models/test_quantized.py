"""LoRA and QLoRA, on bases quantized by bitsandbytes: on uneven ranks as on one process, or refused by name.

`parity_table` is the table of docs/adapters.md, made of what is trained here.

Budget: 5 s; 80 s more when slow.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.tiny import (
    UNEVEN_2,
    assert_same_parameters,
    batches,
    collate,
    ds_config,
    llama,
    parameters,
    samples,
    train_on_one_process,
)
from tests.support import run_deepspeed

METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}
SHARINGS = {"tokens": "tokens 3:1", "batches": "batches [3, 1]"}
STAGES = range(4)
REFUSED = (("nf4", "dora", 3),)  # and 8-bit bases
BASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_quant_storage": torch.float32,
    },
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
STEPS, ROWS = 3, 4


def parity_table() -> str:
    """Whether adapters are exact or refused, by base, method, sharing and stage."""
    names = {"fp32": "fp32", "nf4": "4-bit (nf4, double quantization)"}
    head = ["base", "method", "sharing", *(f"ZeRO {stage}" for stage in STAGES)]
    lines = [head, ["---"] * len(head)]
    for base, method, sharing in product(names, METHODS, SHARINGS):
        cells = ["refused" if (base, method, stage) in REFUSED else "exact" for stage in STAGES]
        name = f"`{method}`" if method == "modules_to_save" else {"lora": "LoRA", "dora": "DoRA"}.get(method, "rsLoRA")
        lines.append([names[base], name, SHARINGS[sharing], *cells])
    lines.append(["8-bit", "any", "any", *["refused"] * len(STAGES)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return str(folder)


def _model(weights: str, base: str, method: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = {"quantization_config": BitsAndBytesConfig(**BASES[base])} if BASES[base] else {}
    model = AutoModelForCausalLM.from_pretrained(weights, **quantized, device_map={"": "cpu"}, dtype=torch.float32)
    torch.manual_seed(1)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **METHODS[method])
    )
    return adapted.train()  # loaded models are in evaluation, in which bitsandbytes packs 4-bit weights on some CPUs


def test_a_look_at_losses_leaves_weights_of_4_bits_as_training_reads_them(weights: str) -> None:
    """On CPUs with instructions for bf16 bitsandbytes packs them anew in evaluation, for good."""
    assert run_deepspeed(_look, 1, weights) == [(2 * 7, True)]


def _look(rank: int, weights: str) -> tuple[int, bool]:
    """How many layers of 4 bits there are, and whether all weights are as before."""
    from bitsandbytes.nn import Linear4bit

    from ds_hetero.engine.outside_runs import in_evaluation

    model = _model(weights, "nf4", "lora").train()
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    before = [layer.weight.data.view(torch.uint8).clone() for layer in layers]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    with in_evaluation(model):
        model(**batches(1)[0])
    after = [layer.weight.data.view(torch.uint8) for layer in layers]
    return len(layers), all(map(torch.equal, after, before))


def _expected(rank: int, weights: str, base: str) -> dict[str, Any]:
    """By method: norms and trained values."""
    results = {}
    for method in METHODS:
        model = _model(weights, base, method)
        _, norms = train_on_one_process(model, [[batch] for batch in batches(STEPS, ROWS)], _adam(model))
        results[method] = norms, parameters(model)
    return results


def _adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def _config(stage: int, sharing: str) -> dict[str, Any]:
    config = ds_config(stage, UNEVEN_2, train_micro_batch_size_per_gpu=ROWS)
    if sharing == "batches":
        config["heterogeneity"] = {"batch": [3, 1]}
        del config["train_micro_batch_size_per_gpu"]
    return config


def _trained(rank: int, weights: str, base: str, sharing: str) -> dict[tuple[int, str], Any]:
    """By stage and method: norms and trained values."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    results = {}
    for stage, method in product(STAGES, METHODS):
        if (base, method, stage) in REFUSED:
            continue
        model = _model(weights, base, method)
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adam(model), config=_config(stage, sharing))
        loader = DataLoader(samples(STEPS * ROWS), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
        norms = []
        for batch in handle.for_engine(engine).dataloader(loader):
            engine.backward(engine(**batch).loss)
            engine.step()
            norms.append(float(engine.get_global_grad_norm() or 0))
        results[stage, method] = norms, parameters(model, stage)
        engine.destroy()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("base", ["fp32", "nf4"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_adapters_train_on_every_stage_as_on_one_process(weights: str, base: str, sharing: str) -> None:
    expected = run_deepspeed(_expected, 1, weights, base)[0]
    for results in run_deepspeed(_trained, 2, weights, base, sharing):
        assert len(results) == len(STAGES) * len(METHODS) - sum(refused == base for refused, _, _ in REFUSED)
        for (stage, method), (norms, trained) in results.items():
            if stage:
                np.testing.assert_allclose(norms, expected[method][0], rtol=1e-5, err_msg=f"{method}, ZeRO-{stage}")
            assert_same_parameters(trained, expected[method][1])


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_does_not_train_exactly_is_refused_at_the_start(weights: str, sharing: str) -> None:
    first, second = run_deepspeed(_refusals, 2, weights, sharing)
    assert first == second
    assert "is 8-bit" in first[0] and "BitsAndBytesConfig(load_in_4bit=True" in first[0]
    assert "DoRA on a 4-bit weight" in first[1] and "Use ZeRO stage 2" in first[1]


def _refusals(rank: int, weights: str, sharing: str) -> list[str]:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    messages = []
    for base, method, stage in (("int8", "lora", 2), ("nf4", "dora", 3)):
        model = _model(weights, base, method)
        with pytest.raises(ds_hetero.ModelError) as caught:
            deepspeed.initialize(model=model, optimizer=_adam(model), config=_config(stage, sharing))
        messages.append(str(caught.value))
    return messages
