"""A loader that is resumed gives the batches of one run, whatever draws them, or is refused by name. No ranks."""

import json
import random

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.random_states import process_states, set_process_states
from ds_hetero.runtime.data.sampling import replica_samples
from ds_hetero.runtime.data.whole_batches import BatchReading, WholeBatches
from ds_hetero.values.plans import BatchSplit

COUNT, EPOCHS = 10, 3
DATA = list(range(COUNT))
SPLIT = BatchSplit(micro_batch_sizes=(2, 1), micro_batches=(1, 1))


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def collate(numbers):
    return {"input_ids": torch.tensor(numbers)[:, None]}


def loader(**options):
    return DataLoader(DATA, collate_fn=collate, **{"batch_size": 2, **options})


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(DATA, collate_fn=collate, **{"batch_size": 2, **options})


def by_accelerate(**options):
    prepared = prepare_data_loader(loader(shuffle=True), num_processes=1, process_index=0, **options)
    prepared.rng_types = None
    return prepared


class OwnBatches:
    """A batch sampler of the user's, which shuffles with a generator of its own, or without."""

    def __init__(self, shuffle, **generators):
        self.shuffle = shuffle
        vars(self).update(generators)

    def __iter__(self):
        order = list(DATA)
        self.shuffle(self, order)
        return iter([order[i : i + 2] for i in range(0, COUNT, 2)])


class CountsEpochs(RandomSampler):
    """Seeds itself with a count of its own."""

    seed = 0

    def __iter__(self):
        self.seed += 1
        return iter(torch.randperm(COUNT, generator=seeded(self.seed)).tolist())


class Stream(IterableDataset):
    """Shuffled by a generator of its own, or by that of the process when it begins."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        yield from torch.randperm(COUNT, generator=self.generator).tolist()


class StreamWithState(Stream):
    """Knows where it is; torchdata's loader asks it."""

    def __init__(self):
        super().__init__(seeded())
        self.place, self.order = 0, None

    def __iter__(self):
        if self.order is None:
            self.place, self.order = 0, torch.randperm(COUNT, generator=self.generator).tolist()
        while self.place < COUNT:
            self.place += 1
            yield self.order[self.place - 1]
        self.order = None

    def state_dict(self):
        return {"place": self.place, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place, self.order = state["place"], state["order"]
        self.generator.set_state(state["generator"])


class DrawsInItem:
    """A dataset that draws for every sample, here only what a worker draws."""

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return i + 100 * int(torch.randint(1000, ()))


def distributed(kind=loader):
    return kind(sampler=DistributedSampler(DATA, num_replicas=2, rank=1, seed=5))


def stream(dataset, kind=DataLoader):
    return kind(dataset, batch_size=2, collate_fn=collate)


def of_replica(whole):
    return replica_samples(whole, SPLIT, 0)


EXACT = {
    "in order": lambda: loader(),
    "shuffle, generator": lambda: loader(shuffle=True, generator=seeded()),
    "shuffle, generator, workers": lambda: loader(shuffle=True, generator=seeded(), num_workers=1),
    "shuffle, no generator": lambda: loader(shuffle=True),
    "a list of batches": lambda: [collate([i]) for i in DATA],
    "RandomSampler, generator": lambda: loader(sampler=RandomSampler(DATA, generator=seeded())),
    "RandomSampler, replacement": lambda: loader(
        sampler=RandomSampler(DATA, replacement=True, num_samples=9, generator=seeded())
    ),
    "RandomSampler, replacement, no generator": lambda: loader(
        sampler=RandomSampler(DATA, replacement=True, num_samples=9)
    ),
    "RandomSampler, num_samples beyond the data": lambda: loader(
        sampler=RandomSampler(DATA, num_samples=13, generator=seeded())
    ),
    "WeightedRandomSampler, generator": lambda: loader(
        sampler=WeightedRandomSampler(range(1, COUNT + 1), 9, generator=seeded())
    ),
    "WeightedRandomSampler": lambda: loader(sampler=WeightedRandomSampler(range(1, COUNT + 1), 9)),
    "SubsetRandomSampler, generator": lambda: loader(sampler=SubsetRandomSampler(DATA, generator=seeded())),
    "SubsetRandomSampler": lambda: loader(sampler=SubsetRandomSampler(DATA)),
    "BatchSampler": lambda: DataLoader(
        DATA, collate_fn=collate, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 3, False)
    ),
    "own batch sampler, random.Random": lambda: own_batches(
        lambda self, order: self.rng.shuffle(order), rng=random.Random(3)
    ),
    "own batch sampler, numpy": lambda: own_batches(
        lambda self, order: self.rng.shuffle(order), rng=np.random.default_rng(3)
    ),
    "own batch sampler, random": lambda: own_batches(lambda self, order: random.shuffle(order)),
    "own batch sampler, numpy.random": lambda: own_batches(lambda self, order: np.random.shuffle(order)),
    "sampler that counts epochs": lambda: loader(sampler=CountsEpochs(DATA)),
    "DistributedSampler": distributed,
    "stream": lambda: stream(Stream(seeded())),
    "stream, no generator": lambda: stream(Stream()),
    "draws in a worker": lambda: DataLoader(DrawsInItem(), 2, collate_fn=collate, shuffle=True, num_workers=1),
    "accelerate": by_accelerate,
    "accelerate, seeds by epoch": lambda: by_accelerate(use_seedable_sampler=True),
    "accelerate, StatefulDataLoader": lambda: by_accelerate(use_stateful_dataloader=True),
    "StatefulDataLoader, shuffle, generator": lambda: stateful(shuffle=True, generator=seeded()),
    "StatefulDataLoader, shuffle": lambda: stateful(shuffle=True),
    "StatefulDataLoader, workers": lambda: stateful(shuffle=True, generator=seeded(), num_workers=1),
    "StatefulDataLoader, sampler of torch": lambda: stateful(
        sampler=WeightedRandomSampler(range(1, COUNT + 1), 9, generator=seeded())
    ),
    "StatefulDataLoader, SubsetRandomSampler": lambda: stateful(sampler=SubsetRandomSampler(DATA)),
    "StatefulDataLoader, DistributedSampler": lambda: distributed(stateful),
    "StatefulDataLoader, stream": lambda: stateful_stream(Stream(seeded())),
    "StatefulDataLoader, stream with a state": lambda: stateful_stream(StreamWithState()),
    "replica, shuffle, generator": lambda: of_replica(loader(shuffle=True, generator=seeded())),
    "replica, shuffle": lambda: of_replica(loader(shuffle=True)),
    "replica, stream": lambda: of_replica(stream(Stream(seeded()))),
    "replica, stream, no generator": lambda: of_replica(stream(Stream())),
}


