"""The samples of an optimizer step, divided among replicas: each once, in order, to nobody more than fit in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ds_hetero.cluster import load_cluster
from ds_hetero.cost import Workload
from ds_hetero.errors import BatchError, PlanError, ScheduleError
from ds_hetero.models import load_model
from ds_hetero.planner.micro_batches import plan_replicas, split_batch
from ds_hetero.runtime.data.sampling import (
    all_samples,
    micro_steps_in_epoch,
    reader_of,
    replica_samples,
    steps_in_epoch,
)
from ds_hetero.values.baselines import ring
from ds_hetero.values.plans import BatchSplit, Plan, read_plan

SPLIT = BatchSplit(micro_batch_sizes=(2, 1), micro_batches=(3, 2))
shares = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5)


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


@dataclass
class _Reader:
    split: BatchSplit
    num_samples: int


@pytest.mark.parametrize(("rest", "wanted"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (11, 3)])
def test_a_short_last_step_has_the_micro_batches_of_one_process(rest: int, wanted: int) -> None:
    """Of replicas that take 3 and 1 samples in each of three micro-batches."""
    split = BatchSplit(micro_batch_sizes=(3, 1), micro_batches=(3, 3))
    reader: Any = _Reader(split, 2 * split.samples + rest)
    assert micro_steps_in_epoch(reader) == 2 * 3 + wanted


def test_samples_of_a_step_are_shared_out_by_hand() -> None:
    assert (SPLIT.samples, SPLIT.micro_steps, SPLIT.samples_by_pipeline) == (8, 3, (6, 2))
    assert SPLIT.micro_batches_of(0, 8) == [(0, 2), (2, 4), (4, 6)]
    assert SPLIT.micro_batches_of(1, 8) == [(6, 7), (7, 8)]
    # Five samples are shared 3.75 : 1.25, in whole numbers 4 : 1.
    assert SPLIT.micro_batches_of(0, 5) == [(0, 2), (2, 4)]
    assert SPLIT.micro_batches_of(1, 5) == [(4, 5)]
    assert str(SPLIT) == "2 x 3 + 1 x 2 = 8 samples"


@given(shares, st.data())
def test_every_sample_of_a_step_is_in_one_micro_batch(listed: list[tuple[int, int]], data: st.DataObject) -> None:
    sizes, counts = zip(*listed, strict=True)
    split = BatchSplit(micro_batch_sizes=sizes, micro_batches=counts)
    samples = data.draw(st.integers(0, split.samples))
    parts = [split.micro_batches_of(replica, samples) for replica in range(len(sizes))]
    assert sorted(i for part in parts for start, stop in part for i in range(start, stop)) == list(range(samples))
    for part, size, count in zip(parts, sizes, counts, strict=True):
        assert len(part) <= count
        assert all(0 < stop - start <= size for start, stop in part)
    if samples == split.samples:
        assert [len(part) for part in parts] == list(counts)


def test_micro_batches_of_as_many_on_each_are_of_one_micro_batch_of_one_process() -> None:
    split = BatchSplit(micro_batch_sizes=(3, 1), micro_batches=(2, 2))
    assert [split.micro_batches_of(replica, 8) for replica in (0, 1)] == [[(0, 3), (4, 7)], [(3, 4), (7, 8)]]
    assert [split.micro_batches_of(replica, 6) for replica in (0, 1)] == [[(0, 3), (4, 6)], [(3, 4)]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_samples", [3, 16, 37])
def test_loaders_of_the_replicas_share_the_samples_of_one(num_samples: int, stream: bool, drop_last: bool) -> None:
    dataset: Any = Stream(num_samples) if stream else range(num_samples)
    whole: Any = DataLoader(dataset, batch_size=5, drop_last=drop_last, collate_fn=list)
    expected = [sample for batch in whole for sample in batch]
    loaders = [replica_samples(whole, SPLIT, replica) for replica in (0, 1)]
    batches = [list(loader) for loader in loaders]
    for step, first in enumerate(range(0, len(expected), SPLIT.samples)):
        samples = expected[first : first + SPLIT.samples]
        for replica, count in enumerate(SPLIT.micro_batches):
            wanted = [samples[a:b] for a, b in SPLIT.micro_batches_of(replica, len(samples))]
            assert batches[replica][step * count : (step + 1) * count] == wanted
    assert sorted(s for each in batches for batch in each for s in batch) == expected
    assert list(all_samples(loaders[1])) == list(whole)
    for loader, batch in zip(loaders, batches, strict=True):
        reader = reader_of(loader)
        assert reader is not None
        if stream:
            with pytest.raises(TypeError):
                steps_in_epoch(reader)
        else:
            assert len(loader) == len(batch)
            assert steps_in_epoch(reader) == -(-len(expected) // SPLIT.samples)
            assert micro_steps_in_epoch(reader) == 3 * steps_in_epoch(reader)  # replicas have 3 and 2 in a step
            sums = [reader.take_drawn(step).checksum for step in range(steps_in_epoch(reader) + 1)]
            assert all(sums[:-1]) and not sums[-1]
        for first_step in (1, 2):
            reader.first_step = first_step
            assert list(loader) == batch[first_step * SPLIT.micro_batches[reader.replica] :]
            reader.first_step = 0


def test_shuffling_is_the_given_sampler_s() -> None:
    sampler = RandomSampler(range(20))
    reader = reader_of(replica_samples(DataLoader(range(20), 4, sampler=sampler), SPLIT, 0))
    assert reader is not None and reader.sampler is sampler
    reader.sampler = SequentialSampler(range(20))
    assert next(iter(reader)) == [0, 1]
    bare = replica_samples(DataLoader(range(4), batch_sampler=[[2, 1], [3]]), SPLIT, 0)
    assert list(bare.batch_sampler) == [[2, 1]]
    with pytest.raises(TypeError, match="list does not show how many samples"):
        len(bare)


def test_loaders_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(BatchError, match="without a batch_size"):
        replica_samples(DataLoader(range(4), batch_size=None), SPLIT, 0)
    with pytest.raises(BatchError, match="num_workers=2"):
        replica_samples(DataLoader(Stream(4), 2, num_workers=2), SPLIT, 0)


# --- the file -----------------------------------------------------------------------------------------


def test_a_file_of_replicas_is_written_and_read_back() -> None:
    schedules = (ring(3, 4, 2), ring(1, 4, 2).shifted(3))
    plan = read_plan(Plan.of_replicas(schedules, SPLIT).to_replicas_dict())
    assert (plan.schedules, plan.batch_split) == (schedules, SPLIT)
    assert read_plan(schedules[0].to_dict()).batch_split is None
    alike = {"version": 1, "replicas": [{"schedule": ring(1, 4, 2).shifted(i).to_dict()} for i in (0, 1)]}
    assert read_plan(alike).batch_split is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"micro_batches": None}, r"replicas\[1\].micro_batches must be a whole number >= 1, got None"),
        ({"micro_batch_size": 0}, r"replicas\[1\].micro_batch_size must be a whole number >= 1, got 0"),
        ({"micro_batch_size": True}, r"replicas\[1\].micro_batch_size must be a whole number >= 1, got True"),
        ({"batch": 3}, r"replicas\[1\] takes schedule, micro_batch_size and micro_batches, got"),
    ],
)
def test_mistakes_in_the_file_are_named(change: dict[str, Any], says: str) -> None:
    written = Plan.of_replicas((ring(3, 4, 2), ring(1, 4, 2).shifted(3)), SPLIT).to_replicas_dict()
    written["replicas"][1] |= change
    with pytest.raises(ScheduleError, match=says):
        read_plan(written)


def test_replicas_of_different_sizes_say_what_they_train_on() -> None:
    written = Plan.of_replicas((ring(3, 4, 2), ring(1, 4, 2).shifted(3)), SPLIT).to_replicas_dict()
    del written["replicas"][0]["micro_batches"]
    with pytest.raises(ScheduleError, match="must be given for every replica, or for none"):
        read_plan(written)
    bare = {"version": 1, "replicas": [{"schedule": entry["schedule"]} for entry in written["replicas"]]}
    with pytest.raises(ScheduleError, match=r"replicas of \[3, 1\] ranks must say what each is to train on"):
        read_plan(bare)
    with pytest.raises(ScheduleError, match=r'two keys, "version": 1 and a list "replicas"; got .* and version None'):
        read_plan({"replicas": []})
    with pytest.raises(ScheduleError, match="need one entry per replica"):
        BatchSplit(micro_batch_sizes=(1,), micro_batches=(1, 2))


# --- choosing the batches -------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.floats(0.1, 2), min_size=1, max_size=4).map(lambda t: [*accumulate(t)]), min_size=1, max_size=3
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_no_other_batches_are_faster(times: list[list[float]], global_batch: int, lockstep: bool) -> None:
    choices = [[(b, m) for b in range(1, len(t) + 1) for m in range(1, global_batch // b + 1)] for t in times]
    all_steps = [
        max(t[b - 1] * m for t, (b, m) in zip(times, choice, strict=True))
        for choice in product(*choices)
        if sum(b * m for b, m in choice) == global_batch and (not lockstep or len({m for _, m in choice}) == 1)
    ]
    if not all_steps:
        with pytest.raises(PlanError, match=f"cannot make up a global batch of {global_batch}"):
            split_batch(times, global_batch, lockstep=lockstep)
        return
    split = split_batch(times, global_batch, lockstep=lockstep)
    assert split.samples == global_batch
    shares = zip(times, split.micro_batch_sizes, split.micro_batches, strict=True)
    assert max(t[size - 1] * count for t, size, count in shares) == pytest.approx(min(all_steps))


@pytest.mark.parametrize("stage", [1, 2])
def test_replicas_of_two_clusters_are_planned_together(stage: int) -> None:
    """Eight GPUs against four of the same kind: two thirds of the samples, whether in lockstep or not."""
    link = {"bandwidth_gb_per_s": 300, "latency_us": 5}
    clusters = [
        load_cluster({"nodes": [{"name": "n", "device": "A100-SXM-80GB", "count": count, "link": link}]})
        for count in (8, 4)
    ]
    found = plan_replicas(clusters, load_model("gpt-7b"), Workload(seq_len=16384, zero_stage=stage), 12)
    assert found.split.samples_by_pipeline == (8, 4)
    assert [schedule.ranks for schedule in found.schedules] == [tuple(range(8)), tuple(range(8, 12))]
    assert max(found.busy_s) == pytest.approx(found.step_s)
    assert found.even_s is not None and found.even_s > 1.2 * found.step_s
