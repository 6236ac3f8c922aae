"""A module that is not split gets each rank's samples; a resumed epoch goes on with those of one run, or is refused."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.random_states import process_states, set_process_states
from ds_hetero.runtime.data.sample_loader import SampleLoader
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

COUNT = 11
SPLIT = BatchSplit(micro_batch_sizes=(2, 1), micro_batches=(2, 1))  # steps of 5 samples, two micro-batches each


class Stream(IterableDataset):
    """Shuffled by the generator of the process."""

    def __iter__(self):
        return iter(torch.randperm(COUNT).tolist())


class DrawsPerSample(Stream):
    """Draws among what training draws."""

    def __iter__(self):
        return (int(torch.randint(COUNT, ())) for _ in range(COUNT))


class Trainee:
    """A module in training that has used every micro-batch."""

    training = True

    def __init__(self, replica):
        self.replica, self.given = replica, []

    def give(self, batch):
        self.given.append(batch)

    def expect_used(self):
        pass

    def note_reader(self, reader):
        pass


def test_a_resumed_loader_of_samples_goes_on_as_one_run():
    run_ranks(_check_resume, 2)


def make_loader(kind, replica, seed):
    torch.manual_seed(seed)
    if kind == "this rank's micro-batches":
        loader = [torch.arange(2 - replica.rank) + 10 * i for i in range(6 - 3 * replica.rank)]
    elif "stream" in kind:
        loader = DataLoader(DrawsPerSample() if "draws" in kind else Stream(), batch_size=4)
    else:
        generator = torch.Generator().manual_seed(3) if "generator" in kind else None
        loader = DataLoader(range(COUNT), batch_size=4, shuffle=True, generator=generator)
    return SampleLoader(loader, Trainee(replica), torch.device("cpu"))


def _check_resume(rank):
    schedules = [
        Schedule(num_heads=1, num_kv_heads=1, groups=(Group(ranks=(r,), tokens=(1,), heads=(1,)),)) for r in range(2)
    ]
    replica = make_replica(Plan.of_replicas(schedules, SPLIT))
    for kind in ("shuffle", "shuffle, generator", "stream", "this rank's micro-batches"):
        for stop in ((0, 1), (0, 2), (1, 0), (1, 3)):
            loader = make_loader(kind, replica, 1)
            whole, state = train(loader, 0, 0, stop)
            assert len(whole) == 12, kind
            resumed, (of_loader, of_process) = make_loader(kind, replica, 2), json.loads(state)
            resumed.load_state_dict(of_loader)
            assert resumed.state_dict() == of_loader
            set_process_states(of_process)
            rest, _ = train(resumed, *stop)
            assert rest == [step for step in whole if step[0] >= stop[0]][stop[1] :], (kind, stop)
            assert given(resumed) == given(loader)[-len(rest) :], (kind, stop)

    loader = make_loader("stream that draws", replica, 1)
    _, state = train(loader, 0, 0, (0, 4))
    resumed = make_loader("stream that draws", replica, 2)
    resumed.load_state_dict(json.loads(state)[0])
    with pytest.raises(BatchError, match="does not give again what it gave before the checkpoint: the first 2 steps"):
        next(iter(resumed))
    with pytest.raises(BatchError, match=r"'global_batch': 4\} cannot resume with .*'global_batch': 5\}"):
        resumed.load_state_dict({**json.loads(state)[0], "global_batch": 4})


def given(loader):
    """What the trainee was told, without the beginnings of epochs."""
    return [batch for batch in loader._trainee.given if batch is not None]


def train(loader, start, used, stop=None):
    """Two epochs: by step, the samples and what training draws after them; and the state at ``stop``."""
    steps, state = [], None
    for epoch in range(start, 2):
        before = used if epoch == start else 0
        if stop == (epoch, 0):
            state = json.dumps([loader.state_dict(), process_states()])
        for number, batch in enumerate(loader, before + 1):
            steps.append((epoch, batch.tolist(), torch.rand(()).item()))
            if stop == (epoch, number):
                state = json.dumps([loader.state_dict(), process_states()])
    return steps, state
