"""All ranks derive one layout from their shards, or all refuse with one message."""

import pytest
import torch

from ds_hetero.errors import BatchError
from ds_hetero.runtime.attention.batch_layout import agree_on_batch
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.model_switches import NO_GRADIENT
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

SCHEDULE = Schedule(
    num_heads=4,
    num_kv_heads=2,
    groups=(Group(ranks=(0, 2), tokens=(3, 1), heads=(3, 1)), Group(ranks=(1,), tokens=(2,), heads=(4,))),
)
LENGTH = 25


def test_ranks_agree_on_the_rows_that_their_masks_and_positions_describe():
    for found in run_ranks(_layouts, 3):
        assert found == {
            "plain": [(0, 2, ((0, 25),))],
            "one row for all": [(0, 2, ((0, 25),))],
            "restarts": [(0, 1, ((0, 7), (7, 25))), (1, 2, ((0, 25),))],
            "shifted positions": [(0, 2, ((0, 25),))],
            "mask of ones": [(0, 2, ((0, 25),))],
            "padding": [(0, 1, ((4, 25),)), (1, 2, ((0, 11),))],
            "all padding": [(0, 1, ()), (1, 2, ((0, 25),))],
            "cu_seqlens": [(0, 1, ((0, 9), (9, 10), (10, 25)))],
            "nothing": [(0, 2, ((0, 25),))],
        }


