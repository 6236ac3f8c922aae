"""Epochs of the Trainer: each sample once, with whatever sampler, and after a resume in the middle of one.

Budget: 40 s.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from tests.integration.tiny import UNEVEN_2, ds_config, llama
from tests.integration.trainer.test_trainer import one_process, ranks

ROWS = 12


def _rows() -> list[dict[str, list[int]]]:
    """Rows of unequal lengths; the first token of each is its number."""
    return [{name: [index] * (8 + 2 * index) for name in ("input_ids", "labels")} for index in range(ROWS)]


class _Reading:
    """A collate function that notes which rows it was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        self.batches.append([row["input_ids"][0] for row in rows])
        longest = max(len(row["input_ids"]) for row in rows)
        padded = {
            name: [row[name] + [fill] * (longest - len(row[name])) for row in rows]
            for name, fill in (("input_ids", 0), ("labels", -100))
        }
        return {name: torch.tensor(entry) for name, entry in padded.items()}


class _OwnGenerator(Sampler[int]):
    """Draws every epoch's order from a generator that it keeps."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS, generator=self.generator).tolist())


class _OfPython(_OwnGenerator):
    """Draws from Python's own generator, when the epoch begins."""

    def __iter__(self) -> Any:
        return iter(random.sample(range(ROWS), ROWS))


class _Unseeded(_OwnGenerator):
    """Draws from nothing that can be put back."""

    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(ROWS), ROWS))


class _Stream(IterableDataset[Any]):
    """A stream with a shuffle buffer, whose generator goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __iter__(self) -> Any:
        buffer: list[Any] = []
        for row in _rows():
            buffer.append(row)
            if len(buffer) == 4:
                yield buffer.pop(self.generator.randrange(4))
        self.generator.shuffle(buffer)
        yield from buffer


class _SharedOut(Sampler[int]):
    """Shares samples out by rank, and does not show it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.numbers = range(rank, ROWS, world_size)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Any:
        return iter(self.numbers)


def _trainer(rank: int, world_size: int, kind: str, folder: str, reading: _Reading, options: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler: Any = {
                "weighted": lambda: WeightedRandomSampler([1.0] * ROWS, ROWS, replacement=False),
                "own generator": _OwnGenerator,
                "python": _OfPython,
                "unseeded": _Unseeded,
                "distributed": lambda: DistributedSampler(self.train_dataset, world_size, rank, shuffle=False),
                "shared out": lambda: _SharedOut(rank, world_size),
                "all on every rank": lambda: range(ROWS),
                "prepared twice": lambda: DistributedSampler(self.train_dataset, world_size, rank, shuffle=False),
                "stream": lambda: None,
            }[kind]()
            dataset = _Stream() if kind == "stream" else self.train_dataset
            size = self.args.per_device_train_batch_size
            loader = DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=reading)
            return self.accelerator.prepare(loader) if kind == "prepared twice" else loader

    strategies = {"random", "group_by_length"}
    sp_size = options.pop("sp_size", world_size)
    section = options.pop("section", None)
    ds = None
    if world_size > 1:
        import ds_hetero

        ds_hetero.register()
        ds = ds_config(1, UNEVEN_2)
        ds["train_micro_batch_size_per_gpu"] = ds["gradient_accumulation_steps"] = "auto"
        ds["sequence_parallel_size"] = sp_size
        if section is not None:
            ds["heterogeneity"] = section
    arguments = {
        "output_dir": folder,
        "deepspeed": ds,
        "use_cpu": ds is None,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": kind if kind in strategies else "random",
        **options,
    }
    torch.manual_seed(0)
    kind_of_trainer = Trainer if kind in strategies else OwnLoader
    args = TrainingArguments(**arguments)
    return kind_of_trainer(model=llama(), train_dataset=_rows(), data_collator=reading, args=args)


def _resume(rank: int, world_size: int, kind: str, folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """Rows that two epochs read in one go, and with a stop in the second."""
    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 8}
    whole, resumed = _Reading(), _Reading()
    uninterrupted = _trainer(rank, world_size, kind, folder, whole, {**options})
    uninterrupted.train()
    torch.rand(7)  # what draws before another training
    trainer = _trainer(rank, world_size, kind, folder, resumed, {**options})
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
    assert trainer.state.epoch == uninterrupted.state.epoch
    return whole.batches, resumed.batches


