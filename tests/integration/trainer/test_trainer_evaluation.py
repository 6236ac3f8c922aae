"""``evaluate`` and ``predict`` of the HF Trainer and of TRL's SFTTrainer, over shards, give what one process gives.

Budget: 70 s.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.loops.test_evaluation import Live
from tests.integration.tiny import UNEVEN_2, UNEVEN_4, ds_config, llama, samples
from tests.integration.trainer.test_trainer import PIPELINES, _tokenizer, make_trainer, one_process, ranks

ROWS = 7  # of an evaluation; no batch size of these tests divides it


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    made: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    length = max(len(row["input_ids"]) for row in rows)
    for row in rows:
        missing = length - len(row["input_ids"])
        pad = torch.nn.functional.pad
        made["input_ids"].append(pad(row["input_ids"], (0, missing), value=0))
        made["labels"].append(pad(row["labels"], (0, missing), value=-100))
        made["attention_mask"].append(pad(torch.ones_like(row["input_ids"]), (0, missing)))
    return {name: torch.stack(entries) for name, entries in made.items()}


def flattened(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows as documents of one row."""
    labels = [torch.cat([torch.tensor([-100]), row["labels"][1:]]) for row in rows]
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None],
    }


COLLATORS = {"padded": padded, "packed": flattened}


def ragged(count: int) -> list[dict[str, torch.Tensor]]:
    """Samples of unlike lengths, one of them of three tokens, fewer than some schedules have ranks."""
    lengths = [3 if i == 2 else 37 - 5 * (i % 4) for i in range(count)]
    return [{n: e[:length] for n, e in row.items()} for row, length in zip(samples(count), lengths, strict=True)]


