"""Samples, samplers and loaders: what one process reads, and the loader that a script for ranks makes of the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from tests.integration.combinations.modules import RARE_TOKEN
from tests.integration.tiny import VOCAB

KINDS = (
    "list",
    "sequential",
    "shuffled",
    "own sampler",
    "by length",
    "weighted",
    "stream",
    "distributed over all ranks",
)


@dataclass(frozen=True)
class Loading:
    """What is read, and in which order.

    Args:
        kind: of `KINDS`; "distributed" where there are several replicas: each reads its own.
        rows: samples of an epoch.
        batch: rows of a micro-batch of one replica.
        lengths: shortest and longest row; padding on the right makes up the difference.
        workers: processes that read.
        drop_last: a short last batch is left out.
        few_labels: of each row so many first labels do not count, that the first ranks have few or none.
        shuffle: of "distributed" ones.
    """

    kind: str
    rows: int
    batch: int
    lengths: tuple[int, int]
    workers: int
    drop_last: bool
    few_labels: bool
    shuffle: bool

    def describe(self) -> str:
        """For people."""
        parts = [
            f"{self.rows} rows of {self.lengths[0]} to {self.lengths[1]} tokens, {self.batch} at a time ({self.kind})",
            "few labels" if self.few_labels else "",
            f"{self.workers} workers" if self.workers else "",
            "drop_last" if self.drop_last else "",
            "shuffled" if self.shuffle else "",
        ]
        return ", ".join(filter(None, parts))


def draw(rng: random.Random, world_size: int, replicas: int = 1, kinds: Sequence[str] = KINDS) -> Loading:
    """Any of them.

    Args:
        world_size: ranks of the job.
        replicas: where there are several, each reads its own, all of one length and with as many labels.
        kinds: to choose from.
    """
    kind = "distributed" if replicas > 1 else rng.choice(kinds)
    batch = rng.choice([1, 2, 2, 3])
    longest = rng.randint(20, 48)
    varies = (replicas == 1 and rng.random() < 0.4) or kind == "by length"
    readers = world_size if kind == "distributed over all ranks" else replicas
    rows = rng.randint(3, 9) if readers == 1 else batch * readers * rng.randint(1, 3)
    return Loading(
        kind=kind,
        rows=max(rows, batch),
        batch=batch,
        lengths=(longest - 8 if varies else longest, longest),
        workers=1 if kind not in ("list",) and rng.random() < 0.1 else 0,
        drop_last=rng.random() < 0.3,
        few_labels=replicas == 1 and rng.random() < 0.3,
        shuffle=rng.random() < 0.5,
    )


def samples(loading: Loading) -> list[dict[str, Tensor]]:
    """All rows; each has the rare token in one place."""
    generator = torch.Generator().manual_seed(11)
    shortest, longest = loading.lengths
    made = []
    for number in range(loading.rows):
        length = shortest + (5 * number) % (longest - shortest + 1)
        ids = torch.randint(8, VOCAB, (length,), generator=generator)
        ids[(3 + 7 * number) % length] = RARE_TOKEN
        labels = ids.clone()
        if loading.few_labels:
            labels[: length - 4 - number % 3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows padded on the right, with a mask where there is padding."""
    longest = max(len(row["input_ids"]) for row in rows)
    if all(len(row["input_ids"]) == longest for row in rows):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def padded(name: str, fill: int) -> Tensor:
        return torch.stack([_padded(row[name], longest, fill) for row in rows])

    mask = torch.stack([_padded(torch.ones_like(row["input_ids"]), longest, 0) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def collate_any(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack every entry."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _padded(values: Tensor, length: int, fill: int) -> Tensor:
    """``values`` followed by ``fill`` up to a length."""
    return torch.nn.functional.pad(values, (0, length - len(values)), value=fill)


class OwnSampler(Sampler[int]):
    """Of the script: another order in each epoch."""

    def __init__(self, number: int) -> None:
        self._number, self._generator = number, torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._number, generator=self._generator).tolist())

    def __len__(self) -> int:
        return self._number


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def make(loading: Loading, place: int = 0, places: int = 1) -> Any:
    """The loader of a script.

    Args:
        place: of the replica, or of the rank, that reads.
        places: how many of them there are; 1 where all read the same.
    """
    rows: Any = samples(loading)
    if loading.kind == "list":
        starts = range(0, len(rows), loading.batch)
        batches = [collate(rows[start : start + loading.batch]) for start in starts]
        return [b for b in batches if not loading.drop_last or len(b["labels"]) == loading.batch]
    options: dict[str, Any] = {
        "batch_size": loading.batch,
        "collate_fn": collate,
        "drop_last": loading.drop_last,
        "num_workers": loading.workers,
    }
    if loading.kind == "stream":
        return DataLoader(Stream(rows), **options)
    if loading.kind == "shuffled":
        return DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(4), **options)
    sampler = _sampler(loading, rows, place, places)
    return DataLoader(rows, sampler=sampler, **options)


def _sampler(loading: Loading, rows: Dataset[Any], place: int, places: int) -> Any:
    if loading.kind.startswith("distributed"):
        return DistributedSampler(rows, places, place, shuffle=loading.shuffle, seed=5)
    if loading.kind == "own sampler":
        return OwnSampler(loading.rows)
    if loading.kind == "by length":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        lengths = [len(row["input_ids"]) for row in rows]  # type: ignore[attr-defined]
        return LengthGroupedSampler(loading.batch, rows, lengths, generator=torch.Generator().manual_seed(6))
    if loading.kind == "weighted":
        weights = [1.0 + number % 3 for number in range(loading.rows)]
        return WeightedRandomSampler(weights, loading.rows, generator=torch.Generator().manual_seed(7))
    return None


def begin_epoch(loader: Any, epoch: int) -> None:
    """What scripts do for distributed samplers."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def endless(loader: Any, epoch: int = 0) -> Iterator[tuple[int, Any]]:
    """Epoch and batch, epoch after epoch."""
    while True:
        begin_epoch(loader, epoch)
        is_empty = True
        for batch in loader:
            is_empty = False
            yield epoch, batch
        assert not is_empty or epoch == 0 or hasattr(loader, "state_dict"), "an epoch without batches"
        epoch += 1


def micro_batches(loading: Loading, world_size: int, replicas: int) -> Iterator[list[dict[str, Tensor]]]:
    """What one process reads: by micro-batch, the batch of each replica."""
    if loading.kind == "distributed over all ranks":
        readers = [endless(make(loading, rank, world_size)) for rank in range(world_size)]
        while True:
            for reader in readers:  # the batches of the ranks are used in turn
                yield [next(reader)[1]]
    readers = [endless(make(loading, replica, replicas)) for replica in range(replicas)]
    while True:
        yield [next(reader)[1] for reader in readers]
