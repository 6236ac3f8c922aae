"""What the Trainer and accelerate count by rank, or do by rank: right, or refused by the name of the key.

Budget: 60 s.
"""

from __future__ import annotations

import functools
import multiprocessing
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.tiny import UNEVEN_2, adam, assert_same_parameters, ds_config, llama, parameters, samples
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks

_ONE_EPOCH = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def _ds(**more: Any) -> dict[str, Any]:
    return ds_config(1, UNEVEN_2, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, **more)


def _let_loaders_have_workers() -> None:
    """A rank of a test is a daemon, which may have no children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


class _CopyingTrainer:
    """Mixed into a Trainer: it copies what it gives to the model, as one on another device does."""

    def _prepare_input(self, data: Any) -> Any:
        prepared = super()._prepare_input(data)  # type: ignore[misc]
        return prepared.clone() if isinstance(prepared, torch.Tensor) else prepared


def _documented_loss(
    self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """As transformers' documentation writes one: labels out of the batch, and the loss from all logits."""
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits, following = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, following, reduction="sum") / num_items_in_batch
    return (loss, outputs) if return_outputs else loss


def _train(rank: int, with_ds: bool, how: str, arguments: dict[str, Any]) -> Any:
    from transformers import Trainer

    import ds_hetero
    from ds_hetero.errors import HeteroError

    _let_loaders_have_workers()
    if with_ds:
        ds_hetero.register()
    kind = {
        "copies": type("Copying", (_CopyingTrainer, Trainer), {}),
        "documented loss": type("OwnLoss", (Trainer,), {"compute_loss": _documented_loss}),
    }.get(how, Trainer)
    trainer = make_trainer(
        _ds() if with_ds else None, 2, kind, more={"eval_dataset": samples(4)}, **_ONE_EPOCH, **arguments
    )
    try:
        trainer.train()
    except HeteroError as error:
        return str(error)
    return logged(trainer), parameters(trainer.model, 1 if with_ds else 0)


_expected = functools.cache(lambda how: one_process(_train, False, how, {}))

# Keys of accelerator_config and of loaders, that leave one replica's training as it is.
KEYS: dict[str, dict[str, Any]] = {
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "even_batches": {"accelerator_config": {"even_batches": False}},
    "use_seedable_sampler": {"accelerator_config": {"use_seedable_sampler": True}},
    "non_blocking": {"accelerator_config": {"non_blocking": True}},
    "workers": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "non_padding": {"include_num_input_tokens_seen": "non_padding"},
}


@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.slow] * (key != "workers")) for key in KEYS])
def test_a_key_of_loaders_leaves_the_training_as_it_is(key: str) -> None:
    expected_logs, expected = _expected("")
    for logs, trained in ranks(_train, 2, True, "", KEYS[key]):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


@pytest.mark.parametrize("how", ["copies", "documented loss"])
def test_a_trainer_of_the_scripts_own_trains_as_on_one_process(how: str) -> None:
    expected_logs, expected = _expected(how)
    for logs, trained in ranks(_train, 2, True, how, {}):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def test_batches_that_rank_0_would_deal_out_are_refused_by_the_key() -> None:
    refusals = ranks(_train, 2, True, "", {"accelerator_config": {"dispatch_batches": True}})
    assert len(set(refusals)) == 1
    assert refusals[0].startswith("dispatch_batches=True (of accelerator_config")


def _mask(rank: int, with_ds: bool) -> Any:
    """Rows of unequal masks, which a worker draws."""
    import ds_hetero

    _let_loaders_have_workers()
    if with_ds:
        ds_hetero.register()
    trainer = make_trainer(
        _ds() if with_ds else None, 2, data_collator=_masking, **_ONE_EPOCH, dataloader_num_workers=1
    )
    trainer.train()
    return logged(trainer)


def _masking(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)}


def test_workers_of_a_replica_draw_alike() -> None:
    first, second = ranks(_mask, 2, True)
    assert first == second
    assert_same_logs(first, one_process(_mask, False))