def own_batches(shuffle, **generators):
    return DataLoader(DATA, collate_fn=collate, batch_sampler=OwnBatches(shuffle, **generators))


def stateful_stream(dataset):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return stream(dataset, StatefulDataLoader)


def train(batches, epochs, stop=None, start=0, used=0, is_plain=True):
    """By step, the samples and what training drew after them; and the state of the job where it was at ``stop``.

    Args:
        epochs: the number of epochs.
        stop: epoch and batches of it, where the state is taken.
        start: epoch to begin with.
        used: batches of it that were used before.
    """
    steps, state = [], None

    def take():
        taken = {
            "loader": batches.state(),
            "start": batches.start_of_epoch(is_begun=number > 0, checksum=batches.checksum),
            "process": process_states(),
        }
        return json.loads(json.dumps(taken)) if is_plain else taken

    for epoch in range(start, epochs):
        if used == 0 and hasattr(getattr(batches.dataloader, "sampler", None), "num_replicas"):
            batches.dataloader.sampler.set_epoch(epoch)  # as many scripts do, past the loader
        number = used if epoch == start else 0
        if stop == (epoch, 0):
            state = take()
        for batch in batches.read_epoch(number):
            number += 1
            steps.append((epoch, batch.sequences["input_ids"].flatten().tolist(), torch.rand(()).item()))
            if batches.reader is not None:
                batches.reader.take_drawn(number - 1)
            if stop == (epoch, number):
                state = take()
        used = 0
    return steps, state


def job(make, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return WholeBatches(make(), KNOWN_LOADERS, BatchReading())


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata's: fast-forwarding
@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_loader_goes_on_as_one_run(name):
    make = EXACT[name]
    for stop in [(1, 1)] if "worker" in name else [(0, 2), (1, 0), (1, 1), (2, 2)]:  # processes take their time
        whole, state = train(job(make, 1), EPOCHS, stop, is_plain="Stateful" not in name)
        batches = job(make, 2)
        batches.resume(stop[1], 0, state["loader"], state["start"])
        set_process_states(state["process"])
        resumed, _ = train(batches, EPOCHS, start=stop[0], used=stop[1])
        assert resumed == [step for step in whole if step[0] >= stop[0]][stop[1] :], stop


class DrawsPerBatch(OwnBatches):
    """Draws from the process for every batch, among what training draws."""

    def __iter__(self):
        for _ in range(5):
            yield torch.randint(COUNT, (2,)).tolist()


class DrawsInMainProcess(DrawsInItem):
    """Named for the table."""


REFUSED = {
    "sampler draws per batch": lambda: DataLoader(DATA, collate_fn=collate, batch_sampler=DrawsPerBatch(None)),
    "dataset draws per sample": lambda: DataLoader(DrawsInMainProcess(), 2, collate_fn=collate),
    "replica, sampler draws per batch": lambda: of_replica(
        DataLoader(DATA, collate_fn=collate, batch_sampler=DrawsPerBatch(None))
    ),
    "a generator that nobody sees": lambda: own_batches(
        lambda self, order: self.hidden[0].shuffle(order), hidden=[random.Random(torch.initial_seed())]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_does_not_give_the_same_again_is_refused(name):
    make = REFUSED[name]
    _, state = train(job(make, 1), 1, (0, 2))
    batches = job(make, 2)
    batches.resume(2, 0, state["loader"], state["start"])
    with pytest.raises(BatchError, match=r"does not give again .*first 2 (batches|steps) .*a generator of its own"):
        train(batches, 1, used=2)


def test_other_data_is_refused():
    _, state = train(job(loader, 1), 1, (0, 2))
    batches = job(lambda: DataLoader(DATA[1:], 2, collate_fn=collate), 1)
    batches.resume(2, 0, state["loader"], state["start"])
    with pytest.raises(BatchError, match="data, batch size and sampler that it had"):
        train(batches, 1)
