"""Micro-batches of unequally many labels weigh under the Trainer as on one process, whatever the model takes.

Budget: 20 s.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, assert_same_parameters, ds_config, llama, parameters, samples
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks

KINDS = ("takes none", "without kwargs", "takes them", "smoothing, takes none", "trainer takes none")


def _model(kind: str) -> Any:
    """A Llama by what it says of the number of items that the Trainer counts."""
    model = llama()
    if kind == "without kwargs":
        whole = type(model).forward

        def forward(
            self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None
        ) -> Any:
            return whole(
                self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels
            )

        model.__class__ = type("WithoutKwargs", (type(model),), {"forward": forward})
    elif kind not in ("takes them", "trainer takes none"):
        model.accepts_loss_kwargs = False
    return model


def _trainer_class(kind: str) -> type | None:
    """For "trainer takes none" a Trainer that decides so in its constructor, as Axolotl's does; else None."""
    from transformers import Trainer

    class TakesNone(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.model_accepts_loss_kwargs:
                self.model_accepts_loss_kwargs = False

    return TakesNone if kind == "trainer takes none" else None


def _train(rank: int, stage: int | None, batch_size: int, kind: str, options: dict[str, Any]) -> Any:
    import ds_hetero

    ds = None
    if stage is not None:
        ds_hetero.register()
        ds = ds_config(stage, UNEVEN_2, train_micro_batch_size_per_gpu=batch_size, gradient_accumulation_steps=2)
    dataset = samples(8)
    for index, row in enumerate(dataset):
        row["labels"] = row["labels"].clone()
        row["labels"][: 4 if index % 3 else -3] = -100
    smoothing = {"label_smoothing_factor": 0.1} if kind.startswith("smoothing") else {}
    trainer = make_trainer(
        ds,
        2,
        _trainer_class(kind),
        dataset=dataset,
        model=_model(kind),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        **smoothing,
        **options,
    )
    trainer.train()
    return logged(trainer), parameters(trainer.model, stage or 0)


_expected = functools.cache(lambda batch_size, kind: one_process(_train, None, batch_size, kind, {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_micro_batches_weigh_as_on_one_process(kind: str, world_size: int) -> None:
    expected_logs, expected = _expected(world_size // 2, kind)
    for logs, trained in ranks(_train, world_size, 1, 1, kind, {}):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _train_with_term(rank: int, by_handle: bool) -> Any:
    """Two ranks with batches of their own, which count the labels of their own."""
    from transformers import Trainer

    import ds_hetero

    handle = ds_hetero.register()

    class WithTerm(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            values = outputs.logits.float().logsumexp(-1).square()
            counted = inputs["labels"][:, 1:].ne(-100)
            if by_handle:
                term = handle.mean(values, inputs, num_items=num_items_in_batch)
            else:
                term = values[:, :-1][counted].sum() / num_items_in_batch
            return (loss + 0.1 * term, outputs) if return_outputs else loss + 0.1 * term

    ds = ds_config(1, None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=2)
    # Without a section accelerate gathers on CPUs as if there were one process.
    options = {"include_num_input_tokens_seen": "no", "logging_strategy": "no", "num_train_epochs": 1}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    rows = samples(8)
    for index, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: 4 if index % 3 else -3] = -100
    trainer = make_trainer(ds, 0, WithTerm, dataset=rows, average_tokens_across_devices=False, **options)
    trainer.train()
    return parameters(trainer.model, 1)


def test_a_term_by_the_items_of_a_rank_is_as_large_as_one_made_by_hand() -> None:
    (by_handle, _), (by_hand, _) = ranks(_train_with_term, 2, True), ranks(_train_with_term, 2, False)
    assert_same_parameters(by_handle, by_hand)


def test_of_one_replica_they_weigh_alike_without_the_average_over_devices() -> None:
    for kind in ("takes none", "takes them"):
        expected_logs, _ = _expected(1, kind)
        for logs, _ in ranks(_train, 2, 1, 1, kind, {"average_tokens_across_devices": False}):
            assert_same_logs(logs, expected_logs)


def _train_unequal(rank: int, batch: list[int] | None) -> Any:
    """A Trainer that takes no items, with the argument that weighs replicas alike, which it does not read."""
    import ds_hetero

    ds = None
    batch_size = 4
    if batch is not None:
        ds_hetero.register()
        batch_size = 2
        ds = ds_config(1, None, train_micro_batch_size_per_gpu=batch_size, gradient_accumulation_steps=2)
        ds["heterogeneity"] = {"batch": batch}
    trainer = make_trainer(
        ds,
        0,
        _trainer_class("trainer takes none"),
        num_samples=16,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=False,
        include_num_input_tokens_seen="no",
    )
    trainer.train()
    return logged(trainer), parameters(trainer.model, 1 if batch else 0)


def test_unequal_batches_of_a_trainer_that_takes_none_need_no_average_over_devices() -> None:
    expected_logs, expected = one_process(_train_unequal, None)
    for logs, trained in ranks(_train_unequal, 2, [3, 1]):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)
