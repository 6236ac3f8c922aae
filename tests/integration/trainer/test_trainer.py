"""The Hugging Face Trainer and TRL train, log, count, save and resume as one process does.

Budget: 100 s.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import (
    BY_DOCUMENTS,
    CLIP,
    ONE_GROUP_2,
    UNEVEN_2,
    UNEVEN_4,
    VOCAB,
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
    if ds is not None and sp_size:
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
    config = options.pop("config", TrainingArguments)
    more = options.pop("more", None) or ({"processing_class": _tokenizer()} if kind else {"eval_dataset": samples(4)})
    more |= {"data_collator": options.pop("data_collator")} if "data_collator" in options else {}
    model = options.pop("model", None) or llama()
    return (kind or Trainer)(model=model, args=config(**{**arguments, **options}), train_dataset=dataset, **more)


def _tokenizer() -> Any:
    """One word per id; TRL wants to see a tokenizer, though the samples are ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")


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


def _train(
    rank: int, stage: int | None, schedule: Any, options: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Logs and trained parameters; ``stage`` None is one process without DeepSpeed."""
    import ds_hetero

    sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
    ds = None
    if stage is not None:
        ds_hetero.register()
        micro, steps = options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
        ds = ds_config(stage, schedule, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)
    trainer = make_trainer(ds, 0 if options.pop("without_parallelism", False) else sp_size, **options)
    trainer.train()
    assert trainer.state.is_world_process_zero == (rank == 0)
    return logged(trainer), parameters(trainer.model, stage or 0)


# Ranks, schedule, ZeRO stage, samples, gradient accumulation steps.
CASES: dict[str, tuple[int, Any, int, int, int]] = {
    **{f"one replica, stage {stage}": (2, UNEVEN_2, stage, 11, 2) for stage in range(4)},
    "two replicas": (4, UNEVEN_2, 3, 8, 1),
    "a rank without tokens": (4, UNEVEN_4, 1, 5, 2),
}


@functools.cache
def _training_of_one_process(batch_size: int, num_samples: int, steps: int) -> Any:
    """Logs and trained parameters."""
    options = {"num_samples": num_samples, "gradient_accumulation_steps": steps, "eval_strategy": "epoch"}
    return one_process(_train, None, UNEVEN_2, {**options, "per_device_train_batch_size": batch_size})


# Of one replica; the other cases show these stages as well.
_SLOW = ("one replica, stage 1", "one replica, stage 3")


@pytest.mark.parametrize(
    ("world_size", "schedule", "stage", "num_samples", "steps"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, case in CASES.items()],
)
def test_training_equals_one_process(world_size: int, schedule: Any, stage: int, num_samples: int, steps: int) -> None:
    options = {"num_samples": num_samples, "gradient_accumulation_steps": steps, "eval_strategy": "epoch"}
    batch_size = world_size // sum(len(group["ranks"]) for group in schedule["groups"])
    expected_logs, expected = _training_of_one_process(batch_size, num_samples, steps)
    for logs, trained in ranks(_train, world_size, stage, schedule, {**options, "per_device_train_batch_size": 1}):
        assert_same_logs(logs, expected_logs, norm=stage > 0)
        assert_same_parameters(trained, expected)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_without_parallelism_config_the_size_is_that_of_the_schedule(world_size: int) -> None:
    options = {"num_samples": 8, "gradient_accumulation_steps": 1, "eval_strategy": "epoch"}
    expected_logs, expected = _training_of_one_process(world_size // 2, 8, 1)
    own = {**options, "per_device_train_batch_size": 1, "without_parallelism": True}
    for logs, trained in ranks(_train, world_size, 2, UNEVEN_2, own):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [pytest.param(2, 2, id="one replica"), pytest.param(4, 1, id="two replicas", marks=pytest.mark.slow)],
)
def test_a_term_made_by_the_handle_in_compute_loss_trains_as_on_one_process(world_size: int, stage: int) -> None:
    options = {"num_samples": 8, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    expected_logs, expected = one_process(_train_with_term, None, {**options, "batch_size": world_size // 2})
    for logs, trained in ranks(_train_with_term, world_size, stage, {**options, "batch_size": 1}):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _train_with_term(rank: int, stage: int | None, options: dict[str, Any]) -> Any:
    from transformers import Trainer

    import ds_hetero

    handle = None if stage is None else ds_hetero.register()

    class WithTerm(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            term = outputs.logits.logsumexp(-1).square()
            if handle is not None:
                return loss + 0.1 * handle.mean(term, inputs, num_items=num_items_in_batch)
            counted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
            return loss + 0.1 * term[counted].sum() / num_items_in_batch

    batch_size = options.pop("batch_size")
    steps = {"train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": 2}
    ds = None if stage is None else ds_config(stage, UNEVEN_2, **steps)
    trainer = make_trainer(ds, 2, WithTerm, per_device_train_batch_size=batch_size, **options)
    trainer.train()
    return logged(trainer), parameters(trainer.model, stage or 0)


def test_a_second_call_of_train_is_refused_by_name() -> None:
    first, second = ranks(_train_twice, 2)
    assert first == second
    assert first.startswith("Trainer.train() was called after the model got its DeepSpeed engine")
    assert "Make a new Trainer" in first


def _train_twice(rank: int) -> str:
    import ds_hetero

    ds_hetero.register()
    ds = ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=1)
    trainer = make_trainer(ds, 2, num_samples=3, max_steps=1, per_device_train_batch_size=1)
    trainer.train()
    with pytest.raises(ds_hetero.ConfigError) as caught:
        trainer.train()
    return str(caught.value)


def test_resume_under_another_schedule(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path / "one"), "save_steps": 4, "max_steps": 7, "save_strategy": "steps"}
    expected = one_process(_train_and_resume, [None, None], {**options})[0]
    ours = ranks(_train_and_resume, 2, [UNEVEN_2, ONE_GROUP_2], {**options, "output_dir": str(tmp_path / "two")})
    for whole, resumed in ours:
        assert_same_logs(whole, expected)
        assert_same_logs(resumed[4:-1], expected[4:-1])


def _train_and_resume(rank: int, schedules: list[Any], options: dict[str, Any]) -> list[Any]:
    """Logs of a run of seven steps, and of one that goes on after the fourth."""
    import ds_hetero

    if schedules[0] is not None:
        ds_hetero.register()
    logs = []
    for schedule, checkpoint in zip(schedules, [None, f"{options['output_dir']}/checkpoint-4"], strict=True):
        ds = None if schedule is None else ds_config(1, schedule, train_micro_batch_size_per_gpu=1)
        trainer = make_trainer(ds, 2, per_device_train_batch_size=1, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        logs.append(logged(trainer))
    return logs


@pytest.mark.skipif(find_spec("trl") is None, reason="not in the environment of tests/oldest.sh")
def test_trl_trains_packed_documents_as_one_process() -> None:
    expected = one_process(_train_sft, None, "stream")
    for placement in ("stream", BY_DOCUMENTS):
        for logs, trained in ranks(_train_sft, 2, UNEVEN_2, placement):
            assert_same_logs(logs, expected[0])
            assert_same_parameters(trained, expected[1])


def _train_sft(rank: int, schedule: Any, placement: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import ds_hetero

    ds = None
    if schedule is not None:
        ds_hetero.register()
        steps = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        ds = ds_config(2, schedule, placement=placement, **steps)
    rows = [{"input_ids": row["input_ids"][: 12 + 3 * i].tolist()} for i, row in enumerate(samples(8))]
    trainer = make_trainer(
        ds,
        2,
        SFTTrainer,
        config=SFTConfig,
        dataset=Dataset.from_list(rows),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        packing=True,
        padding_free=True,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer.train()
    return logged(trainer), parameters(trainer.model, 0 if ds is None else 2)


@pytest.mark.slow
def test_flattened_documents_train_and_resume_as_on_one_process(tmp_path: Path) -> None:
    """Two samples of unequal length in each batch; saved in the middle of an epoch, with ZeRO-3 and recomputation."""
    options = {"output_dir": str(tmp_path / "one"), "save_steps": 3, "max_steps": 5, "save_strategy": "steps"}
    expected = one_process(_train_flattened, None, options)
    ours = ranks(_train_flattened, 4, UNEVEN_4, {**options, "output_dir": str(tmp_path / "four")})
    for whole, resumed in ours:
        assert_same_logs(whole, expected[0])
        assert_same_logs(resumed[3:-1], expected[0][3:-1])


def _checkpointing() -> str:
    """The argument's name in the installed transformers."""
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


def _train_flattened(rank: int, schedule: Any, options: dict[str, Any]) -> list[Any]:
    """Logs of a run of five steps, and of one that goes on after the third."""
    from transformers import DataCollatorWithFlattening

    import ds_hetero

    ds = None
    if schedule is not None:
        ds_hetero.register()
        ds = ds_config(3, schedule, placement=BY_DOCUMENTS, gradient_accumulation_steps=2)
    rows = [
        {name: entry[: 36 - 5 * (i % 7)].tolist() for name, entry in row.items()} for i, row in enumerate(samples(13))
    ]
    logs = []
    for checkpoint in (None, f"{options['output_dir']}/checkpoint-3")[: 1 if ds is None else 2]:
        trainer = make_trainer(
            ds,
            4,
            dataset=rows,
            data_collator=DataCollatorWithFlattening(),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            **{_checkpointing(): ds is not None},
            **options,
        )
        trainer.model.config.use_cache = False  # with a cache, transformers does not look for packed documents
        trainer.train(resume_from_checkpoint=checkpoint)
        logs.append(logged(trainer))
    return logs


def test_ranks_counted_by_accelerate_train_as_one_process() -> None:
    """As on GPUs, where accelerate would give every rank batches of its own."""
    options = {"num_samples": 8, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
    expected, _ = one_process(_train, None, UNEVEN_2, options)
    (logs, _), _ = ranks(_train_with_counted_ranks, 2, options)
    assert_same_logs(logs, expected)


def _train_with_counted_ranks(rank: int, options: dict[str, Any]) -> Any:
    from accelerate.state import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    assert PartialState(backend="gloo").num_processes == 2
    return _train(rank, 1, UNEVEN_2, {**options, "accelerator_config": {"use_configured_state": True}})


def test_a_trainer_without_the_section_on_one_rank_is_refused_on_all() -> None:
    first, second = ranks(_make_trainers_of_different_files, 2)
    assert first == second
    assert '"heterogeneity": switched on on rank 0; missing on rank 1' in first


def _make_trainers_of_different_files(rank: int) -> str:
    import ds_hetero

    ds_hetero.register()
    with pytest.raises(ds_hetero.ConfigError) as caught:
        make_trainer(ds_config(1, None if rank else UNEVEN_2, train_micro_batch_size_per_gpu=8), 2).train()
    return str(caught.value)


def test_losses_that_would_see_a_part_of_the_sequence_are_refused() -> None:
    first, second = ranks(_refuse, 2)
    assert first == second
    rebalance, unlabelled, pairs = first
    assert rebalance.startswith('train_sampling_strategy="batch_rebalance" divides samples among ranks')
    assert unlabelled.startswith("the batches of Trainer have no labels (they hold input_ids")
    assert pairs.startswith("the batches of Trainer cannot be split over the sequence: a batch needs input_ids")
    for text in (unlabelled, pairs):
        assert "Train it without sequence parallelism" in text


def _refuse(rank: int) -> list[str]:
    import ds_hetero
    from ds_hetero.errors import HeteroError

    ds_hetero.register()
    ds = ds_config(1, UNEVEN_2, train_micro_batch_size_per_gpu=1)
    texts = []
    for arguments in ({"train_sampling_strategy": "batch_rebalance"}, {}, {}):
        trainer = make_trainer(ds, 2, per_device_train_batch_size=1, **arguments)
        if len(texts) == 1:
            trainer.data_collator = lambda rows: {"input_ids": torch.stack([row["input_ids"] for row in rows])}
        if len(texts) == 2:
            trainer.data_collator = lambda rows: {"chosen_input_ids": torch.stack([row["input_ids"] for row in rows])}
        with pytest.raises(HeteroError) as caught:
            trainer.train()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize(
    ("world_size", "loss"),
    [
        pytest.param(2, "smoothing", id="label smoothing"),
        pytest.param(2, "function", id="compute_loss_func", marks=pytest.mark.slow),
        pytest.param(4, "smoothing", id="label smoothing, two replicas", marks=pytest.mark.slow),
    ],
)
def test_losses_of_all_logits_train_and_evaluate_as_on_one_process(world_size: int, loss: str) -> None:
    options = {"num_samples": 8, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    batch_size = world_size // 2
    evaluation = {"per_device_eval_batch_size": batch_size}
    expected_logs, expected = one_process(_train_by_logits, None, loss, batch_size, {**options, **evaluation})
    for logs, trained in ranks(_train_by_logits, world_size, 2, loss, 1, {**options, "per_device_eval_batch_size": 1}):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _train_by_logits(rank: int, stage: int | None, loss: str, batch_size: int, options: dict[str, Any]) -> Any:
    """By a loss that the Trainer computes from the logits and labels of whole sequences."""
    import ds_hetero

    ds = None
    if stage is not None:
        ds_hetero.register()
        ds = ds_config(stage, UNEVEN_2, train_micro_batch_size_per_gpu=batch_size, gradient_accumulation_steps=2)
    more = {"label_smoothing_factor": 0.1} if loss == "smoothing" else {}
    trainer = make_trainer(ds, 2, per_device_train_batch_size=batch_size, **options, **more)
    if loss == "function":
        trainer.compute_loss_func = _focal_loss
    trainer.train()
    return logged(trainer), parameters(trainer.model, stage or 0)


def _focal_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    labels = labels[:, 1:]
    log_p = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    losses = -log_p * (1 - log_p.exp()).square()
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses[labels != -100].sum() / count


PIPELINES = {
    "version": 2,
    "model": {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "pipelines": [
        {
            "micro_batch_size": 1,
            "micro_batches": 2,
            "stages": [{"ranks": [0, 1], "layers": [0, 1], "inner": "tensor"}, {"ranks": [2], "layers": [1, 2]}],
        },
        {"micro_batch_size": 2, "micro_batches": 1, "stages": [{"ranks": [3], "layers": [0, 2]}]},
    ],
}

TENSOR_GROUPS = {
    "version": 2,
    "model": {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "pipelines": [
        {
            "micro_batch_size": 2,
            "micro_batches": 2,
            "stages": [
                {
                    "ranks": [0, 1, 2, 3],
                    "layers": [0, 2],
                    "inner": "sequence",
                    "tensor_size": 2,  # groups of ranks 0, 1 and 2, 3, which have 3 and 1 of 4 tokens
                    "schedule": {
                        "version": 1,
                        "num_heads": 4,
                        "num_kv_heads": 2,
                        "layout": "zigzag",
                        "groups": [
                            {"ranks": [0], "tokens": [3], "heads": [4]},
                            {"ranks": [2], "tokens": [1], "heads": [4]},
                        ],
                    },
                }
            ],
        },
    ],
}


def _train_pipelines(rank: int, plan: dict[str, Any], options: dict[str, Any]) -> Any:
    """Logs of a training that saves, and of one that goes on from its checkpoint; and the folder's weights."""
    from transformers import LlamaForCausalLM

    import ds_hetero

    ds_hetero.register()
    ds = {**ds_config(1, plan), "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(ds, 4, **options, save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model("weights")
    if rank > 0:
        return logged(trainer), None
    whole = LlamaForCausalLM.from_pretrained("weights")
    return logged(trainer), parameters(whole)


def test_pipelines_train_log_and_save_as_one_process() -> None:
    options = {"num_samples": 11, "gradient_accumulation_steps": 1, "eval_strategy": "epoch"}
    expected, trained = one_process(_train, None, UNEVEN_2, {**options, "per_device_train_batch_size": 4})
    options |= {"per_device_train_batch_size": 4, "prediction_loss_only": True}
    for plan in (PIPELINES, TENSOR_GROUPS):
        outcomes = ranks(_train_pipelines, 4, plan, options)
        assert_same_logs(outcomes[0][0], expected)
        assert_same_parameters(outcomes[0][1], trained)
