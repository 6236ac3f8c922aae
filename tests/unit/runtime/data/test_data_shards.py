"""What becomes of each entry of a batch, against indexing the whole batch by the positions of a rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.shards import read_batch
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Group, Schedule


def make_schedule(groups, layout):
    ranks = iter(range(sum(map(len, groups))))
    return Schedule(
        num_heads=6,
        num_kv_heads=2,
        layout=layout,
        groups=tuple(
            Group(ranks=tuple(next(ranks) for _ in weights), tokens=weights, heads=(6,) + (0,) * (len(weights) - 1))
            for weights in groups
        ),
    )


@given(
    groups=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).filter(
        lambda groups: any(map(any, groups))
    ),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    length=st.integers(9, 60),
    batch_size=st.integers(1, 3),
)
def test_every_rank_gets_its_positions_of_every_sequence(groups, layout, length, batch_size):
    schedule = make_schedule(groups, layout)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1000, (batch_size, length), generator=generator)
    batch = {
        "input_ids": ids,
        "labels": ids + 1,
        "attention_mask": torch.ones(batch_size, length, dtype=torch.bool),
        "token_type_ids": ids.to(torch.int16),
        "embeds": torch.randn(batch_size, length, 3, generator=generator).bfloat16(),
        "cu_seq_lens_q": torch.tensor([0, 5, length], dtype=torch.int32),
        "max_length_q": length - 5,
        "names": ["a", "b"],
    }
    shift_labels = torch.full_like(ids, -100)
    shift_labels[:, :-1] = batch["labels"][:, 1:]
    whole = {
        **{name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids", "embeds")},
        "shift_labels": shift_labels,
        "position_ids": torch.arange(length).expand(batch_size, -1),
    }
    read = read_batch(batch)
    placement = stream_placement(schedule, length)
    for rank in schedule.ranks:
        mine = placement.positions(rank)
        shard = read.shard(placement.intervals(rank))
        assert shard.keys() == batch.keys() - {"labels"} | {"shift_labels", "position_ids"}
        for name, tensor in whole.items():
            assert torch.equal(shard[name], tensor[:, mine]), name
            assert shard[name].dtype == tensor.dtype
        for name in ("cu_seq_lens_q", "max_length_q", "names"):
            assert shard[name] is batch[name]


def test_a_shard_does_not_keep_the_whole_batch_alive():
    ids = torch.zeros(1, 100, dtype=torch.long)
    shard = read_batch({"input_ids": ids}).shard([(0, 10)])
    assert shard["input_ids"].untyped_storage().nbytes() == 80
    assert shard["position_ids"].untyped_storage().nbytes() == 80


IDS = torch.arange(12).view(2, 6)
INTERVALS = [(1, 2), (4, 6)]


def shard_of(**entries):
    return read_batch({"input_ids": IDS, **entries}).shard(INTERVALS)


@pytest.mark.parametrize(
    "positions", [[7, 8, 0, 1, 2, 3], [[7, 8, 0, 1, 2, 3]], [[7, 8, 0, 1, 2, 3], [7, 8, 0, 1, 2, 3]]]
)
def test_positions_of_any_accepted_shape_reach_every_row(positions):
    assert shard_of(position_ids=torch.tensor(positions))["position_ids"].tolist() == [[8, 2, 3]] * 2


def test_positions_that_are_none_are_made():
    assert shard_of(position_ids=None)["position_ids"].tolist() == [[1, 4, 5]] * 2


def test_labels_of_packed_documents_are_moved_as_the_collator_gave_them():
    labels = torch.tensor([[-100, 1, 2, -100, 4, 5]] * 2)  # documents of three tokens
    assert shard_of(labels=labels)["shift_labels"].tolist() == [[2, 5, -100]] * 2


def test_no_labels_are_made_up():
    assert shard_of().keys() == {"input_ids", "position_ids"}


def test_shift_labels_are_not_moved_again():
    shard = shard_of(labels=IDS, shift_labels=IDS * 2)
    assert torch.equal(shard["shift_labels"], IDS[:, [1, 4, 5]] * 2)
    assert "labels" not in shard


def test_labels_can_be_kept_where_they_were():
    shard = read_batch({"input_ids": IDS, "labels": IDS}, keep_labels=True).shard(INTERVALS)
    assert torch.equal(shard["labels"], IDS[:, [1, 4, 5]])
    assert shard["shift_labels"].tolist() == [[2, 5, -100], [8, 11, -100]]


def test_embeddings_alone_are_tokens():
    embeds = torch.randn(2, 6, 4)
    shard = read_batch({"inputs_embeds": embeds}).shard(INTERVALS)
    assert torch.equal(shard["inputs_embeds"], embeds[:, [1, 4, 5]])
    assert shard["position_ids"].tolist() == [[1, 4, 5]] * 2


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((IDS, IDS), "must be a mapping"),
        ({"labels": IDS}, r"needs input_ids \[B, L\] or inputs_embeds"),
        ({"input_ids": IDS[0]}, r"input_ids.*\(6,\)"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 5, 4)}, r"inputs_embeds.*\(2, 5, 4\)"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)},
            r"attention_mask of shape \(2, 1, 6, 6\).*restart",
        ),
        ({"input_ids": IDS, "position_ids": torch.zeros(3, 2, 6)}, r"position_ids of shape \(3, 2, 6\).*mrope"),
        ({"input_ids": IDS, "position_ids": torch.zeros(2, 5)}, r"position_ids of shape \(2, 5\)"),
        ({"input_ids": IDS, "labels": torch.zeros(2)}, r"labels of shape \(2,\).*B=2, L=6"),
        ({"input_ids": IDS, "shift_labels": torch.zeros(2, 5)}, r"shift_labels of shape \(2, 5\)"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_by_name(batch, says):
    with pytest.raises(BatchError, match=says):
        read_batch(batch)


def test_fingerprints_tell_values_shapes_and_types_apart():
    prints = [
        read_batch({"input_ids": ids}).fingerprints()["input_ids"] for ids in (IDS, IDS + 1, IDS.view(3, 4), IDS.int())
    ]
    assert len(set(prints)) == len(prints)
    assert prints[0].startswith("int64[2, 6] #")
    assert prints[0] == read_batch({"input_ids": IDS.clone()}).fingerprints()["input_ids"]
    without_images = read_batch({"input_ids": IDS, "pixel_values": torch.zeros(0, 3)})
    assert without_images.fingerprints()["pixel_values"].startswith("float32[0, 3] #")