def guesses(logits: Any, labels: Any) -> Any:
    """The likeliest words, of which the labels show that they belong to the logits."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert labels.shape == logits.shape[:2]
    return logits.argmax(-1)


def right(prediction: Any) -> dict[str, float]:
    """How many guesses are right, and a sum that no order or repetition leaves as it is."""
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counts = labels != -100
    places = np.arange(len(labels))[:, None] + 1
    return {"right": float((guessed == labels)[counts].mean()), "in_order": float((guessed * counts * places).sum())}


def _evaluate(rank: int, stage: int | None, schedule: Any, case: dict[str, Any]) -> Any:
    """Metrics of an evaluation between two steps and at the end, and predictions of other rows."""
    import ds_hetero

    case = {"collator": "padded", "batch_size": 1, "options": {}, "adapted": False, **case}
    ds = None
    if stage is not None:
        ds_hetero.register()
        ds = ds_config(stage, schedule, train_micro_batch_size_per_gpu=1, **case.get("section", {}))
    sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
    model = llama()
    if case["adapted"]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    trainer = make_trainer(
        ds,
        sp_size,
        model=model,
        num_samples=4,
        max_steps=2,
        per_device_train_batch_size=case["train_batch_size"] if stage is None else 1,
        per_device_eval_batch_size=case["batch_size"],
        eval_strategy="steps",
        eval_steps=1,
        more={"eval_dataset": ragged(ROWS), "data_collator": COLLATORS[case["collator"]]},
        **case["options"],
    )
    if case.get("metrics"):
        trainer.preprocess_logits_for_metrics = guesses
        trainer.compute_metrics = right
    trainer.train()
    metrics = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    metrics.append(trainer.evaluate())
    predicted = None
    if case.get("metrics"):
        predicted = trainer.predict(ragged(5))
        metrics.append(predicted.metrics)
        predicted = predicted.predictions, predicted.label_ids
    return [_numbers(of) for of in metrics], predicted, [e["loss"] for e in trainer.state.log_history if "loss" in e]


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    times = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(times)}


CASES: dict[str, tuple[int, Any, int, dict[str, Any]]] = {
    "padded, stage 2": (2, UNEVEN_2, 2, {"batch_size": 2, "metrics": True}),
    "packed, stage 1": (2, UNEVEN_2, 1, {"batch_size": 2, "collator": "packed"}),
    "two replicas, stage 3": (4, UNEVEN_2, 3, {"batch_size": 2, "metrics": True}),
    "label smoothing, stage 1": (2, UNEVEN_2, 1, {"batch_size": 2, "options": {"label_smoothing_factor": 0.1}}),
    "packed, two replicas, stage 2": (4, UNEVEN_2, 2, {"batch_size": 2, "collator": "packed"}),
    "LoRA, a rank without tokens, stage 3": (4, UNEVEN_4, 3, {"batch_size": 2, "adapted": True, "metrics": True}),
    "label smoothing, two replicas, stage 1": (
        4,
        UNEVEN_2,
        1,
        {"batch_size": 2, "options": {"label_smoothing_factor": 0.1}},
    ),
}
_SLOW = [name for name in CASES if name not in ("padded, stage 2", "packed, stage 1", "two replicas, stage 3")]


@pytest.mark.parametrize(
    ("world_size", "schedule", "stage", "case"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, case in CASES.items()],
)
def test_evaluation_equals_one_process(world_size: int, schedule: Any, stage: int, case: dict[str, Any]) -> None:
    replicas = world_size // sum(len(group["ranks"]) for group in schedule["groups"])
    whole = {**case, "batch_size": replicas * case["batch_size"], "train_batch_size": replicas}
    whole.pop("section", None)
    expected, predicted, losses = one_process(_evaluate, None, schedule, whole)
    for metrics, of_rank, trained in ranks(_evaluate, world_size, stage, schedule, case):
        assert [list(of) for of in metrics] == [list(of) for of in expected]
        for ours, theirs in zip(metrics, expected, strict=True):
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5, err_msg=str(theirs))
        np.testing.assert_allclose(trained, losses, rtol=1e-5)
        if predicted is not None:
            (guessed, labels), (expected_guesses, expected_labels) = of_rank, predicted
            np.testing.assert_array_equal(labels, expected_labels)
            counts = labels != -100  # the attention of padding is zero here, which no label reads
            np.testing.assert_array_equal(guessed[counts], expected_guesses[counts])


@pytest.mark.skipif(find_spec("trl") is None, reason="not in the environment of tests/oldest.sh")
def test_sft_evaluates_packed_documents_as_one_process() -> None:
    expected = one_process(_evaluate_sft, None, 1)
    for ours in ranks(_evaluate_sft, 2, UNEVEN_2, 1):
        assert list(ours) == list(expected)
        np.testing.assert_allclose(list(ours.values()), list(expected.values()), rtol=1e-5)


def _evaluate_sft(rank: int, schedule: Any, batch_size: int) -> dict[str, float]:
    """Metrics after a step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import ds_hetero

    ds = None
    if schedule is not None:
        ds_hetero.register()
        ds = ds_config(2, schedule, train_micro_batch_size_per_gpu=1)
    rows = [{"input_ids": row["input_ids"][: 12 + 3 * i].tolist()} for i, row in enumerate(samples(8))]
    more = {"processing_class": _tokenizer(), "eval_dataset": Dataset.from_list(rows[:5])}
    trainer = make_trainer(
        ds,
        2,
        SFTTrainer,
        config=SFTConfig,
        dataset=Dataset.from_list(rows),
        more=more,
        max_steps=1,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=batch_size,
        packing=True,
        padding_free=True,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer.train()
    return _numbers(trainer.evaluate())


def test_a_choice_of_whole_evaluation_is_kept() -> None:
    """By the key, and by the handle: rows are dealt out to ranks, and each rank evaluates its own."""
    for of_shards, by_handle, by_key in ranks(_evaluate_whole, 2):
        assert by_handle == by_key != of_shards


def _evaluate_whole(rank: int) -> list[float]:
    import ds_hetero

    losses = []
    for section in ({}, {"evaluation": "whole"}):
        handle = ds_hetero.register()
        config = {"heterogeneity": {"schedule": UNEVEN_2, **section}}
        ds = ds_config(1, None, train_micro_batch_size_per_gpu=1, **config)
        more = {"eval_dataset": ragged(ROWS), "data_collator": padded}
        trainer = make_trainer(ds, 2, max_steps=1, more=more, **dict.fromkeys(_SIZES, 1))
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        if not section:
            with handle.unsharded():
                losses.append(trainer.evaluate()["eval_loss"])
    return losses


_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size")


def test_an_evaluation_of_the_trainer_takes_no_more_memory_than_a_step() -> None:
    for of_step, of_evaluation, of_whole in ranks(_peaks, 2):
        assert of_evaluation <= of_step
        assert of_whole > of_evaluation


def _peaks(rank: int) -> tuple[int, int, int]:
    """Most bytes of a step, of an evaluation over shards, and of one of whole sequences."""
    from transformers import Trainer

    import ds_hetero

    handle, peaks = ds_hetero.register(), []

    class Measured(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with Live() as live:
                loss = super().training_step(*args, **kwargs)
            peaks.append(live.peak)
            return loss

    more = {"eval_dataset": samples(2, 240)}
    trainer = make_trainer(
        ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=1),
        2,
        Measured,
        model=llama(vocab_size=512, max_position_embeddings=256),
        dataset=samples(2, 240),
        max_steps=1,
        more=more,
        **dict.fromkeys(_SIZES, 1),
    )
    trainer.train()
    with Live() as live:
        trainer.evaluate()
    with handle.unsharded(), Live() as whole:
        trainer.evaluate()
    return peaks[-1], live.peak, whole.peak


def test_pipelines_evaluate_as_one_process_and_refuse_to_predict() -> None:
    expected, _ = one_process(_evaluate_pipelines, None)
    for loss, message in ranks(_evaluate_pipelines, 4, PIPELINES):
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert message.startswith("Prediction needs logits, which stay on the last stages of pipelines.")


def _evaluate_pipelines(rank: int, plan: Any) -> tuple[float, str]:
    import ds_hetero

    ds = None
    if plan is not None:
        ds_hetero.register()
        ds = {**ds_config(1, plan), "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    more = {"eval_dataset": ragged(ROWS), "data_collator": padded}
    trainer = make_trainer(ds, 4, max_steps=1, more=more, **dict.fromkeys(_SIZES, 4))
    trainer.train()
    loss, message = trainer.evaluate()["eval_loss"], ""
    if plan is not None:
        with pytest.raises(ds_hetero.ConfigError) as caught:
            trainer.predict(ragged(2))
        message = str(caught.value)
    return loss, message
