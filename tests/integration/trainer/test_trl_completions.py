"""TRL's trainers that generate train, log and evaluate on uneven ranks as one process per replica does.

Budget: 40 s.
"""

from __future__ import annotations

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import UNEVEN_2, UNEVEN_4, VOCAB, assert_same_parameters, ds_config, llama, parameters
from tests.integration.trainer.test_trainer import make_trainer, one_process, ranks
from tests.integration.trainer.test_trl import _TIMES, adapted, reward_model, tokenizer, words
from tests.support import run_deepspeed

STEPS, BATCH = 4, 4
_STEP_TIME = "step_time"
_OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 4, "epsilon": 0.02}  # so that ratios are clipped
DEFAULTS = {"beta": 0.0, "num_generations": 2, "per_device_eval_batch_size": 2, "gradient_checkpointing": False}
# What a case sets beside; by DAPO's loss where none is named.
CASES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO on ranks that draw and judge unlike": {},
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
# Of two replicas alone.
OVER_REPLICAS = {"GRPO of groups over both replicas": {"num_generations": 16, "per_device_eval_batch_size": 8}}


def prompts(count: int) -> Any:
    """Of unlike lengths."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": words(5 + i % 4, 3 * i)} for i in range(count)])


class Rewards:
    """Rewards of completions by their tokens and lengths, and all completions that were asked for.

    Args:
        error: is added to them, and so many numbers are drawn before the next generation.
    """

    __name__ = "even"

    def __init__(self, error: int) -> None:
        self.seen: list[list[list[int]]] = []
        self._error = error

    def __call__(self, completion_ids: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
        self.seen.append(completion_ids)
        log_metric("longest", float(max(len(ids) for ids in completion_ids)))
        return [
            sum(token % 2 == 0 for token in ids) / len(ids) + 0.1 * len(ids) + self._error * i
            for i, ids in enumerate(completion_ids)
        ]

    def draw(self, *_: Any) -> None:
        torch.rand(self._error)


def _short(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Not of all completions."""
    return [None if ids[0] % 5 == 0 else -float(len(ids)) for ids in completion_ids]


def _train(rank: int, stage: int | None, schedule: Any, case: str) -> Any:
    """Logs without times, what was generated, columns of forwards that are trained on, and trained parameters.

    ``stage`` None is without DeepSpeed: one process, or data parallelism.
    """
    import ds_hetero

    options = dict({**CASES, **OVER_REPLICAS}[case])
    ds, sp_size = None, 1
    if stage is not None:
        ds_hetero.register()
        sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
        ds = ds_config(stage, schedule, train_micro_batch_size_per_gpu=BATCH, gradient_accumulation_steps=2)
        ds["sequence_parallel_size"] = sp_size  # TRL refuses a ParallelismConfig itself
    model = _model(options.pop("model", ""), rank)
    columns: list[int] = []
    rewards = Rewards(error=rank % sp_size if "unlike" in case else 0)
    trainer = _make(case, ds, model, rewards, options)
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))

    def note_columns(_: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            columns.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    layer.register_forward_pre_hook(note_columns, with_kwargs=True)
    layer.register_full_backward_hook(rewards.draw)
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not any(time in name for time in (*_TIMES, _STEP_TIME))}
        for entry in trainer.state.log_history
    ]
    table = {name: list(entries) for name, entries in trainer._logs.items() if isinstance(entries, deque)}
    return logs, (rewards.seen, table), columns, parameters(trainer.model, stage or 0)


def _model(kind: str, rank: int) -> Any:
    if kind == "adapted":
        return adapted()
    if kind == "mixture":
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCAB}
        return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
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
        path = f"of-{os.environ['RANK']}/judge"
        reward_model().save_pretrained(path)
        tokenizer().save_pretrained(path)
        functions.append(path)
    more = {"processing_class": tokenizer(), "reward_funcs": functions, "eval_dataset": prompts(2)}
    for option in {"rollout_func", "processing_class"} & {*options}:
        more[option] = options.pop(option)
    if "a new adapter" in case:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    dataset = prompts(8 * STEPS * BATCH)
    if "stream" in case:
        dataset = dataset.to_iterable_dataset()

    def config(**arguments: Any) -> Any:
        if ds is None:
            return getattr(trl, f"{name}Config")(**arguments)
        num_generations = arguments.pop("num_generations")
        made = getattr(trl, f"{name}Config")(**arguments, num_generations=2)  # counts one process, having no GPU
        made.num_generations = num_generations
        made.generation_batch_size *= int(os.environ["WORLD_SIZE"])  # as where there are GPUs
        return made

    return make_trainer(
        ds,
        0,
        getattr(trl, f"{name}Trainer"),
        config=config,
        model=model,
        more=more,
        dataset=dataset,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_completion_length=9,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=3,
        bf16=False,
        **{**DEFAULTS, **options},
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
    for rank, (logs, (completions, table), columns, ours) in enumerate(trained):
        expected_logs, (expected_completions, expected_table), expected_columns, theirs = expected[rank // sp_size]
        assert completions == expected_completions
        np.testing.assert_allclose(table.pop("advantages"), expected_table["advantages"], rtol=1e-4, atol=1e-5)
        assert table == {name: entries for name, entries in expected_table.items() if name != "advantages"}
        assert [sorted(entry) for entry in logs] == [sorted(entry) for entry in expected_logs]
        for mine, entry in zip(logs, expected_logs, strict=True):
            for name, value in entry.items():
                np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} in {entry}")
        assert_same_parameters(ours, theirs)
        if rank % sp_size == 0 and schedule is UNEVEN_2:  # ranks without tokens hold a column for none
            shards = [columns for _, _, columns, _ in trained[rank : rank + sp_size]]
            assert np.sum(shards, axis=0).tolist() == expected_columns
            assert all(np.max(shards, axis=0) < expected_columns)


@pytest.mark.sweep(keep=8)
@pytest.mark.parametrize(
    ("case", "stage"),
    [
        pytest.param(case, stage, marks=[] if case == "GRPO" and stage == 2 else pytest.mark.slow)
        for case in CASES
        for stage in (2, 3)
    ],
)
def test_four_steps_equal_one_process(case: str, stage: int) -> None:
    _assert_trains_alike(2, stage, UNEVEN_2, case)


@pytest.mark.sweep(keep=0)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["GRPO", "RLOO"])
def test_a_rank_without_tokens_changes_nothing(case: str) -> None:
    _assert_trains_alike(4, 3, UNEVEN_4, case)


