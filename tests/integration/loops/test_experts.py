"""A job whose experts are divided among ranks trains as one process does, with real DeepSpeed and transformers.

Budget: 60 s.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_hetero.errors import ConfigError, HeteroError, ModelError
from tests.integration.tiny import (
    CLIP,
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    adam,
    batches,
    checkpoint_activations,
    ds_config,
    llama,
    mean_over_ranks,
    train_on_one_process,
)
from tests.integration.trainer.test_trainer import make_trainer, ranks
from tests.support import run_deepspeed

STEPS = 4
# A large eps keeps rounding near zero from becoming a step of full size.
BF16_OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
RTOL_BF16 = 5e-2  # of a parameter's change, as in zero/test_half_without_zero.py: gradients of bf16 have 8 bits
_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
# Family: configuration class, model class, changes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2, **_ROUTER}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8, **_ROUTER},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 9,
            "attn_implementation": "eager",
        },
    ),
    "deepseek": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
}


def mixture(family: str = "mixtral", **more: Any) -> Any:
    """A tiny mixture of experts, the same on every rank."""
    import transformers

    config_class, model_class, changes = FAMILIES[family]
    base = llama().config.to_dict()
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: base[name] for name in (*shared, "vocab_size", "max_position_embeddings")}
    config = getattr(transformers, config_class)(**{**sizes, "attn_implementation": "sdpa", **changes, **more})
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config)


def config_of(stage: int, schedule: Any, experts: Any, **more: Any) -> dict[str, Any]:
    config = ds_config(stage, schedule, **more)
    config["heterogeneity"]["experts"] = experts
    return config


def assert_same_model(engine: Any, expected: nn.Module, rtol: float = 1e-5) -> None:
    """Every parameter that this rank has, experts' parts included, within ``rtol`` of its norm."""
    parts = vars(engine.module)["_ds_hetero_experts"]
    wanted = dict(expected.named_parameters())
    assert parts.parts
    for name, parameter in engine.module.named_parameters():
        value, ours = wanted[name].detach(), whole_value(parameter)
        if name in parts.parts:
            value = parts.parts[name].cut(value, parts.rank)
        assert ours.shape == value.shape, name
        norm = float(value.norm()) or 1.0  # biases are zero at first
        error = float((ours - value).norm()) / norm
        assert error <= rtol, f"{name} is off by {error:.2e}"


def whole_value(parameter: nn.Parameter) -> torch.Tensor:
    """The value of a parameter, gathered on every rank where ZeRO-3 has partitioned it."""
    import deepspeed

    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