def _layouts(rank):
    replica = make_replica(Plan.of_replicas([SCHEDULE]))
    mine = stream_placement(SCHEDULE, LENGTH).positions(rank)
    plain = torch.arange(LENGTH).expand(2, -1)
    restarts = torch.stack([torch.cat([torch.arange(7), torch.arange(18)]), torch.arange(25)])
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    padded, empty = ones.clone(), ones.clone()
    padded[0, :4] = padded[1, 11:] = empty[0] = 0
    given = {
        "plain": {"position_ids": plain},
        "one row for all": {"position_ids": plain[:1]},
        "restarts": {"position_ids": restarts},
        "shifted positions": {"position_ids": plain + 3},
        "mask of ones": {"position_ids": restarts, "attention_mask": ones},
        "padding": {"position_ids": plain, "attention_mask": padded},
        "all padding": {"attention_mask": empty.bool()},
        "nothing": {},
    }
    found = {}
    for name, tensors in given.items():
        shards = {key: tensor[:, mine] for key, tensor in tensors.items()}
        layout = agree_on_batch(replica, LocalBatch(batch_size=2, tokens=len(mine), dtype=torch.float32, **shards))
        assert layout.placement.length == LENGTH and layout.batch_size == 2
        found[name] = [tuple(rows) for rows in layout.placement.rows]
    boundaries = torch.tensor([0, 9, 10, 25], dtype=torch.int32)
    shard = LocalBatch(batch_size=1, tokens=len(mine), dtype=torch.float32, cu_seqlens=boundaries)
    layout = agree_on_batch(replica, shard)
    found["cu_seqlens"] = [tuple(rows) for rows in layout.placement.rows]
    again, other_dtype = (
        agree_on_batch(replica, LocalBatch(batch_size=2, tokens=len(mine), dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert again is other_dtype  # so that its tables are made once
    return found


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("batch_size", "batch_size by rank is [2, 3, 2]"),
        ("dtype", "dtype by rank is ['float32', 'bfloat16', 'float32']"),
        ("autocast", "autocast, and its dtype, is not the same on all ranks"),
        ("autocast", "by rank ['off', 'torch.bfloat16', 'off']"),
        ("trained", "requires_grad of the model's parameters is not the same on all ranks"),
        ("no gradient", "by rank ['checksum 00000007', 'no gradient', 'checksum 00000007']"),
        ("tokens", "shards of a batch of 27 tokens"),
        ("some positions", "position_ids must be given on all ranks or on none, but by rank it is [True, False, True]"),
        ("hole", "zeros between real tokens"),
        ("cu_seqlens", "cu_seqlens by rank"),
        ("cu_seqlens end", "cu_seqlens must rise from 0 to the 25 tokens"),
        ("too short", "shorter than the 3 ranks"),
    ],
)
def test_a_faulty_batch_is_refused_on_every_rank(fault, words):
    messages = run_ranks(_fault, 3, fault)
    assert len(set(messages)) == 1
    assert words in messages[0]


def _fault(rank, fault):
    replica = make_replica(Plan.of_replicas([SCHEDULE]))
    mine = stream_placement(SCHEDULE, LENGTH).positions(rank)
    odd = rank == 1
    shape, dtype, kwargs = (2, len(mine)), torch.float32, {}
    if fault == "batch_size":
        shape = (2 + odd, len(mine))
    elif fault == "dtype":
        dtype = torch.bfloat16 if odd else dtype
    elif fault == "autocast":
        kwargs = {"autocast": torch.bfloat16 if odd else None}
    elif fault == "trained":
        kwargs = {"trained": 7 + odd}
    elif fault == "no gradient":
        kwargs = {"trained": NO_GRADIENT if odd else 7}
    elif fault == "tokens":
        shape = (2, len(mine) + 2 * odd)
    elif fault == "some positions":
        kwargs = {} if odd else {"position_ids": torch.arange(LENGTH)[None, mine]}
    elif fault == "hole":
        mask = torch.ones(2, LENGTH)
        mask[1, 5] = 0
        kwargs = {"attention_mask": mask[:, mine]}
    elif fault == "cu_seqlens":
        shape, kwargs = (1, len(mine)), {"cu_seqlens": torch.tensor([0, 5 + odd, 25])}
    elif fault == "cu_seqlens end":
        shape, kwargs = (1, len(mine)), {"cu_seqlens": torch.tensor([0, 5, 24])}
    elif fault == "too short":
        shape = (2, 0 if odd else 1)
    try:
        agree_on_batch(replica, LocalBatch(batch_size=shape[0], tokens=shape[1], dtype=dtype, **kwargs))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_shards_cut_by_a_former_schedule_are_refused():
    run_ranks(_before_a_change, 2)


def _before_a_change(rank):
    def one_ring(*tokens, layout="contiguous"):
        groups = tuple(Group(ranks=(r,), tokens=(t,), heads=(2,)) for r, t in enumerate(tokens))
        return Schedule(num_heads=2, num_kv_heads=2, groups=groups, layout=layout)

    old, zigzag, new = one_ring(1, 3), one_ring(1, 1, layout="zigzag"), one_ring(1, 1)
    replica = make_replica(Plan.of_replicas([new]))

    def agree(schedule, marked, earlier=(old, zigzag), **kwargs):
        placement = stream_placement(schedule, 40)
        positions = kwargs.pop("positions", torch.arange(40))[None, placement.positions(rank)]
        shard = LocalBatch(
            batch_size=1,
            tokens=positions.shape[1],
            dtype=torch.float32,
            position_ids=positions,
            placement=placement if marked else None,
        )
        return agree_on_batch(replica, shard, earlier).placement.schedule

    packed = torch.cat([torch.arange(11), torch.arange(29)])
    for schedule in (old, zigzag, new):
        assert agree(schedule, marked=True) is schedule
        assert agree(schedule, marked=True, positions=packed) is schedule
        assert agree(schedule, marked=False) is schedule  # by sizes, and else by positions
        assert agree(schedule, marked=rank == 1, positions=packed) is schedule  # one rank has lost the mark
    assert agree(old, marked=False, positions=packed) is old
    with pytest.raises(BatchError, match="do not tell whether they were cut before or after"):
        agree(zigzag, marked=False, positions=packed)
    with pytest.raises(BatchError, match="the replica has had"):
        agree(old, marked=True, earlier=())
    with pytest.raises(BatchError, match="the replica has had"):  # the ranks drew theirs at different times
        agree(new if rank else zigzag, marked=True, earlier=(zigzag,))
