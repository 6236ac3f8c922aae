"""Every rank gets exactly its part of every batch, once, whoever held the batch; and no rank is left waiting."""

import json
import logging

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import BatchError, PeerError
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.random_states import process_states, set_process_states
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Group, Schedule, schedules_for_world
from tests.support import run_ranks

NUM_BATCHES = 7


def make_schedule(groups, layout):
    groups = tuple(Group(ranks=ranks, tokens=tokens, heads=(4,) + (0,) * (len(ranks) - 1)) for ranks, tokens in groups)
    return Schedule(num_heads=4, num_kv_heads=2, groups=groups, layout=layout)


UNEVEN = make_schedule([((0, 2), (3, 1)), ((1,), (2,))], "zigzag")
WITHOUT_TOKENS = make_schedule([((0, 1, 2), (5, 0, 2))], "contiguous")
PAIR = make_schedule([((0,), (2,)), ((1,), (1,))], "zigzag")


def make_batch(number):
    """Batches differ in length, rows and entries; each tells which one it is."""
    generator = torch.Generator().manual_seed(number)
    rows, length = 1 + number % 2, (11, 37, 5, 64)[number % 4]
    ids = torch.randint(1000, (rows, length), generator=generator)
    return {
        "input_ids": ids,
        "labels": ids + number,
        "attention_mask": torch.ones(rows, length, dtype=torch.bool),
        "token_type_ids": ids.to(torch.int16),
        "embeds": torch.randn(rows, length, 3, generator=generator).bfloat16(),
        "cu_seq_lens_q": torch.tensor([0, 3, length], dtype=torch.int32),
        "number": torch.tensor(number),
        "name": f"batch {number}",
    }


