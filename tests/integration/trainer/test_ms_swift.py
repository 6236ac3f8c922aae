"""A trainer with ms-swift's loader and loss trains on unequal ranks as on one process.

ms-swift itself is not installed here; `.ci/frameworks` trains by it. The sampler below asks torch.distributed for its
rank at every draw, and the loss is multiplied by the number of processes, as those of ms-swift.
Budget: 20 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hetero.errors import BatchError
from tests.integration.tiny import UNEVEN_2, assert_same_parameters, ds_config, parameters
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks

_BATCH = [3, 1]


class BatchSamplerShard:
    """Batches of every n-th sample of an order that all ranks draw alike."""

    __module__ = "swift.dataloader.shard"

    def __init__(self, total_samples: int, batch_size: int) -> None:
        self.total_samples = total_samples // self.world_size
        self.batch_size, self.drop_last = batch_size, False
        self.epoch = 0

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.total_samples * self.world_size, generator=generator).tolist()
        own = order[self.rank :: self.world_size]
        for start in range(0, len(own), self.batch_size):
            yield own[start : start + self.batch_size]

    def __len__(self) -> int:
        return -(-self.total_samples // self.batch_size)


def _trainer_class() -> type:
    from torch.utils.data import DataLoader
    from transformers import Trainer

    class DataLoaderShard(DataLoader):  # type: ignore[type-arg]
        def set_epoch(self, epoch: int) -> None:
            self.batch_sampler.set_epoch(epoch)

    class Seq2SeqTrainer(Trainer):
        __module__ = "swift.trainers.seq2seq_trainer"

        def get_train_dataloader(self) -> Any:
            sampler = BatchSamplerShard(len(self.train_dataset), self._train_batch_size)
            return DataLoaderShard(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            # Only logits from the first label on, whose number the labels of all rows share.
            labels = inputs["labels"]
            num_kept = labels.shape[1] - int((labels != -100).int().argmax(-1).min()) + 1
            labels = labels[:, -num_kept:]
            outputs = model(**{**inputs, "labels": labels, "logits_to_keep": num_kept})
            loss = outputs.loss
            if num_items_in_batch is not None:
                loss = loss * ((labels[:, 1:] != -100).sum() / num_items_in_batch)
                loss *= self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    return Seq2SeqTrainer


def test_ranks_that_share_tokens_train_as_one_process() -> None:
    expected_logs, expected = one_process(_train, "")
    for logs, trained in ranks(_train, 2, "tokens"):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def test_unequal_batches_are_refused() -> None:
    """The loss is a mean times a share of the labels, and a share alone does not show whether it is a constant."""
    for message in ranks(_refusal, 2):
        assert "loaders are sharded (rank 0: 0 of 2; rank 1: 1 of 2)" in message


def _refusal(rank: int) -> str:
    with pytest.raises(BatchError) as caught:
        _train(rank, "batches")
    return str(caught.value)


def _train(rank: int, sharing: str) -> Any:
    import ds_hetero

    ds = None
    batch_size = sum(_BATCH)
    if sharing:
        ds_hetero.register()
        ds = ds_config(2, UNEVEN_2, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=batch_size)
    if sharing == "batches":
        batch_size //= 2
        ds["heterogeneity"] = {"batch": _BATCH}
        ds["train_micro_batch_size_per_gpu"] = batch_size
    trainer = make_trainer(
        ds,
        2 if sharing == "tokens" else 0,
        _trainer_class(),
        num_samples=16,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="no",
    )
    trainer.train()
    return logged(trainer), parameters(trainer.model, 2 if sharing else 0)
