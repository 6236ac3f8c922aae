"""TRL's trainers that generate train, log and evaluate on uneven ranks as one process per replica does.

Budget: 90 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.test_trainer import make_trainer, one_process, ranks
from tests.integration.test_trl import _TIMES, adapted, reward_model, tokenizer, words
from tests.integration.tiny import UNEVEN_2, UNEVEN_4, assert_same_parameters, ds_config, llama, parameters
from tests.support import run_deepspeed

STEPS, BATCH = 4, 4
_STEP_TIME = "step_time"
_OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 4, "epsilon": 0.02}  # so that ratios are clipped
# What a case sets beside the defaults of `_make`; by DAPO's loss where none is named.
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO from a reference": {"loss_type": "grpo", "beta": 0.3, "model": "far from its reference"},
    "GRPO from a reference, off policy": {
        "beta": 0.3,
        "use_bias_correction_kl": True,
        "model": "far from its reference",
        **_OFF_POLICY,
    },
    "GRPO of an adapter": {"beta": 0.3, "model": "adapted"},
    "GRPO of a new adapter": {"beta": 0.3},
    "GRPO off policy": {"loss_type": "bnpo", "delta": 1.05, "off_policy_mask_threshold": 0.001, **_OFF_POLICY},
    "GRPO of sequences": {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", **_OFF_POLICY},
    "GRPO by cispo": {"loss_type": "cispo", "epsilon_high": 0.01, **_OFF_POLICY},
    "GRPO by sapo": {"loss_type": "sapo", "mask_truncated_completions": True, "scale_rewards": "batch", **_OFF_POLICY},
    "GRPO by luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "scale_rewards": "none"},
    "GRPO by vespo": {"loss_type": "vespo", **_OFF_POLICY},
    "GRPO of uncertain tokens": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "GRPO of adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 4.2, "entropy_coef_delta": 0.05},
    "GRPO of two rewards": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    "GRPO by a reward model": {},
    "GRPO of a stream": {},
    "GRPO that renews its reference": {
        "beta": 0.3,
        "model": "far from its reference",
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
    "RLOO": {},
    "RLOO from a reference": {
        "beta": 0.3,
        "model": "far from its reference",
        "normalize_advantages": True,
        "mask_truncated_completions": True,
        **_OFF_POLICY,
    },
    "RLOO of an adapter": {"beta": 0.3, "model": "adapted", "reward_clip_range": (-0.5, 1.2)},
    "GRPO with activation checkpoints": {"gradient_checkpointing": True, "cast_lm_head_to_fp32": True},
}


def prompts(count: int) -> Any:
    """Of unlike lengths."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": words(5 + i % 4, 3 * i)} for i in range(count)])


class Rewards:
    """Rewards of completions by their tokens and lengths, and all completions that were asked for."""

    __name__ = "even"

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, completion_ids: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
        self.seen.append(completion_ids)
        log_metric("longest", float(max(len(ids) for ids in completion_ids)))
        return [sum(token % 2 == 0 for token in ids) / len(ids) + 0.1 * len(ids) for ids in completion_ids]


def _short(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Not of all completions."""
    return [None if ids[0] % 5 == 0 else -float(len(ids)) for ids in completion_ids]


def _train(rank: int, stage: int | None, schedule: Any, case: str) -> Any:
    """Logs without times, completions, columns of forwards that are trained on, and trained parameters.

    ``stage`` None is without DeepSpeed: one process, or data parallelism.
    """
    import ds_hetero

    options = dict(CASES[case])
    ds = None
    if stage is not None:
        ds_hetero.register()
        sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
        ds = ds_config(stage, schedule, train_micro_batch_size_per_gpu=BATCH, gradient_accumulation_steps=2)
        ds["sequence_parallel_size"] = sp_size  # TRL refuses a ParallelismConfig itself
    model = _model(options.pop("model", ""), rank)
    columns: list[int] = []
    rewards = Rewards()
    trainer = _make(case, ds, model, rewards, options)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))

    def note_columns(_: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            columns.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    layer.register_forward_pre_hook(note_columns, with_kwargs=True)
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not any(time in name for time in (*_TIMES, _STEP_TIME))}
        for entry in trainer.state.log_history
    ]
    return logs, rewards.seen, columns, parameters(trainer.model, stage or 0)


def _model(kind: str, rank: int) -> Any:
    if kind == "adapted":
        return adapted()
    model = llama()
    if kind == "far from its reference":
        path = f"reference-{rank}"
        llama(hidden_act="gelu").save_pretrained(path)
        model.config._name_or_path = path
    return model


def _make(case: str, ds: Any, model: Any, rewards: Any, options: dict[str, Any]) -> Any:
    import trl

    name = case.partition(" ")[0]
    functions: Any = [rewards]
    if "reward_weights" in options:
        functions.append(_short)
    if "reward model" in case:
        judge = reward_model()
        judge.save_pretrained(f"judge-{os.getpid()}")
        tokenizer().save_pretrained(f"judge-{os.getpid()}")
        functions.append(f"judge-{os.getpid()}")
    more = {"processing_class": tokenizer(), "reward_funcs": functions, "eval_dataset": prompts(2)}
    if "a new adapter" in case:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    dataset = prompts(8 * STEPS * BATCH)
    if "stream" in case:
        dataset = dataset.to_iterable_dataset()
    return make_trainer(
        ds,
        0,
        getattr(trl, f"{name}Trainer"),
        config=getattr(trl, f"{name}Config"),
        model=model,
        more=more,
        dataset=dataset,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        max_completion_length=9,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=3,
        bf16=False,
        **{"beta": 0.0, "gradient_checkpointing": False, **options},
    )


def _assert_trains_alike(world_size: int, stage: int, schedule: Any, case: str) -> None:
    sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
    if world_size == sp_size:
        expected = [one_process(_train, None, schedule, case)]
    else:
        expected = run_deepspeed(
            _train, world_size // sp_size, None, schedule, case, env={"ACCELERATE_USE_CPU": "true"}
        )
    trained = ranks(_train, world_size, stage, schedule, case)
    for rank, (logs, completions, columns, ours) in enumerate(trained):
        expected_logs, expected_completions, expected_columns, theirs = expected[rank // sp_size]
        assert completions == expected_completions
        assert [sorted(entry) for entry in logs] == [sorted(entry) for entry in expected_logs]
        for mine, entry in zip(logs, expected_logs, strict=True):
            for name, value in entry.items():
                np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} in {entry}")
        assert_same_parameters(ours, theirs)
        if rank % sp_size == 0 and schedule is UNEVEN_2:  # ranks without tokens hold a column for none
            shards = [columns for _, _, columns, _ in trained[rank : rank + sp_size]]
            assert [sum(of_ranks) for of_ranks in zip(*shards, strict=True)] == expected_columns
            assert all(max(of_ranks) < whole for of_ranks, whole in zip(zip(*shards), expected_columns, strict=True))


@pytest.mark.parametrize("case", ["GRPO"])
def test_four_steps_equal_one_process(case: str) -> None:
    _assert_trains_alike(2, 2, UNEVEN_2, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [2, 3])
def test_every_option_equals_one_process(case: str, stage: int) -> None:
    _assert_trains_alike(2, stage, UNEVEN_2, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GRPO"])
def test_a_rank_without_tokens_changes_nothing(case: str) -> None:
    _assert_trains_alike(4, 3, UNEVEN_4, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GRPO"])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_replicas_equal_two_processes(case: str, stage: int) -> None:
    _assert_trains_alike(4, stage, UNEVEN_2, case)