@pytest.mark.sweep(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", ["GRPO", *OVER_REPLICAS, "GRPO of uncertain tokens", "RLOO"])
def test_two_replicas_equal_two_processes(case: str, stage: int) -> None:
    _assert_trains_alike(4, stage, UNEVEN_2, case)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, 8, id="of one step"),
        pytest.param({"steps_per_generation": 4, "generation_batch_size": 32}, 16, id="of several"),
        pytest.param({"num_generations": 16}, "num_generations=16 does not divide the 8 completions", id="groups"),
        pytest.param({"num_generations_eval": 3}, "num_generations=3 of an evaluation", id="evaluation"),
    ],
)
def test_ranks_that_share_a_sequence_count_once(
    given: dict[str, int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two replicas of two ranks, with two prompts each, and two micro-batches in a step."""
    from ds_hetero.errors import ConfigError
    from ds_hetero.frameworks.trl.completions import count_replicas

    known = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "generation_batch_size": 16,
        "num_generations": 4,
        "num_generations_eval": None,
        "eval_strategy": "steps",
    }
    arguments = SimpleNamespace(**{**known, **given})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            count_replicas(arguments, 2)
        return
    count_replicas(arguments, 2)
    assert arguments.generation_batch_size == expected
    assert ("generation_batch_size is 16, for 2 replica(s), and not 32" in caplog.text) == (
        "steps_per_generation" in given
    )


def test_what_was_not_tried_is_refused_by_name() -> None:
    first, second = ranks(_refuse, 2)
    assert first == second
    for name, text in first.items():
        assert text.startswith(name), text


def _refuse(rank: int) -> dict[str, str]:
    """Of an option, what a trainer says that is made with it."""
    import ds_hetero

    ds_hetero.register()
    options: dict[str, Any] = {
        "GRPOTrainer was not tried on parts of sequences with use_vllm": {"use_vllm": True},
        "GRPOTrainer was not tried on parts of sequences with use_transformers_continuous_batching": {
            "use_transformers_continuous_batching": True
        },
        "GRPOTrainer was not tried on parts of sequences with a loss of routers": {"model": "mixture"},
        "GRPOTrainer was not tried on parts of sequences with rollout_func": {"rollout_func": lambda *_: {}},
        "GRPOTrainer was not tried on parts of sequences with a processor of images": {
            "processing_class": _processor()
        },
        "RLOOTrainer was not tried on parts of sequences with a processor of images": {
            "processing_class": _processor()
        },
        "RLOOTrainer was not tried on parts of sequences with use_vllm": {"use_vllm": True},
        "num_generations=16 does not divide the 8 completions": {"num_generations": 16, "steps_per_generation": 2},
    }
    texts = {}
    for expected, given in options.items():
        ds = ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=BATCH, gradient_accumulation_steps=2)
        ds["sequence_parallel_size"] = 2
        case = "RLOO" if expected.startswith("RLOO") else "GRPO"
        model = _model(given.pop("model", ""), rank)
        with pytest.raises(ds_hetero.ConfigError) as caught:
            _make(case, ds, model, Rewards(error=0), given)
        texts[expected] = str(caught.value)
    return texts


def _processor() -> Any:
    """Return a processor of images and text that has no images yet: TRL asks for its class only."""
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer)

    return Processor(tokenizer())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
def test_trl_refuses_a_parallelism_config_itself() -> None:
    """If it does not any more, docs/losses.md has to say so."""
    from accelerate import ParallelismConfig
    from trl import GRPOConfig

    with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
        GRPOConfig(
            "out", use_cpu=True, bf16=False, parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2)
        )
