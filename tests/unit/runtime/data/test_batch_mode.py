"""Same batch on every rank or one of its own: what real samplers show, and what is concluded."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.batch_mode import LoaderReport, decide_batch_mode, describe_loader
from ds_hetero.runtime.data.loader_names import TORCH_LOADERS


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(24))


def torch_loader(world_size, rank):
    sampler = DistributedSampler(Numbers(), num_replicas=world_size, rank=rank)
    return DataLoader(Numbers(), batch_size=2, sampler=sampler)


def accelerate_loader(world_size, rank, dataset=None, skip=0):
    from accelerate import skip_first_batches
    from accelerate.data_loader import prepare_data_loader

    loader = DataLoader(dataset or Numbers(), batch_size=2, shuffle=dataset is None)
    loader = prepare_data_loader(loader, num_processes=world_size, process_index=rank)
    return skip_first_batches(loader, skip) if skip else loader


def reports_of(make, shards, replica_size):
    """Reports of a job whose rank r reads shard ``shards[r]``."""
    return [
        describe_loader(make(*shard), KNOWN_LOADERS, replica=rank // replica_size) for rank, shard in enumerate(shards)
    ]


OVER_RANKS = [(4, 0), (4, 1), (4, 2), (4, 3)]
OVER_REPLICAS = [(2, 0), (2, 0), (2, 1), (2, 1)]
SHARDED = [torch_loader, accelerate_loader, lambda *shard: accelerate_loader(*shard, Stream())]


@pytest.mark.parametrize("make", SHARDED)
def test_a_sampler_over_all_ranks_gives_each_its_own_batches(make):
    mode, why = decide_batch_mode(reports_of(make, OVER_RANKS, 2))
    assert mode == "own"
    assert "different shards, 0 of 4, 1 of 4" in why
    assert decide_batch_mode(reports_of(make, OVER_RANKS, 4))[0] == "own"


@pytest.mark.parametrize("make", SHARDED)
def test_a_sampler_over_replicas_gives_all_ranks_of_one_the_same(make):
    mode, why = decide_batch_mode(reports_of(make, OVER_REPLICAS, 2))
    assert mode == "same"
    assert "same shard, 0 of 2" in why


def test_a_resumed_accelerate_loader_still_shows_its_shard():
    assert decide_batch_mode(reports_of(lambda *shard: accelerate_loader(*shard, skip=1), OVER_RANKS, 2))[0] == "own"


def test_a_loader_that_accelerate_does_not_split_gives_all_ranks_the_same():
    mode, why = decide_batch_mode(reports_of(accelerate_loader, [(1, 0)] * 4, 4))
    assert mode == "same"
    assert "accelerate" in why


def test_a_dataset_split_by_node_shows_its_shard():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    def loader(world_size, rank):
        dataset = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset()
        return DataLoader(split_dataset_by_node(dataset, rank=rank, world_size=world_size), batch_size=2)

    assert decide_batch_mode(reports_of(loader, OVER_RANKS, 2))[0] == "own"
    assert decide_batch_mode(reports_of(loader, OVER_REPLICAS, 2))[0] == "same"


@pytest.mark.parametrize(
    "make", [lambda *_: DataLoader(Numbers(), shuffle=True), lambda *_: DataLoader(Stream()), lambda *_: [{}, {}]]
)
@pytest.mark.parametrize(
    ("firsts", "mode"),
    [
        (["a", "a", "b", "b"], "same"),
        (["a", "b", "c", "d"], "own"),
        (["a", "", "c", "d"], "own"),  # a rank without any batch
        (["", "", "", ""], "same"),
    ],
)
def test_without_a_sampler_that_shards_first_batches_decide(make, firsts, mode):
    reports = reports_of(make, OVER_RANKS, 2)
    assert decide_batch_mode(reports)[0] is None
    assert decide_batch_mode([replace(s, first=first) for s, first in zip(reports, firsts, strict=True)])[0] == mode


def test_a_batch_mode_given_by_the_user_is_kept():
    reports = [replace(report, requested="same") for report in reports_of(torch_loader, OVER_RANKS, 2)]
    assert decide_batch_mode(reports) == ("same", "as requested")


def test_a_report_survives_being_sent():
    for report in reports_of(accelerate_loader, OVER_RANKS, 2):
        assert pickle.loads(pickle.dumps(report)) == report
    assert describe_loader(DataLoader(Stream()), TORCH_LOADERS, 0).length is None
    assert describe_loader(torch_loader(4, 0), TORCH_LOADERS, 0).length == 3


def report(replica=0, shards=(), **rest):
    return LoaderReport(replica=replica, requested=None, shards=shards, **rest)


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ([replace(report(), requested="same"), report()], r"batches must be the same on every rank.*\['same', None\]"),
        ([replace(report(), requested="mine")] * 2, "batches is 'mine'"),
        ([report(shards=((2, 2),)), report(shards=((2, 3),))], "rank 0 reads shard 2 of 2"),
        (
            [report(shards=((4, 0),)), report(shards=((4, 0),)), report(shards=((4, 1),))],
            "same shard: 0 of 4, 0 of 4, 1",
        ),
        ([report(shards=((2, 0),)), report()], "0 of 2, none"),
        ([report(first="a"), report(first="a"), report(first="b")], "same first batch"),
        ([report(0, ((2, 0),)), report(0, ((2, 0),)), report(1), report(1)], "loaders of the replicas differ"),
        ([report(0, ((3, 0),)), report(0, ((3, 1),)), report(1, ((3, 2),))], r"replicas of \[2, 1\] ranks"),
    ],
)
def test_contradictions_are_refused(reports, says):
    with pytest.raises(BatchError, match=says):
        decide_batch_mode(reports)


def test_replicas_of_one_rank_agree_with_any():
    assert decide_batch_mode([report(0, ((3, 0),)), report(0, ((3, 0),)), report(1, ((3, 2),))])[0] == "same"
    assert decide_batch_mode([report(0), report(1)])[0] == "same"


def test_describing_reads_nothing():
    state = torch.get_rng_state()
    describe_loader(DataLoader(Numbers(), shuffle=True), TORCH_LOADERS, 0)
    assert torch.equal(torch.get_rng_state(), state)
