"""The table of a forward's arguments decides, by name and value, for shards, sharded calls and pipelines."""

import pytest
import torch

from ds_hetero.engine.arguments import ARGUMENTS, refusals
from ds_hetero.frameworks.transformers.self_check.piece import marks_documents, piece_of
from ds_hetero.values.schedule import Schedule
from tests.integration.tiny import UNEVEN_2


def test_every_row_has_a_reason_and_no_row_stands_for_all_names() -> None:
    assert all(row.why for row in ARGUMENTS.values())
    assert "*" not in ARGUMENTS


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("anything", None, {}),
        ("anything", False, {}),
        ("logits_to_keep", 0, {}),
        ("logits_to_keep", 4, {"in_call": True}),
        ("ignore_index", -100, {}),
        ("use_cache", True, {}),
        ("pixel_values_videos", torch.ones(2), {"has_towers": True}),
        ("num_items_in_batch", 4, {"in_pipelines": True}),
    ],
)
def test_it_passes(name: str, value: object, where: dict[str, bool]) -> None:
    assert refusals({name: value}, **where) == []


@pytest.mark.parametrize(
    ("name", "value", "where", "reason"),
    [
        ("anything", 1, {}, "1: it was never tried"),
        ("anything", 1, {"has_towers": True}, "1: it was never tried"),
        ("logits_to_keep", True, {}, "True: a rank would keep"),
        ("is_causal", False, {}, "False: the model's configuration says it"),
        ("decoder_input_ids", torch.ones(2, 3), {}, "Tensor of shape [2, 3]: cross attention"),
        ("pixel_values_videos", torch.ones(2), {}, "Tensor of shape [2]: the model puts no images"),
        ("inputs_embeds", torch.ones(2), {"in_pipelines": True}, "Tensor of shape [2]: pipelines hand stages"),
    ],
)
def test_it_is_refused(name: str, value: object, where: dict[str, bool], reason: str) -> None:
    (line,) = refusals({name: value}, **where)
    assert line.startswith(f'"{name}": {reason}')


@pytest.mark.parametrize("marked_by", ["cu_seq_lens_q", "position_ids"])
def test_a_piece_knows_by_which_entry_its_documents_are_marked(marked_by: str) -> None:
    ids = torch.randint(0, 9, (1, 500), generator=torch.Generator().manual_seed(0))
    marks = {
        "cu_seq_lens_q": torch.tensor([0, 120, 500]),
        "position_ids": torch.cat([torch.arange(120), torch.arange(380)])[None],
    }
    batch, schedule = {"input_ids": ids, "labels": ids, marked_by: marks[marked_by]}, Schedule.from_dict(UNEVEN_2)
    assert marks_documents(piece_of(batch, schedule)) == marked_by
    inside = piece_of(batch, schedule, inside_document=True)
    assert not marks_documents(inside) and "cu_seq_lens_q" not in inside
    assert torch.equal(inside["input_ids"], ids[:, 120 : 120 + inside["input_ids"].shape[1]])


def test_the_inside_of_documents_is_that_of_the_longest_of_each_row() -> None:
    ids = torch.arange(90).view(3, 30)
    rows = [(18, 12), (1, 20, 9), (2,) * 15]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    inside = piece_of(batch, Schedule.from_dict(UNEVEN_2), inside_document=True)
    assert inside["input_ids"].tolist() == [ids[1, 1:19].tolist(), ids[0, :18].tolist()]
    assert inside["position_ids"].tolist() == [list(range(18))] * 2


def test_positions_that_restart_behind_a_mask_mark_no_documents() -> None:
    ids, mask = torch.arange(30)[None], torch.ones(1, 30, dtype=torch.long)
    mask[:, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert not marks_documents({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
