"""QLoRA beside experts that bitsandbytes has packed in 4 bits and that are divided among ranks, as on one process.

Budget: 20 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.errors import ModelError
from tests.integration.loops.test_expert_adapters import ATTENTION, NO_ROUTER_LOSS
from tests.integration.loops.test_experts import config_of, mixture, whole_value
from tests.integration.tiny import UNEVEN_2, batches, mean_over_ranks, train_on_one_process
from tests.support import run_deepspeed

STEPS = 3
# ZeRO stage, experts by rank of 5, whether constants are quantized, too, packed weights.
CASES: dict[str, tuple[int, list[int], bool, tuple[str, ...]]] = {
    "stage 0": (0, [3, 2], False, ("gate_up_proj", "down_proj")),
    "stage 1, quantized constants": (1, [4, 1], True, ("gate_up_proj", "down_proj")),
    "stage 2, a rank without experts": (2, [0, 5], True, ("down_proj",)),
    "stage 3": (3, [2, 3], True, ("gate_up_proj", "down_proj")),
    "linear layers alone": (1, [3, 2], False, ()),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    mixture(hidden_size=64, **NO_ROUTER_LOSS).save_pretrained(folder)
    return str(folder)


def quantized(weights: str, compress: bool, packed: tuple[str, ...], adapters: dict[str, Any] = ATTENTION) -> Any:
    """A tiny mixture of experts with linear layers and experts in 4 bits, and with adapters."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        weights, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    model.set_experts_implementation("eager")
    experts = [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]
    for module in experts:
        for name in packed:
            replace_parameter_4bit(module, name, compress_statistics=compress, quant_type="nf4")
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **adapters)).train()


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def test_packed_experts_stay_divided_while_adapters_train_as_on_one_process(weights: str, tmp_path: Path) -> None:
    for errors in run_deepspeed(_train, 2, weights, str(tmp_path), nccl_rules=True):
        assert errors.keys() == CASES.keys()
        assert not any(errors.values()), errors


def _train(rank: int, weights: str, folder: str) -> dict[str, str]:
    """Return by case how training differs from that of one process."""
    return {
        name: _differences(weights, f"{folder}/{number}", *case) for number, (name, case) in enumerate(CASES.items())
    }


def _differences(
    weights: str, folder: str, stage: int, experts: list[int], compress: bool, packed: tuple[str, ...]
) -> str:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = quantized(weights, compress, packed)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config_of(stage, UNEVEN_2, experts))
    whole = batches(STEPS)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(mean_over_ranks(loss))
        engine.step()
        if stage:  # DeepSpeed keeps no norm without ZeRO
            norms.append(float(engine.get_global_grad_norm()))

    expected = quantized(weights, compress, packed)
    expected_losses, expected_norms = train_on_one_process(expected, [[batch] for batch in whole], adam(expected))
    trained = {name: p for name, p in expected.named_parameters() if p.requires_grad}
    assert trained
    try:
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        np.testing.assert_allclose(norms, expected_norms if stage else [], rtol=1e-5)
        ours = {name: whole_value(p).clone() for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            assert float((ours[name] - parameter).detach().norm() / parameter.detach().norm()) < 1e-5, name
    except AssertionError as error:
        return str(error) or "differs"
    if packed:
        with pytest.raises(ModelError, match="is quantized, and its constants are not gathered"):
            engine.save_checkpoint(folder, tag="whole")
    engine.save_checkpoint(folder, tag="adapters", exclude_frozen_parameters=True)
    engine.destroy()

    model = quantized(weights, compress, packed)
    other_shares = experts[::-1]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam(model), config=config_of(stage, UNEVEN_2, other_shares)
    )
    engine.load_checkpoint(folder, tag="adapters", load_module_strict=False)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(whole_value(parameter), ours[name]), name
    engine.destroy()
    handle.undo()
    return ""


def test_what_cannot_be_cut_by_expert_is_refused_on_every_rank(tmp_path: Path) -> None:
    assert run_deepspeed(_refused, 2, str(tmp_path)) == [True, True]


def _refused(rank: int, folder: str) -> bool:
    import deepspeed

    import ds_hetero

    odd = mixture(hidden_size=32, intermediate_size=63, **NO_ROUTER_LOSS)  # 32 x 63 values are 31.5 blocks of 64
    odd.save_pretrained(f"{folder}/odd-{rank}")
    mixture(hidden_size=64, **NO_ROUTER_LOSS).save_pretrained(f"{folder}/even-{rank}")
    of_whole_name = {"target_parameters": ["model.layers.0.mlp.experts.down_proj"]}  # PEFT knows packed weights by it
    cases = {
        "a block has values of two experts": quantized(f"{folder}/odd-{rank}", False, ("down_proj",)),
        "has an adapter on down_proj, which is quantized": quantized(
            f"{folder}/even-{rank}", False, ("gate_up_proj", "down_proj"), {**ATTENTION, **of_whole_name}
        ),
    }
    for words, model in cases.items():
        ds_hetero.register()
        with pytest.raises(ModelError, match=words):
            deepspeed.initialize(model=model, optimizer=adam(model), config=config_of(1, UNEVEN_2, [1, 1]))
    return True