def _register_late(rank: int) -> str:
    import ds_hetero

    trainer = make_trainer(_ds(), 0, **_ONE_EPOCH)
    ds_hetero.register()
    with pytest.raises(ds_hetero.ConfigError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_registration_that_comes_too_late_is_told_what_it_is() -> None:
    first, second = ranks(_register_late, 2)
    assert first == second
    assert first.startswith("ds_hetero.register() was called after the Accelerator was made")


def _train_stock(rank: int) -> str:
    import contextlib
    import io

    import ds_hetero

    ds_hetero.register()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        make_trainer(None, 0, **{**_ONE_EPOCH, "max_steps": 1}).train()
    return said.getvalue()


def test_ranks_that_train_without_the_section_are_told() -> None:
    first, second = ranks(_train_stock, 2)
    assert "TrainingArguments have no deepspeed=" in first
    assert "registered" not in second


def _evaluate_by_accelerate(rank: int, split: bool, as_objects: bool) -> Any:
    """Numbers of the rows that ``gather_for_metrics`` returns, in training's loader and in evaluation's."""
    from accelerate import Accelerator, DeepSpeedPlugin, skip_first_batches

    import ds_hetero

    ds_hetero.register()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            **config,
            "zero_allow_untested_optimizer": True,
            "heterogeneity": {"schedule": "even"},
            "sequence_parallel_size": 2,
        }
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    rows = [{**row, "number": torch.tensor(i)} for i, row in enumerate(samples(5))]
    model = llama()
    prepared = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(samples(6), 2), DataLoader(rows, 2)
    )
    model, optimizer, training, evaluation = prepared
    tokens = 0
    for batch in skip_first_batches(training, 1):  # imported before the registration took effect, as scripts do
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(accelerator.gather_for_metrics(torch.tensor([batch["position_ids"].numel()])).sum())
    model.eval()
    gathered: list[int] = []
    for batch in evaluation:
        numbers = batch.pop("number")
        with torch.no_grad():
            model(**batch)
        gathered += accelerator.gather_for_metrics(numbers.tolist() if as_objects else numbers, as_objects)
    return [int(number) for number in gathered], tokens


@pytest.mark.parametrize(("world_size", "as_objects"), [(2, False), (2, True), (4, False)])
def test_gather_for_metrics_returns_each_row_once(world_size: int, as_objects: bool) -> None:
    length = len(samples(1)[0]["input_ids"])
    for gathered, tokens in ranks(_evaluate_by_accelerate, world_size, True, as_objects):
        assert sorted(gathered) == list(range(5))
        rows = 4 if world_size == 2 else 2
        assert tokens >= rows * length


def _train_dpo(rank: int) -> float:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    import ds_hetero
    from tests.integration.trainer.test_trainer import _tokenizer

    ds_hetero.register()
    ds = ds_config(2, UNEVEN_2)
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        ds[name] = "auto"
    ds.pop("optimizer", None)
    row = {"prompt": "4 5 6 ", "chosen": "7 8 9 10", "rejected": "11 12 13"}
    args = DPOConfig(
        "out",
        deepspeed=ds,
        per_device_train_batch_size=2,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(
        model=llama(),
        ref_model=llama(),
        processing_class=_tokenizer(),
        train_dataset=Dataset.from_list([row] * 4),
        args=args,
    )
    return float(trainer.train().training_loss)


@pytest.mark.skipif(find_spec("trl") is None, reason="not in the environment of tests/oldest.sh")
def test_a_reference_model_takes_a_configuration_that_is_all_auto() -> None:
    first, second = ranks(_train_dpo, 2)
    assert first == second == pytest.approx(0.6931, abs=1e-3)


def _train_with_entries(rank: int) -> int:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_ds())
    rows = [{**row, "loss_scale": torch.rand(len(row["input_ids"])), "source": i} for i, row in enumerate(samples(4))]
    steps = 0
    for batch in handle.dataloader(DataLoader(rows, batch_size=2), batches="same"):
        scale, source = batch.pop("loss_scale"), batch.pop("source")
        assert scale.shape == batch["input_ids"].shape
        assert len(source) == 2
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
        steps += 1
    return steps


def test_entries_that_the_loop_takes_out_are_no_matter_of_the_model() -> None:
    assert ranks(_train_with_entries, 2) == [2, 2]


def _train_sft(rank: int, with_ds: bool) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import ds_hetero

    if with_ds:
        ds_hetero.register()
    rows = [{"input_ids": row["input_ids"][: 12 + 3 * i].tolist()} for i, row in enumerate(samples(7))]
    trainer = make_trainer(
        _ds() if with_ds else None,
        2,
        SFTTrainer,
        config=SFTConfig,
        dataset=Dataset.from_list(rows),
        bf16=False,
        gradient_checkpointing=False,
        **_ONE_EPOCH,
    )
    trainer.train()
    names = ("num_tokens", "mean_token_accuracy", "entropy")
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "entropy" in entry]


@pytest.mark.skipif(find_spec("trl") is None, reason="not in the environment of tests/oldest.sh")
def test_numbers_of_a_short_last_batch_count_whole() -> None:
    """TRL gathers sums of every rank by ``gather_for_metrics``, which would cut them off as rows of a padded batch."""
    expected = one_process(_train_sft, False)
    for ours in ranks(_train_sft, 2, True):
        assert ours == [pytest.approx(entry, rel=1e-5) for entry in expected]