# Ranks, ZeRO stage, schedule, experts, options.
CASES: dict[str, tuple[int, int, Any, Any, dict[str, Any]]] = {
    "stage 0": (2, 0, UNEVEN_2, [3, 1], {}),
    "stage 1": (2, 1, UNEVEN_2, [1, 3], {"steps_of": 2}),
    "stage 2, a rank without experts": (2, 2, ONE_GROUP_2, [1, 0], {}),
    "stage 0, no clipping": (2, 0, ONE_GROUP_2, "equal", {"gradient_clipping": 0.0}),
    "stage 0, accumulation": (2, 0, UNEVEN_2, [0, 1], {"steps_of": 2}),
    "stage 2, a rank without tokens": (4, 2, UNEVEN_4, [2, 1, 0, 1], {"steps_of": 2}),
    "stage 1, unequal owners": (4, 1, UNEVEN_4, [0, 5, 1, 0], {"zero_partition": [1, 0, 2, 3]}),
    "stage 3": (2, 3, UNEVEN_2, [3, 1], {"steps_of": 2}),
    "stage 3, a rank without experts": (2, 3, ONE_GROUP_2, [0, 1], {"checkpointing": False}),
    "stage 3, unequal owners": (4, 3, UNEVEN_4, [2, 1, 0, 1], {"zero_partition": [1, 2, 2, 3]}),
    "checkpointed layers": (2, 1, UNEVEN_2, [3, 1], {"checkpointing": False}),
    "reentrant checkpoints": (2, 0, UNEVEN_2, [3, 1], {"checkpointing": True}),
    "qwen3 moe": (2, 1, UNEVEN_2, [1, 2], {"family": "qwen3 moe"}),
    "gpt-oss": (2, 0, UNEVEN_2, [1, 3], {"family": "gpt-oss"}),
    "deepseek": (2, 2, {**UNEVEN_2, "num_kv_heads": 4}, [3, 1], {"family": "deepseek"}),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_training_equals_one_process(case: tuple[int, int, Any, Any, dict[str, Any]]) -> None:
    world_size, *rest = case
    run_deepspeed(_train, world_size, *rest, nccl_rules=True)


def _train(rank: int, stage: int, schedule: Any, experts: Any, options: dict[str, Any]) -> None:
    import deepspeed

    import ds_hetero

    options = dict(options)
    family, steps_of = options.pop("family", "mixtral"), options.pop("steps_of", 1)
    reentrant, owners = options.pop("checkpointing", None), options.pop("zero_partition", None)
    handle = ds_hetero.register()
    model = mixture(family)
    if reentrant is not None:
        checkpoint_activations(model, reentrant)
        model.train()
    config = config_of(stage, schedule, experts, gradient_accumulation_steps=steps_of, **options)
    if owners is not None:
        config["heterogeneity"]["zero_partition"] = owners
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    whole = batches(STEPS * steps_of)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(mean_over_ranks(loss))
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if at_boundary:
            norms.append(engine.get_global_grad_norm())

    expected = mixture(family)
    if reentrant:  # with it, transformers loses the gradients of router losses on one process, too
        checkpoint_activations(expected, reentrant)
        expected.train()
    steps = [whole[i : i + steps_of] for i in range(0, len(whole), steps_of)]
    clip = config["gradient_clipping"] or 1e9
    expected_losses, expected_norms = one_process(expected, steps, clip)
    np.testing.assert_allclose(np.array(losses).reshape(-1, steps_of).mean(1), expected_losses, rtol=1e-5)
    if stage:  # DeepSpeed keeps no norm without ZeRO
        np.testing.assert_allclose(np.array(norms, dtype=float), expected_norms, rtol=1e-5)
    assert_same_model(engine, expected)


def one_process(model: nn.Module, steps: list[list[Any]], clip: float) -> tuple[list[float], list[float]]:
    """`train_on_one_process`, with another norm to clip to."""
    from unittest import mock

    with mock.patch("tests.integration.tiny.CLIP", clip):
        return train_on_one_process(model, steps)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_load_under_other_shares_and_are_those_of_one_process(tmp_path: Path, stage: int) -> None:
    run_deepspeed(_save_and_load, 2, str(tmp_path), stage)


def _save_and_load(rank: int, folder: str, stage: int) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    whole = batches(4)

    def build(experts: Any) -> Any:
        model = mixture()
        config = config_of(stage, UNEVEN_2, experts, zero={"stage3_gather_16bit_weights_on_model_save": True})
        return deepspeed.initialize(model=model, optimizer=adam(model), config=config)[0]

    def run(engine: Any, part: list[Any]) -> None:
        for batch in handle.for_engine(engine).dataloader(part, batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()

    expected = mixture()
    train_on_one_process(expected, [[batch] for batch in whole])

    engine = build([3, 1])
    run(engine, whole[:2])
    engine.save_checkpoint(folder, tag="two")
    with pytest.raises(ModelError, match="the state_dict of one rank has a part"):
        engine.module.state_dict()
    engine.save_16bit_model(f"{folder}/one-file", "weights.bin")
    torch.distributed.barrier()
    halfway = mixture()
    halfway.load_state_dict(torch.load(f"{folder}/one-file/weights.bin"))
    assert_same_model(engine, halfway, rtol=0)
    if stage < 3:  # ZeRO-3's model has no weights outside of DeepSpeed's contexts
        with handle.for_engine(engine).gathered_experts():
            if rank == 0:
                engine.module.save_pretrained(f"{folder}/weights")
        torch.distributed.barrier()
        assert_same_model(engine, type(expected).from_pretrained(f"{folder}/weights"), rtol=0)
    run(engine, whole[2:])
    assert_same_model(engine, expected)
    engine.destroy()

    for experts in ([3, 1], [1, 3], [0, 1]):
        engine = build(experts)
        engine.load_checkpoint(folder, tag="two")
        assert_same_model(engine, halfway, rtol=0)
        run(engine, whole[2:])
        assert_same_model(engine, expected)
        engine.destroy()


BF16_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 1": (1, 1, {}),
    "stage 2, accumulation": (2, 2, {}),
    "stage 3": (3, 1, {}),
    "stage 1, summed in fp32": (1, 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
}


@pytest.fixture(scope="module")
def bf16_experts() -> dict[str, dict[str, Any]]:
    by_case: dict[str, dict[str, Any]] = run_deepspeed(_bf16, 2)[0]
    return by_case


@pytest.mark.parametrize("case", BF16_CASES)
def test_bf16_trains_experts_as_one_process_in_bf16(case: str, bf16_experts: dict[str, dict[str, Any]]) -> None:
    """Experts move as those of one process in bf16 do; what differs is rounding on shards (see RTOL_BF16)."""
    trained = bf16_experts[case]
    start = {name: p.detach().to(torch.bfloat16).float() for name, p in mixture().named_parameters()}
    expected = _on_one_process_in_bf16(BF16_CASES[case][1])
    assert trained
    for name, weights in trained.items():
        value = expected[name]
        moved = float((value - start[name]).norm()) + 1e-4 * float(value.norm())
        error = float((torch.from_numpy(weights) - value).norm())
        assert error / moved < RTOL_BF16, f"{name} is off by {error / moved:.1e} of its change"


def _on_one_process_in_bf16(steps_of: int) -> dict[str, torch.Tensor]:
    """Return the weights after steps of one process in bf16, whose optimizer holds masters in fp32."""
    model = mixture().to(torch.bfloat16).train()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), **BF16_OPTIONS)
    whole = batches(2 * steps_of)
    for number, batch in enumerate(whole):
        (model(**batch, use_cache=False).loss / steps_of).backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.float()
            masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
            parameter.grad = None
        if (number + 1) % steps_of == 0:
            nn.utils.clip_grad_norm_(masters.values(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.data.copy_(masters[name].detach())
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def _bf16(rank: int) -> dict[str, dict[str, Any]]:
    """Train every case, and return the experts of both ranks."""
    import deepspeed

    import ds_hetero

    trained: dict[str, dict[str, Any]] = {}
    for case, (stage, steps_of, more) in BF16_CASES.items():
        handle = ds_hetero.register()
        model = mixture().train()
        optimizer = torch.optim.AdamW(model.parameters(), **BF16_OPTIONS)
        config = config_of(
            stage, UNEVEN_2, [3, 1], gradient_accumulation_steps=steps_of, bf16={"enabled": True}, **more
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for batch in handle.dataloader(batches(2 * steps_of), batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()
        weights = {}
        for name, part in vars(engine.module)["_ds_hetero_experts"].trained.items():
            assert part.parameter.dtype == torch.bfloat16
            pieces: list[Any] = [None, None]
            torch.distributed.all_gather_object(pieces, part.parameter.detach().float())
            weights[name] = torch.cat(pieces).numpy()
        trained[case] = weights
        engine.destroy()
        handle.undo()
    return trained


def test_frozen_experts_pass_gradients_on_and_load_under_other_shares(tmp_path: Path) -> None:
    run_deepspeed(_frozen, 2, str(tmp_path))


def _frozen(rank: int, folder: str) -> None:
    import deepspeed

    import ds_hetero

    def frozen() -> Any:
        model = mixture()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    def build(experts: Any) -> Any:
        model = frozen()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(2, UNEVEN_2, experts))[0]

    handle = ds_hetero.register()
    engine, expected = build([1, 4]), frozen()
    whole = batches(2)
    for batch in handle.dataloader(whole, batches="same"):
        engine.backward(engine(**batch).loss)
        engine.step()
    train_on_one_process(expected, [[batch] for batch in whole])
    assert_same_model(engine, expected)
    for experts in ([0, 1], [2, 1]):  # a rank without experts saves, too
        engine.save_checkpoint(folder, tag="saved")
        engine.destroy()
        engine = build(experts)
        engine.load_checkpoint(folder, tag="saved")
        assert_same_model(engine, expected)


# Two ranks are two replicas under it.
ONE_RANK_EACH = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0], "tokens": [1], "heads": [4]}],
}
# Changes of the configuration, changes of the section, error, words of its text.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[HeteroError], str]] = {
    "shards inside nodes": (
        {"zero_optimization": {"stage": 3}},
        {"zero_within": "node"},
        ConfigError,
        '"zero_within" is not tried with it',
    ),
    "offloaded weights": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {},
        ConfigError,
        "its weights are not offloaded",
    ),
    "fp16": ({"fp16": {"enabled": True}}, {}, ConfigError, "training in 16 bits"),
    "bf16 without ZeRO": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        {},
        ConfigError,
        "a norm that lacks the experts",
    ),
    "re-planning": ({}, {"replan": {"enabled": True}}, ConfigError, "re-planning is not tried with it"),
    "elastic jobs": ({}, {"elastic": {"every_steps": 1}}, ConfigError, "elastic jobs do not move experts"),
    "one weight": ({}, {"experts": [1]}, ConfigError, "has 1 weights, \\[1.0\\], but the job has 2 ranks"),
    "no weight": ({}, {"experts": [0, 0]}, ConfigError, "and not only zeros"),
    "another word": ({}, {"experts": "even"}, ConfigError, '"equal", "by_memory", "by_speed", or a list'),
    "replicas on ZeRO-3": (
        {"zero_optimization": {"stage": 3}},
        {"schedule": ONE_RANK_EACH},
        ConfigError,
        "several replicas divide experts under ZeRO 0 to 2 alone",
    ),
    "a replica without experts": (
        {},
        {"experts": [1, 0], "schedule": ONE_RANK_EACH},
        ConfigError,
        "replica 1, rank 1, has no experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name_on_every_rank(name: str) -> None:
    assert run_deepspeed(_refused, 2, name) == [True, True]


def _refused(rank: int, name: str) -> bool:
    import deepspeed

    import ds_hetero

    changes, section, error, words = REFUSED[name]
    ds_hetero.register()
    model = mixture()
    config = config_of(1, UNEVEN_2, [1, 1]) | changes
    config["heterogeneity"] |= section
    with pytest.raises(error, match=words):
        deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    return True


def test_experts_in_no_group_of_the_optimizer_are_refused_by_name() -> None:
    """They would count in the norm, by which the others are clipped."""
    assert run_deepspeed(_in_no_group, 2) == [True, True]


def _in_no_group(rank: int) -> bool:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    model = mixture()
    others = [parameter for name, parameter in model.named_parameters() if "down_proj" not in name]
    optimizer = torch.optim.AdamW(others)
    with pytest.raises(ConfigError, match="down_proj needs gradients, but is in no parameter group"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(1, UNEVEN_2, [1, 1]))
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_is_skipped_if_an_expert_has_a_gradient_that_is_not_finite(stage: int) -> None:
    assert run_deepspeed(_infinite_expert, 2, stage) == [True, True]


def _infinite_expert(rank: int, stage: int) -> bool:
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), mixture()
    config = config_of(stage, UNEVEN_2, [1, 1])
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    (shard,) = handle.dataloader(batches(1), batches="same")
    engine.backward(engine(**shard).loss)
    optimizer = engine.optimizer
    assert not optimizer.has_overflow()
    optimizer.squares_elsewhere = lambda: float("nan")
    return optimizer.has_overflow()


def test_the_trainer_on_zero_3_is_refused_by_name() -> None:
    assert ranks(_trainer_on_zero_3, 2) == [True, True]


def _trainer_on_zero_3(rank: int) -> bool:
    import ds_hetero

    ds_hetero.register()
    model = mixture()  # before TrainingArguments, after which transformers would partition it
    ds = config_of(3, UNEVEN_2, [3, 1], train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    options = {"num_samples": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    trainer = make_trainer(ds, 2, model=model, **options)
    with pytest.raises(ConfigError, match="on ZeRO-3 is tried in a loop of your own alone"):
        trainer.train()
    return True


def test_a_second_engine_of_one_model_is_refused_by_name() -> None:
    assert run_deepspeed(_second_engine, 2) == [True, True]


def _second_engine(rank: int) -> bool:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    model = mixture()
    for matches in ("", "gives the experts of a model one engine"):
        with pytest.raises(ConfigError, match=matches) if matches else contextlib.nullcontext():
            deepspeed.initialize(model=model, optimizer=adam(model), config=config_of(1, UNEVEN_2, [3, 1]))
    return True
