"""LoRA beside experts that are divided among ranks, and on these experts: trained, saved and loaded as on one process.

Budget: 30 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.errors import ConfigError, HeteroError, ModelError
from tests.integration.loops.test_experts import assert_same_model, config_of, mixture, one_process
from tests.integration.sweep import double_casts
from tests.integration.tiny import (
    ONE_GROUP_2,
    UNEVEN_2,
    adam,
    batches,
    mean_over_ranks,
    train_on_one_process,
)
from tests.support import run_deepspeed

STEPS = 3
RTOL = 1e-10  # in fp64; a step of Adam divides by roots of squares, which widens differences of 1e-15
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
WEIGHTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
NO_ROUTER_LOSS = {"output_router_logits": False, "router_aux_loss_coef": 0.0}

# Family, ZeRO stage, schedule, experts by rank of 5 (gpt-oss: 4), adapters, micro-batches of a step.
CASES: dict[str, tuple[str, int, Any, list[int], dict[str, Any], int]] = {
    "attention, stage 0": ("mixtral", 0, UNEVEN_2, [3, 2], ATTENTION, 1),
    "attention, stage 2": ("mixtral", 2, ONE_GROUP_2, [5, 0], ATTENTION, 2),
    "experts, stage 0": ("mixtral", 0, UNEVEN_2, [3, 2], {**ATTENTION, **WEIGHTS}, 1),
    "experts, stage 1, a rank with one": ("mixtral", 1, UNEVEN_2, [4, 1], {**ATTENTION, **WEIGHTS}, 2),
    "experts, stage 2, a rank without": ("mixtral", 2, ONE_GROUP_2, [0, 5], {**ATTENTION, **WEIGHTS}, 1),
    "transposed weights": ("gpt-oss", 1, UNEVEN_2, [3, 1], {**ATTENTION, **WEIGHTS}, 1),
    "other ranks and alphas": (
        "mixtral",
        2,
        UNEVEN_2,
        [2, 3],
        {**ATTENTION, **WEIGHTS, "rank_pattern": {"experts.down_proj": 3}, "use_rslora": True},
        1,
    ),
}


def adapted(family: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """A tiny mixture of experts with adapters that change what it computes, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    changes = NO_ROUTER_LOSS if family == "mixtral" else {}
    model = mixture(family, **changes).to(dtype)
    model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    torch.manual_seed(1)
    config = LoraConfig(r=2, init_lora_weights="gaussian", **options)
    model = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:  # zero at first
            parameter.data = 0.1 * torch.randn_like(parameter)
    return model


def test_adapters_train_beside_and_on_divided_experts_as_on_one_process() -> None:
    for errors in run_deepspeed(_train, 2, nccl_rules=True):
        assert errors.keys() == CASES.keys()
        assert not any(errors.values()), errors


def _train(rank: int) -> dict[str, str]:
    """Return by case how training differs from that of one process."""
    with double_casts():
        return {name: _differences(*case) for name, case in CASES.items()}


def _differences(
    family: str, stage: int, schedule: Any, experts: list[int], options: dict[str, Any], steps_of: int
) -> str:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = adapted(family, options)
    # DeepSpeed computes norms in fp32, so that clipping would round all gradients. Saved runs below are clipped.
    options_of_run = {"gradient_accumulation_steps": steps_of, "gradient_clipping": 0.0}
    config = config_of(stage, schedule, experts, **options_of_run)
    config["heterogeneity"]["checks"] = {"compare_every": "off"}  # it does not expect fp64 inside of norms
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    whole = batches(STEPS * steps_of)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(mean_over_ranks(loss))
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if at_boundary and stage:  # DeepSpeed keeps no norm without ZeRO
            norms.append(float(engine.get_global_grad_norm()))

    expected = adapted(family, options)
    steps = [whole[i : i + steps_of] for i in range(0, len(whole), steps_of)]
    expected_losses, expected_norms = one_process(expected, steps, 1e9)
    try:
        np.testing.assert_allclose(np.array(losses).reshape(-1, steps_of).mean(1), expected_losses, rtol=RTOL)
        np.testing.assert_allclose(norms, expected_norms if stage else [], rtol=1e-6)
        assert_same_model(engine, expected, rtol=RTOL)
    except AssertionError as error:
        return str(error) or "differs"
    finally:
        engine.destroy()
        handle.undo()
    return ""


def test_adapters_are_saved_as_peft_saves_them_and_load_under_other_shares(tmp_path: Path) -> None:
    run_deepspeed(_save_and_load, 2, str(tmp_path))


def _save_and_load(rank: int, folder: str) -> None:
    import deepspeed
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    import ds_hetero

    handle = ds_hetero.register()
    whole, options = batches(4), {**ATTENTION, **WEIGHTS}

    def build(experts: Any, stage: int) -> Any:
        model = adapted("mixtral", options, torch.float32)
        return deepspeed.initialize(model=model, optimizer=adam(model), config=config_of(stage, UNEVEN_2, experts))[0]

    def run(engine: Any, part: list[Any]) -> None:
        for batch in handle.for_engine(engine).dataloader(part, batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()

    expected = adapted("mixtral", options, torch.float32)
    train_on_one_process(expected, [[batch] for batch in whole])

    for stage, shares in ((2, ([3, 2], [0, 5])), (1, ([4, 1], [2, 3]))):
        engine = build(shares[0], stage)
        run(engine, whole[:2])
        engine.save_checkpoint(folder, tag=f"{stage}")
        engine.save_checkpoint(folder, tag=f"{stage}-adapters", exclude_frozen_parameters=True)
        with handle.for_engine(engine).gathered_experts(frozen=False):
            if rank == 0:
                state = engine.module.state_dict()
                assert not [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]
                engine.module.save_pretrained(f"{folder}/adapters-{stage}")
        torch.distributed.barrier()
        base = mixture(**NO_ROUTER_LOSS)
        base.set_experts_implementation("eager")
        halfway = PeftModel.from_pretrained(base, f"{folder}/adapters-{stage}", is_trainable=True)
        assert_same_model(engine, halfway, rtol=0)
        saved = load_file(f"{folder}/adapters-{stage}/adapter_model.safetensors")
        assert saved.keys() == get_peft_model_state_dict(expected).keys()
        run(engine, whole[2:])
        assert_same_model(engine, expected)
        engine.destroy()

        for tag, more in ((f"{stage}", {}), (f"{stage}-adapters", {"load_module_strict": False})):
            engine = build(shares[1], stage)
            engine.load_checkpoint(folder, tag=tag, **more)
            assert_same_model(engine, halfway, rtol=0)
            run(engine, whole[2:])
            assert_same_model(engine, expected)
            engine.destroy()


# Adapters, error, words of its text.
REFUSED: dict[str, tuple[str, dict[str, Any], type[HeteroError], str]] = {
    "adapters on biases": (
        "gpt-oss",
        {**ATTENTION, "target_parameters": ["experts.gate_up_proj_bias"]},
        ModelError,
        "has an adapter on gate_up_proj_bias, which has 2 dimensions",
    ),
    "adapters on experts alone": ("mixtral", WEIGHTS, ConfigError, "trains experts only, or adapters on them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_cannot_be_divided_are_refused_by_name(name: str) -> None:
    assert run_deepspeed(_refused, 2, name) == [True, True]


def _refused(rank: int, name: str) -> bool:
    import deepspeed

    import ds_hetero

    family, options, error, words = REFUSED[name]
    ds_hetero.register()
    model = adapted(family, options, torch.float32)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(error, match=words):
        deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config_of(1, UNEVEN_2, [1, 1]))
    return True
