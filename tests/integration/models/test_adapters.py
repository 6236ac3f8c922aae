"""Every kind of adapter of PEFT, through `deepspeed.initialize`: on two uneven ranks as on one process, or refused.

Budget: 70 s in CI, 5 s in a quick run.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.frameworks.transformers.model.model_checks import ADAPTERS, adapter_problems
from tests.integration.tiny import (
    UNEVEN_2,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
_SMALL = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

# By row of the table, and a word more where it is tried in several ways: arguments of the configuration.
EXACT: dict[str, dict[str, Any]] = {
    "LORA": _LORA,
    "LORA.alpha_pattern": {**_LORA, "alpha_pattern": {"v_proj": 3}},
    "LORA.bias": {**_LORA, "bias": "all"},
    "LORA.ensure_weight_tying": {**_LORA, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "LORA.init_lora_weights gaussian": {**_LORA, "init_lora_weights": "gaussian"},
    "LORA.init_lora_weights mica": {**_LORA, "init_lora_weights": "mica"},
    "LORA.init_lora_weights olora": {**_LORA, "init_lora_weights": "olora"},
    "LORA.init_lora_weights orthogonal": {**_LORA, "init_lora_weights": "orthogonal"},
    "LORA.init_lora_weights pissa": {**_LORA, "init_lora_weights": "pissa"},
    "LORA.kasa_config": {**_SMALL, "kasa_config": {}},
    "LORA.layer_replication": {**_LORA, "layer_replication": [(0, 2), (1, 2)]},
    "LORA.lora_bias": {**_LORA, "lora_bias": True},
    "LORA.modules_to_save": {**_LORA, "modules_to_save": ["lm_head", "embed_tokens"]},
    "LORA.rank_pattern": {**_LORA, "rank_pattern": {"q_proj": 2}},
    "LORA.target_modules": {**_LORA, "target_modules": ["embed_tokens", "q_proj"]},
    "LORA.target_parameters": {**_LORA, "target_modules": [], "target_parameters": ["q_proj.weight"]},
    "LORA.trainable_token_indices": {**_LORA, "trainable_token_indices": [3, 5, 60]},
    "LORA.use_bdlora": {
        **_LORA,
        "use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"], "nblocks": 2},
    },
    "LORA.use_dora": {**_LORA, "use_dora": True},
    "LORA.use_rslora": {**_LORA, "use_rslora": True},
    "LORA.velora_config": {**_LORA, "velora_config": {"num_groups": 4, "init_type": "random"}},
    "ADALORA": {**_LORA, "r": 8, "init_r": 4, "target_r": 2, "total_step": 100},
    "BEFT": {"target_modules": ["q_proj", "v_proj"]},
    "BOFT": {"target_modules": ["q_proj", "v_proj"], "boft_block_size": 4},
    "C3A": {"target_modules": ["q_proj", "v_proj"], "block_size": 4},
    "DEFT": _SMALL,
    "DELORA": {**_SMALL, "init_weights": False},
    "FOURIERFT": {"target_modules": ["q_proj", "v_proj"], "n_frequency": 16, "init_weights": False},
    "FROD": {"target_modules": ["q_proj"], "progressbar": False},
    "GLORA": _SMALL,
    "GRALORA": {**_SMALL, "gralora_k": 2, "init_weights": False},
    "HIRA": {**_SMALL, "init_weights": False},
    "HRA": {**_SMALL, "init_weights": False},
    "IA3": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "LOHA": {**_SMALL, "init_weights": False},
    "LOKR": {**_SMALL, "init_weights": False},
    "MISS": {**_SMALL, "init_weights": False},
    "OFT": {**_SMALL, "r": 0, "oft_block_size": 4},
    "OSF": {"target_modules": ["q_proj", "v_proj"], "effective_rank": 4},
    "PEANUT": _SMALL,
    "PSOFT": _SMALL,
    "RANDLORA": {"r": 4, "target_modules": ["q_proj"]},
    "ROAD": {"target_modules": ["q_proj", "v_proj"], "variant": "road_1", "group_size": 4},
    "SHIRA": _SMALL,
    "SUPERTUNING": {"target_modules": ["q_proj", "v_proj"]},
    "TINYLORA": {**_SMALL, "r": 2, "u": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 5, 60]},
    "UNILORA": {**_SMALL, "theta_d_length": 64},
    "VBLORA": {**_SMALL, "num_vectors": 8, "vector_length": 16, "topk": 2},
    "VERA": {"r": 4, "target_modules": ["q_proj"], "init_weights": False},
    "WAVEFT": {"target_modules": ["q_proj", "v_proj"], "n_frequency": 16},
}
REFUSED: dict[str, dict[str, Any]] = {
    "POLY": {**_SMALL, "task_type": "CAUSAL_LM", "n_tasks": 2, "n_skills": 2, "n_splits": 2},
    "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1},
    "CARTRIDGE": _PROMPT,
    "CPT": {"task_type": "CAUSAL_LM", "cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "LILY": _SMALL,
    "LORA.alora_invocation_tokens": {**_LORA, "task_type": "CAUSAL_LM", "alora_invocation_tokens": [20]},
    "LORA.monteclora_config": {**_LORA, "monteclora_config": {}},
    "LORA.velora_config.init_type": {**_LORA, "velora_config": {"num_groups": 4}},
    "MULTITASK_PROMPT_TUNING": {**_PROMPT, "num_tasks": 2},
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PVERA": {"r": 4, "target_modules": ["q_proj"]},
    "P_TUNING": {**_PROMPT, "encoder_hidden_size": 16},
    "SHADOW": {"r": 4, "task_type": "CAUSAL_LM"},
}


def test_every_kind_of_peft_and_every_setting_of_lora_has_a_row() -> None:
    from peft import LoraConfig, PeftType

    names = {kind.value for kind in PeftType}
    names |= {f"LORA.{field.name}" for field in dataclasses.fields(LoraConfig)}
    assert names == ADAPTERS.keys() - {"LORA.velora_config.init_type"}


def test_what_is_called_exact_is_tried_and_what_can_be_made_is_refused() -> None:
    tried = {name.split()[0] for name in EXACT}
    sizes = {"LORA.r", "LORA.lora_alpha", "LORA.fan_in_fan_out", "LORA.exclude_modules"}
    sizes |= {"LORA.layers_to_transform", "LORA.layers_pattern"}
    assert tried == {name for name, adapter in ADAPTERS.items() if adapter.kind == "exact"} - sizes
    not_made = {name for name, adapter in ADAPTERS.items() if adapter.kind == "refused"} - REFUSED.keys()
    assert all("tried" in ADAPTERS[name].why for name in not_made)


def test_what_a_newer_peft_brings_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Newer:
        peft_type: str = "LORA"
        r: int = 8
        use_something: bool = False

    assert list(adapter_problems({"default": Newer(r=4)})) == []
    (problem,) = adapter_problems({"default": Newer(use_something=True)})
    assert "'default', LORA.use_something=True: no release of PEFT that was tried" in problem
    (problem,) = adapter_problems({"mine": SimpleNamespace(peft_type="SOMETHING")})
    assert problem.startswith("PEFT adapter 'mine', SOMETHING: no release of PEFT")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kinds_that_are_called_exact_train_as_on_one_process() -> None:
    for errors in run_deepspeed(_try, 2, list(EXACT), timeout_s=360):
        assert set(errors) == set(EXACT)
        assert not any(errors.values()), {name: error for name, error in errors.items() if error}


def test_kinds_that_are_called_refused_end_the_start_on_every_rank() -> None:
    first, second = run_deepspeed(_try, 2, list(REFUSED))
    assert first == second
    for name in REFUSED:
        assert re.search(rf"cannot be split over the sequence:\n  - PEFT adapter 'default', {name}\b", first[name]), (
            name
        )
        assert ADAPTERS[name].why in first[name] and "docs/adapters.md" in first[name]


def _try(rank: int, names: list[str]) -> dict[str, str]:
    """By case, in one world: the error, empty for none."""
    import ds_hetero

    warnings.simplefilter("ignore")  # PEFT's, of what is odd about adapters of a tiny model
    handle = ds_hetero.register()
    return {name: _error_of(handle, name) for name in names}


def _error_of(handle: Any, name: str) -> str:
    from ds_hetero.errors import HeteroError

    try:
        _train(handle, name)
    except (AssertionError, HeteroError) as error:
        return str(error)
    return ""


def _train(handle: Any, name: str) -> None:
    import deepspeed

    whole = batches(2)
    model, twin = _adapted(name), _adapted(name)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adam(model), config=ds_config(2, UNEVEN_2))
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    expected_losses, expected_norms = train_on_one_process(twin, [[batch] for batch in whole], _adam(twin))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    assert_same_parameters(parameters(model, 2), parameters(twin))
    engine.destroy()


def _adapted(name: str) -> Any:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.tuners.lora.config import KasaConfig, MontecloraConfig

    kind = name.split()[0].partition(".")[0]
    arguments = {**EXACT, **REFUSED}[name]
    for setting, config in (("kasa_config", KasaConfig), ("monteclora_config", MontecloraConfig)):
        if setting in arguments:
            arguments = {**arguments, setting: config()}
    torch.manual_seed(3)
    return peft.get_peft_model(llama(), PEFT_TYPE_TO_CONFIG_MAPPING[kind](**arguments))


def _adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
