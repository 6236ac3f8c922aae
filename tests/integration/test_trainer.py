"""The Hugging Face Trainer and TRL train, log, count, save and resume as one process does.

Budget: 100 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import (
    CLIP,
    UNEVEN_2,
    assert_same_parameters,
    ds_config,
    llama,
    parameters,
    samples,
)
from tests.support import run_deepspeed

# What one process logs; the rest are times.
_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen", "train_loss")


def make_trainer(ds: dict[str, Any] | None, sp_size: int, kind: type | None = None, **options: Any) -> Any:
    """A Trainer over eleven samples, with DeepSpeed and sequence parallelism where ``ds`` is given."""
    from transformers import Trainer, TrainingArguments

    parallelism = None
    if ds is not None:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        parallelism = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=sp_size,
            dp_shard_size=int(os.environ["WORLD_SIZE"]) // sp_size,
            sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
        )
    arguments = {
        "output_dir": "out",
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "max_grad_norm": CLIP,
        "deepspeed": ds,
        "parallelism_config": parallelism,
        "use_cpu": ds is None,
        "include_num_input_tokens_seen": "all",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    torch.manual_seed(0)
    dataset = options.pop("dataset", None) or samples(options.pop("num_samples", 11))
    return (kind or Trainer)(
        model=llama(),
        args=TrainingArguments(**{**arguments, **options}),
        train_dataset=dataset,
        eval_dataset=samples(4),
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    """The numbers of every log entry that do not depend on time."""
    return [{name: entry[name] for name in _LOGGED if name in entry} for entry in trainer.state.log_history]


def assert_same_logs(ours: list[dict[str, float]], expected: list[dict[str, float]], *, norm: bool = True) -> None:
    """Equal entries, numbers to 1e-5; without the gradient norm for ZeRO-0, for which DeepSpeed has none."""
    if not norm:
        expected = [{name: value for name, value in entry.items() if name != "grad_norm"} for entry in expected]
    assert [list(entry) for entry in ours] == [list(entry) for entry in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-5, err_msg=str(theirs))


def one_process(fn: Any, *args: Any) -> Any:
    """``fn(rank, None, ...)`` without DeepSpeed."""
    return run_deepspeed(fn, 1, *args, env={"ACCELERATE_USE_CPU": "true"})[0]


def ranks(fn: Any, world_size: int, *args: Any) -> list[Any]:
    """``fn(rank, ...)`` with DeepSpeed, which accelerate ignores where it is told to use the CPU."""
    return run_deepspeed(fn, world_size, *args, env={"ACCELERATE_USE_CPU": "false"})


def _train(rank: int, stages: list[int | None], sp_size: int, options: dict[str, Any]) -> list[Any]:
    import ds_hetero

    if stages != [None]:
        ds_hetero.register()
    results = []
    for stage in stages:
        ds = None
        if stage is not None:
            micro = options["per_device_train_batch_size"]
            steps = options["gradient_accumulation_steps"]
            ds = ds_config(stage, UNEVEN_2, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)
        trainer = make_trainer(ds, sp_size, **options)
        trainer.train()
        assert trainer.state.is_world_process_zero == (rank == 0)
        results.append((logged(trainer), parameters(trainer.model, stage or 0)))
    return results


@pytest.mark.parametrize(
    ("world_size", "stages", "num_samples", "steps"), [(2, [0, 1, 2, 3], 11, 2), (4, [1, 3], 8, 1)]
)
def test_training_equals_one_process(world_size: int, stages: list[int], num_samples: int, steps: int) -> None:
    options = {"num_samples": num_samples, "gradient_accumulation_steps": steps, "eval_strategy": "epoch"}
    batch_size = world_size // 2
    expected = one_process(_train, [None], 1, {**options, "per_device_train_batch_size": batch_size})[0]
    for results in ranks(_train, world_size, stages, 2, {**options, "per_device_train_batch_size": 1}):
        for stage, (logs, trained) in zip(stages, results, strict=True):
            assert_same_logs(logs, expected[0], norm=stage > 0)
            assert_same_parameters(trained, expected[1])