@pytest.mark.parametrize("kind", ["random", "group_by_length", "weighted", "own generator", "python", "stream"])
def test_an_epoch_that_is_begun_again_reads_what_is_left_of_its_order(kind: str, tmp_path: Path) -> None:
    for whole, resumed in ranks(_resume, 2, 2, kind, str(tmp_path)):
        assert sorted(number for batch in whole[-6:] for number in batch) == list(range(ROWS))
        assert resumed[-4:] == whole[-4:]  # a stream reads before what it leaves out


def test_a_sampler_that_draws_another_order_is_refused_by_name(tmp_path: Path) -> None:
    first, second = ranks(_refuse_unseeded, 2, str(tmp_path))
    assert first == second
    assert first.startswith("_Unseeded does not draw again what it drew before the checkpoint: the first 4 samples")
    assert "ignore_data_skip=True" in first


def _refuse_unseeded(rank: int, folder: str) -> str:
    from ds_hetero import SamplingError

    numbers = random.Random(1)  # alike on the ranks

    def sample(self: Any, population: Any, k: int) -> list[int]:
        return random.Random(numbers.random()).sample(population, k)

    random.SystemRandom.sample = sample  # type: ignore[method-assign]
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    _trainer(rank, 2, "unseeded", folder, _Reading(), {**options}).train()
    trainer = _trainer(rank, 2, "unseeded", folder, _Reading(), {**options})
    with pytest.raises(SamplingError) as caught:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return str(caught.value)


def _read_epoch(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> Any:
    """Rows that an epoch has read on this rank, steps and epoch; or why it was refused."""
    from ds_hetero.errors import HeteroError

    reading = _Reading()
    trainer = _trainer(rank, world_size, kind, "out", reading, options)
    try:
        trainer.train()
    except HeteroError as error:
        return str(error)
    return sorted(number for batch in reading.batches for number in batch), trainer.state.global_step


@pytest.mark.parametrize("kind", ["distributed", "shared out"])
def test_an_epoch_of_samples_shared_out_over_all_ranks_reads_each_once(kind: str) -> None:
    (first, steps), (second, others) = ranks(_read_epoch, 2, 2, kind, {})
    assert sorted(first + second) == list(range(ROWS))
    assert steps == others == ROWS / 2


def test_an_epoch_that_would_read_samples_twice_or_never_is_refused_on_all_ranks() -> None:
    twice = ranks(_read_epoch, 4, 4, "all on every rank", {"sp_size": 2})
    assert len(set(twice)) == 1
    assert twice[0].startswith("the loader of OwnLoader.get_train_dataloader reads the same samples on all 2 replicas")
    never = ranks(_read_epoch, 4, 4, "prepared twice", {"sp_size": 2})
    assert len(set(never)) == 1
    assert "reads 4 of 8 shards of the samples" in never[0]


def test_batches_of_each_rank_are_refused_where_the_loss_needs_whole_ones() -> None:
    for kind in ("distributed", "shared out"):
        first, second = ranks(_read_epoch, 2, 2, kind, {"label_smoothing_factor": 0.1})
        assert first == second
        assert first.startswith("the loader of OwnLoader.get_train_dataloader gives each of the 2 ranks of a replica")


def test_rows_are_grouped_by_length_over_all_replicas() -> None:
    whole = one_process(_batches_of_epoch, 1, {"per_device_train_batch_size": 4})
    first, _, second, _ = ranks(_batches_of_epoch, 4, 4, {"sp_size": 2})
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def _batches_of_epoch(rank: int, world_size: Any, options: dict[str, Any]) -> list[list[int]]:
    reading = _Reading()
    _trainer(rank, world_size, "group_by_length", "out", reading, options).train()
    return reading.batches


def test_a_loader_of_the_scripts_own_is_dealt_out_to_unlike_batches() -> None:
    section = {"batch": [3, 1]}
    options = {"section": section, "sp_size": 1}
    (first, steps), (second, others) = ranks(_read_epoch, 2, 2, "all on every rank", options)
    assert sorted(first + second) == list(range(ROWS))
    assert steps == others == ROWS / 4
    refused = ranks(_read_epoch, 2, 2, "distributed", {**options})
    assert len(set(refused)) == 1
    assert "without a DistributedSampler" in refused[0]
