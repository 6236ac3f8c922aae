"""Batches that are placed ahead are those that would be placed when due, and what goes wrong comes when it is due."""

import threading

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import BatchError, PeerError
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

COUNT = 6


def test_batches_are_placed_while_the_step_computes():
    run_ranks(_check_ahead, 2)


class Placing:
    """Cuts by length, and notes which lengths it was asked for in which thread."""

    def __init__(self):
        self.lengths, self.threads, self.done = [], set(), threading.Event()

    def __call__(self, schedule, length, rows=()):
        self.lengths.append(length)
        self.threads.add(threading.current_thread().name)
        self.done.set()
        return stream_placement(schedule, length, rows)


def _replica():
    groups = (Group(ranks=(0,), tokens=(2,), heads=(2,)), Group(ranks=(1,), tokens=(1,), heads=(2,)))
    return make_replica(Plan.of_replicas([Schedule(num_heads=2, num_kv_heads=1, groups=groups)]))


def _batch(numbers):
    return {"input_ids": torch.arange(10 + numbers[0])[None]}


def _loader(read=None):
    return DataLoader(range(COUNT), collate_fn=_batch if read is None else lambda n: read(n[0]) or _batch(n))


def _lengths_of(loader):
    return [int(shard["position_ids"].ds_hetero_shard.placement.length) for shard in loader]


def _check_ahead(rank):
    replica = _replica()
    _check_threads_and_changes(replica)
    _check_errors(replica, rank)
    _check_ends(replica)


def _check_threads_and_changes(replica):
    now = [Placing()]
    loader = ShardedLoader(_loader(), replica, placer=lambda *batch: now[0](*batch), plan_ahead=lambda: now[0])
    seen = []
    for step, shard in enumerate(loader):
        seen.append(shard["position_ids"].ds_hetero_shard.placement.length)
        if step == 2:  # between two steps, on every rank: what was placed ahead is placed again
            assert now[0].lengths == [10, 11, 12, 13] or now[0].done.wait(5)
            first, now[0] = now[0], Placing()
    assert seen == list(range(10, 10 + COUNT))
    assert now[0].lengths == [13, 14, 15]
    assert any(name.startswith("ds_hetero.planning") for name in first.threads)

    read = []
    mine = ({"input_ids": torch.arange(read.append(n) or 10 + n)[None]} for n in range(COUNT))
    placing = Placing()
    for step, _ in enumerate(ShardedLoader(mine, replica, batches="same", placer=placing, plan_ahead=lambda: placing)):
        assert read == list(range(step + 1))  # it may make its batches of what the model has learned


def _check_errors(replica, rank):
    def breaks(number):
        if number == 3 and rank == 1:
            raise ValueError("no such sample")

    placing = Placing()
    steps = iter(ShardedLoader(_loader(breaks), replica, batches="same", placer=placing, plan_ahead=lambda: placing))
    assert len([next(steps) for _ in range(3)]) == 3
    with pytest.raises(ValueError if rank == 1 else PeerError, match="no such sample"):
        next(steps)

    def refuses(schedule, length, rows=()):
        if length == 12:
            raise BatchError("12 tokens do not fit")
        return stream_placement(schedule, length, rows)

    steps = iter(ShardedLoader(_loader(), replica, batches="same", placer=refuses, plan_ahead=lambda: refuses))
    assert len([next(steps) for _ in range(2)]) == 2
    with pytest.raises(BatchError, match="12 tokens do not fit"):
        next(steps)


def _check_ends(replica):
    """accelerate takes an accumulation for finished when its loader says that the epoch ends: not a step early."""
    placing = Placing()
    prepared = prepare_data_loader(_loader(), num_processes=1, process_index=0, put_on_device=False)
    prepared.rng_types = None
    loader = ShardedLoader(
        prepared, replica, batches="same", placer=placing, plan_ahead=lambda: placing, names=KNOWN_LOADERS
    )
    for _ in range(2):
        ends = [(prepared.end_of_dataloader, prepared.gradient_state.in_dataloader) for _ in loader]
        assert ends == [(False, True)] * (COUNT - 1) + [(True, True)]