def expected_shard(number, schedule, rank):
    """The slow way: index the whole batch by positions."""
    batch = make_batch(number)
    labels = batch.pop("labels")
    batch["shift_labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    rows, length = batch["input_ids"].shape
    batch["position_ids"] = torch.arange(length).expand(rows, length)
    mine = stream_placement(schedule, length).positions(rank)
    whole = ("cu_seq_lens_q", "number", "name")
    return {name: entry if name in whole else entry[:, mine] for name, entry in batch.items()}


def assert_shards(shards, numbers, replica):
    shards = list(shards)
    assert [shard["name"] for shard in shards] == [f"batch {number}" for number in numbers]
    for shard, number in zip(shards, numbers, strict=True):
        expected = expected_shard(number, replica.schedule, replica.rank)
        assert shard.keys() == expected.keys()
        for name, entry in expected.items():
            if isinstance(entry, torch.Tensor):
                assert shard[name].dtype == entry.dtype
                assert torch.equal(shard[name], entry), name


class Numbers(Dataset):
    def __init__(self, size=NUM_BATCHES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i


class Stream(IterableDataset):
    """Numbers of one shard; tells how often it was begun."""

    def __init__(self, count=1, index=0):
        self.count, self.index, self.begun = count, index, 0

    def __iter__(self):
        self.begun += 1
        return iter(range(self.index, NUM_BATCHES, self.count))


def collate(numbers):
    return make_batch(numbers[0])


def map_style(size, count=1, index=0, **rest):
    sampler = DistributedSampler(Numbers(size), num_replicas=count, rank=index, shuffle=False, drop_last=True)
    return DataLoader(Numbers(size), sampler=sampler, collate_fn=collate, **rest)


# --- what reaches a rank ---------------------------------------------------------------------------


def test_shards_equal_slicing_the_whole_batch():
    run_ranks(_check_shards, 3)


def _check_shards(rank):
    for schedule in (UNEVEN, WITHOUT_TOKENS):
        replica = make_replica(Plan.of_replicas([schedule]))
        same = ShardedLoader(map_style(NUM_BATCHES), replica)
        own = ShardedLoader(map_style(9, 3, rank), replica)
        stream = ShardedLoader(DataLoader(Stream(3, rank), collate_fn=collate), replica)
        repeated = ShardedLoader(DataLoader(Stream(), collate_fn=collate), replica)
        assert (same.batches, own.batches, stream.batches, repeated.batches) == ("same", "own", "own", "same")
        assert (len(same), len(own)) == (NUM_BATCHES, 9)
        with pytest.raises(TypeError):
            len(stream)
        for _ in range(2):  # epochs
            assert_shards(same, range(NUM_BATCHES), replica)
            assert_shards(own, range(9), replica)
            # One rank holds three batches, two hold two: all seven are used, and all ranks stop together.
            assert_shards(stream, range(NUM_BATCHES), replica)
            assert_shards(repeated, range(NUM_BATCHES), replica)
        assert stream.dataset.begun == 2  # looking at the first batch cost no extra epoch
        assert (same.batch_size, same.sampler.num_replicas, own.dataset.size) == (1, 1, 9)

        # As DeepSpeed's adapter is used: next() without iter(), which goes on in a new epoch after StopIteration.
        assert_shards([next(own) for _ in range(4)], range(4), replica)
        assert_shards([next(own) for _ in range(5)], range(4, 9), replica)
        with pytest.raises(StopIteration):
            next(own)
        assert_shards([next(own)], [0], replica)
        # An epoch left in the middle is over, as with a DataLoader.
        assert_shards([next(iter(own))], [0], replica)
        assert_shards(own, range(9), replica)


def test_a_batch_costs_one_collective():
    run_ranks(_count_traffic, 3)


def _count_traffic(rank):
    replica = make_replica(Plan.of_replicas([UNEVEN]))
    same = iter(ShardedLoader(map_style(NUM_BATCHES), replica))
    with CommDebugMode() as comms:
        next(same)
    assert comms.get_total_counts() == 1
    own = iter(ShardedLoader(map_style(9, 3, rank), replica))
    with CommDebugMode() as comms:
        for _ in range(3):
            next(own)
    assert comms.get_total_counts() == 2  # the descriptions of three small batches fit into one all_gather


def test_two_replicas_read_different_data_and_the_reason_is_logged():
    logs = run_ranks(_check_replicas, 4)
    assert logs[1:] == [[], [], []]
    info, warning, asked = logs[0]
    assert info == 'INFO batches="same": all ranks of a replica are given the same batch; ' + (
        "all ranks of a replica read the same shard, 0 of 2"
    )
    assert warning == 'WARNING batches="own": each rank is given its own batch; the first batches differ'
    assert asked == 'INFO batches="same": all ranks of a replica are given the same batch; as requested'


def _check_replicas(rank):
    logs = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("ds_hetero.runtime.data.fetchers")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    replica = make_replica(Plan.of_replicas(schedules_for_world(PAIR, 4)))
    for loader, numbers in (
        (ShardedLoader(map_style(8, 2, rank // 2), replica), range(rank // 2, 8, 2)),
        (
            ShardedLoader([make_batch(n) for n in (rank, rank + 4)], replica),
            (2 * (rank // 2) + i for i in (0, 1, 4, 5)),
        ),
        (ShardedLoader([make_batch(3)], replica, batches="same"), [3]),
    ):
        assert_shards(loader, list(numbers), replica)
    return logs


# --- resuming --------------------------------------------------------------------------------------


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("plans_ahead", "stops"),
    [
        (True, (2, 7)),
        pytest.param(False, (0, 1, 2, 3, 5, 7), marks=pytest.mark.slow),
        pytest.param(True, (0, 1, 3, 5), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_loader_goes_on_in_the_middle_of_an_epoch(plans_ahead, stops):
    run_ranks(_check_resume, 3, plans_ahead, stops)


def _check_resume(rank, plans_ahead, stops):
    more = {"names": KNOWN_LOADERS, "plan_ahead": _stream_placer if plans_ahead else None}
    replica = make_replica(Plan.of_replicas([UNEVEN]))

    def shuffled(count=1, index=0, stateful=False):
        sampler = DistributedSampler(Numbers(12), num_replicas=count, rank=index, seed=5)
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(Numbers(12), sampler=sampler, collate_fn=collate)
        return DataLoader(Numbers(12), sampler=sampler, collate_fn=collate)

    def prepared(count=1, index=0):
        loader = prepare_data_loader(
            shuffled(), num_processes=count, process_index=index, use_stateful_dataloader=True, even_batches=False
        )
        loader.rng_types = None
        return loader

    makers = {
        "same": lambda: shuffled(),
        "own": lambda: shuffled(3, rank),
        "stream": lambda: DataLoader(Stream(3, rank), collate_fn=collate),
        "same, with a state": lambda: shuffled(stateful=True),
        "own, with a state": lambda: shuffled(3, rank, stateful=True),
        "same, accelerate with a state": lambda: prepared(),
        "own, accelerate with a state": lambda: prepared(3, rank),
    }
    for name, make in makers.items():
        for stop in stops:
            loader = ShardedLoader(make(), replica, **more)
            loader.set_epoch(3)
            whole = names(loader)
            loader.set_epoch(3)
            steps = iter(loader)
            used = [next(steps)["name"] for _ in range(stop)]
            state = json.loads(json.dumps(loader.state_dict())) if "state" not in name else loader.state_dict()
            assert used + names(steps) == whole

            resumed = ShardedLoader(make(), replica, **more)
            resumed.load_state_dict(state)
            assert resumed.state_dict()["used"] == state["used"]
            assert used + names(resumed) == whole, (name, stop)
            resumed.set_epoch(3)
            assert names(resumed) == whole  # only the first epoch is shortened

            twice = ShardedLoader(
                make(), replica, **more
            )  # a state saved after resuming counts from the epoch's beginning
            twice.load_state_dict(state)
            steps = iter(twice)
            used += [next(steps)["name"]] if stop < len(whole) else []
            resumed.load_state_dict(twice.state_dict())
            assert used + names(resumed) == whole, (name, stop)

            if "state" not in name and name != "stream":  # as the HF Trainer resumes
                loader.set_epoch(3)
                shorter = loader.skipping(stop, skip_first_batches)
                assert len(shorter) == len(whole) - stop
                assert names(shorter) == whole[stop:], (name, stop)

    with pytest.raises(BatchError, match=r"'batches': 'own'.*cannot resume with.*'batches': 'same'"):
        ShardedLoader(shuffled(), replica).load_state_dict(state)
    _check_generators(rank, replica, more)
    _check_refusal(rank, replica)


def _check_generators(rank, replica, more):
    """Every epoch has another order, which a resumed one goes on with; the process draws what it would have drawn."""

    def make(mode, seed):
        torch.manual_seed(seed)
        generator = None if mode == "same" else torch.Generator().manual_seed(rank)
        loader = DataLoader(Numbers(12), shuffle=True, generator=generator, collate_fn=collate)
        return ShardedLoader(loader, replica, batches=mode, **more)

    for mode in ("same", "own"):
        for stop in ((0, 2), (1, 0), (1, 4)):
            loader, whole, state = make(mode, 1), [], None
            for epoch in range(2):
                if stop == (epoch, 0):
                    state = json.dumps([loader.state_dict(), process_states()])
                for number, name in enumerate((shard["name"] for shard in loader), 1):
                    whole.append((epoch, name, torch.rand(()).item()))
                    if stop == (epoch, number):
                        state = json.dumps([loader.state_dict(), process_states()])
            resumed, (of_loader, of_process) = make(mode, 2), json.loads(state)
            resumed.load_state_dict(of_loader)
            set_process_states(of_process)
            rest = [(epoch, shard["name"], torch.rand(()).item()) for epoch in range(stop[0], 2) for shard in resumed]
            assert rest == [step for step in whole if step[0] >= stop[0]][stop[1] :], (mode, stop)


def _check_refusal(rank, replica):
    """One rank's loader gives other batches than before: every rank says so."""
    loader = ShardedLoader(map_style(NUM_BATCHES), replica)
    steps = iter(loader)
    next(steps)
    state = loader.state_dict()
    numbers = list(range(rank == 1, NUM_BATCHES))
    resumed = ShardedLoader(DataLoader(numbers, collate_fn=collate), replica, batches="same")
    resumed.load_state_dict(state)
    with pytest.raises(BatchError, match="does not give again what it gave"):
        next(iter(resumed))


def _stream_placer():
    return stream_placement


def names(loader):
    return [shard["name"] for shard in loader]


# --- bad input: every rank stops, with one message --------------------------------------------------


EXPECTED = {
    "other values": ["ranks (0, 1, 2)", "input_ids is ['int64[1, 8] #", 'batches="own"'],
    "another shape": ["'int64[1, 8]", "'int64[1, 9]"],
    "another dtype": ["input_ids is ['int64[1, 8]", "'int32[1, 8]"],
    "another entry": ["extra is ['absent', 'absent', 'int64[1, 8]"],
    "an epoch that ends early": ["epoch is ['goes on', 'over', 'goes on']"],
    "too short, same": ["a sequence of 2 tokens is shorter than the 3 ranks"],
    "too short, own": ["a sequence of 2 tokens is shorter than the 3 ranks"],
    "a 4-D mask on rank 2": ["attention_mask of shape (1, 1, 8, 8)"],
    "some share a first batch": ["some ranks of a replica hold the same first batch"],
    "one rank asks for another mode": ["['same', 'same', 'own']"],
}


@pytest.fixture(scope="module")
def errors_by_rank():
    return run_ranks(_collect_errors, 3)


@pytest.mark.parametrize("case", EXPECTED)
def test_every_rank_stops_on_a_bad_batch(case, errors_by_rank):
    assert set(errors_by_rank[0]) == {*EXPECTED, "a crash on rank 1"}
    kinds, texts = zip(*(by_case[case] for by_case in errors_by_rank), strict=True)
    assert set(kinds) <= {"BatchError", "SamplingError"}
    for part in EXPECTED[case]:
        assert all(part in text for text in texts)


def test_every_rank_stops_on_a_crash_of_one(errors_by_rank):
    kinds, texts = zip(*(by_case["a crash on rank 1"] for by_case in errors_by_rank), strict=True)
    assert kinds == ("PeerError", "KeyError", "PeerError")
    assert texts[0] == texts[2] == "the next batch could not be read on rank 1: KeyError: 'no such sample'"


def _collect_errors(rank):
    replica = make_replica(Plan.of_replicas([UNEVEN]))
    good = {"input_ids": torch.arange(8)[None]}
    masked = {**good, "attention_mask": torch.ones(1, 1, 8, 8)}
    short = {"input_ids": torch.arange(2)[None]}

    def crash():
        yield good
        if rank == 1:
            raise KeyError("no such sample")
        yield good

    def wide(ids):
        return {"input_ids": ids[None]}

    cases = {
        "other values": ([good, wide(torch.arange(8) + (rank == 2))], "same"),
        "another shape": ([wide(torch.arange(8 + (rank == 0)))], "same"),
        "another dtype": ([wide(torch.arange(8, dtype=torch.int32 if rank else torch.int64))], "same"),
        "another entry": ([{**good, "extra": good["input_ids"]} if rank == 2 else good], "same"),
        "an epoch that ends early": ([good] * (1 if rank == 1 else 2), "same"),
        "too short, same": ([good, short], "same"),
        "too short, own": ([short if rank == 1 else good], "own"),
        "a 4-D mask on rank 2": ([masked if rank == 2 else good], "own"),
        "a crash on rank 1": (crash(), "same"),
        "some share a first batch": ([wide(torch.arange(8) + (rank == 2))], None),
        "one rank asks for another mode": ([good], "own" if rank == 2 else "same"),
    }
    said = {}
    for case, (batches, mode) in cases.items():
        with pytest.raises((BatchError, PeerError, KeyError)) as caught:
            list(ShardedLoader(batches, replica, batches=mode))
        said[case] = (type(caught.value).__name__, str(caught.value))
    return said


# --- replicas that take different batches -----------------------------------------------------------

SPLIT = BatchSplit(micro_batch_sizes=(2, 1), micro_batches=(1, 3))
TWO_AND_ONE = [PAIR, make_schedule([((2,), (1,))], "contiguous")]


DEALT_WRONG = {
    "a replica goes on": ["for fetch 3 of the epoch, replica 0 has 0, replica 1 has 2"],
    "without split": ["for fetch 2 of the epoch, replica 0 has 1, replica 1 has 0"],
    "own without split": ["replicas of [2, 1] ranks would take different numbers of steps"],
    "shuffled": ["do not draw the same samples: checksums of step 0 by rank are"],
    "sharded": ["loaders are sharded (rank 0: 0 of 3; rank 1: 1 of 3; rank 2: 2 of 3)"],
    "asked": ['batches="own" cannot be used where the replicas take different batches'],
    "a bad batch of one replica": ["rank 2: a batch needs input_ids"],
}


@pytest.fixture(scope="module")
def dealing_errors():
    return run_ranks(_collect_dealing_errors, 3)


@pytest.mark.parametrize("case", DEALT_WRONG)
def test_unequal_replicas_stop_together(case, dealing_errors):
    assert set(dealing_errors[0]) == set(DEALT_WRONG)
    (kind, text), second, third = (by_case[case] for by_case in dealing_errors)
    assert (kind, text) == second == third
    assert kind in {"BatchError", "SamplingError"}
    for part in DEALT_WRONG[case]:
        assert part in text


def test_unequal_replicas_get_every_sample_once():
    run_ranks(_check_dealing, 3)


def rows(numbers):
    ids = torch.stack([torch.arange(6) + 10 * number for number in numbers])
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 3, -100), "cu_seq_lens_q": torch.tensor([0, 6])}


def _check_dealing(rank):
    replica = make_replica(Plan.of_replicas(TWO_AND_ONE, SPLIT))
    loader = ShardedLoader(DataLoader(Numbers(13), 4, collate_fn=rows), replica)
    assert loader.batches == "dealt"
    # Steps of five samples: 0 1 | 2 | 3 | 4, 5 6 | 7 | 8 | 9, and of the last three, shared 1.2 : 1.8, 10 | 11 | 12.
    taken = [[[0, 1]], [[5, 6]], [[10]]] if rank < 2 else [[[2], [3], [4]], [[7], [8], [9]], [[11], [12]]]
    expected = [step + [None] * (3 - len(step)) for step in taken]
    assert len(loader) == 9
    for _ in range(2):  # epochs
        shards = list(loader)
        assert_dealt(shards, expected, replica)
        items = [shard_info(shard["position_ids"]).num_items for shard in shards]
        assert items == [23] * 3 + [25] * 3 + [15] * 3
    assert_dealt(ShardedLoader(DataLoader(Stream(), 4, collate_fn=rows), replica), dealt_stream(rank), replica)
    assert list(loader.whole.batch_sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    for stop in (0, 1, 3, 5, 9):
        steps = iter(loader)
        for _ in range(stop):
            next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [wanted for step in expected for wanted in step][stop:]
        for resumed in (loader.skipping(stop, skip_first_batches), ShardedLoader(loader.whole, replica)):
            if resumed.dataloader is not loader.dataloader:
                resumed.load_state_dict(state)
            assert_dealt(resumed, [rest], replica)
            assert_dealt(resumed, expected, replica)
    # This replica's own micro-batches, from any iterable; a replica may end in the middle of a step.
    mine = [rows([n]) for n in (range(2) if rank < 2 else range(5))]
    listed = ShardedLoader(mine, replica)
    assert len(listed) == 6
    ends_early = [[[0], None, None], [[1], None, None]]
    assert_dealt(listed, ends_early if rank < 2 else [[[0], [1], [2]], [[3], [4], None]], replica)


def _collect_dealing_errors(rank):
    replica = make_replica(Plan.of_replicas(TWO_AND_ONE, SPLIT))
    mine = [rows([n]) for n in (range(2) if rank < 2 else range(5))]
    seeded = torch.Generator().manual_seed(7 + rank)
    bad = [rows([0]), {"labels": torch.ones(1, 6)}]
    cases = {
        "a replica goes on": (mine if rank < 2 else [rows([0])] * 11, replica, None),
        "without split": ([rows([0])] * (3 if rank < 2 else 2), make_replica(Plan.of_replicas(TWO_AND_ONE)), "same"),
        "own without split": ([rows([0])], make_replica(Plan.of_replicas(TWO_AND_ONE)), "own"),
        "shuffled": (DataLoader(Numbers(13), 4, shuffle=True, generator=seeded, collate_fn=rows), replica, None),
        "sharded": (map_style(6, 3, rank), replica, None),
        "asked": (DataLoader(Numbers(13), 4, collate_fn=rows), replica, "own"),
        "a bad batch of one replica": (bad if rank == 2 else mine, replica, None),
    }
    said = {}
    for case, (batches, place, mode) in cases.items():
        with pytest.raises(BatchError) as caught:
            list(ShardedLoader(batches, place, batches=mode))
        said[case] = (type(caught.value).__name__, str(caught.value).removeprefix("on rank 2: "))
    said["a bad batch of one replica"] = ("BatchError", "on rank 2: " + said["a bad batch of one replica"][1])
    return said


def dealt_stream(rank):
    return [[[0, 1], None, None], [[5], None, None]] if rank < 2 else [[[2], [3], [4]], [[6], None, None]]


def assert_dealt(shards, steps, replica):
    """Each shard is the part of the samples listed for it; None stands for a batch without weight."""
    wanted = [samples for step in steps for samples in step]
    shards = list(shards)
    assert len(shards) == len(wanted)
    for shard, samples in zip(shards, wanted, strict=True):
        assert shard_info(shard["position_ids"]).is_filler == (samples is None)
        if samples is None:
            assert shard["input_ids"].shape == (1, 1) and shard["shift_labels"].eq(-100).all()
            assert "cu_seq_lens_q" not in shard
        else:
            mine = stream_placement(replica.schedule, 6).positions(replica.rank)
            assert torch.equal(shard["input_ids"], rows(samples)["input_ids"][:, mine])
