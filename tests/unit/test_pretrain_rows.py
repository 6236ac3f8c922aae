"""Rows of examples/pretrain hold every token of the documents once, and say where each document begins."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "examples" / "pretrain"))

import definitions
from rows import IGNORED, EpochOrder, packed_rows

BEGIN, END = definitions.BEGIN, definitions.END
LENGTHS = (5, 40, 3, 17, 64, 9)
ROW = 16


def _documents() -> list[torch.Tensor]:
    """Each with tokens of its own: 100 to 104, 200 to 239, ..."""
    return [torch.arange(length) + 100 * number for number, length in enumerate(LENGTHS, 1)]


def test_rows_hold_the_tokens_of_the_documents_one_after_another_in_an_order_of_the_seed():
    rows = packed_rows(_documents(), ROW, seed=0)
    packed = torch.cat([row["input_ids"] for row in rows])
    assert len(packed) == sum(LENGTHS) // ROW * ROW
    order = list(dict.fromkeys((packed // 100).tolist()))
    in_that_order = torch.cat([_documents()[number - 1] for number in order])
    assert torch.equal(packed, in_that_order[: len(packed)])
    again, other = packed_rows(_documents(), ROW, seed=0), packed_rows(_documents(), ROW, seed=1)
    assert torch.equal(again[0]["input_ids"], rows[0]["input_ids"])
    assert not torch.equal(other[0]["input_ids"], rows[0]["input_ids"])


def test_positions_restart_where_a_document_or_a_row_begins_and_its_first_token_is_not_predicted():
    for row in packed_rows(_documents(), ROW, seed=0):
        ids, positions = row["input_ids"], row["position_ids"]
        document_changes = (ids[1:] // 100 != ids[:-1] // 100).tolist()
        assert (positions == 0).tolist() == [True, *document_changes]
        inside = positions[1:] > 0
        assert torch.equal(positions[1:][inside], positions[:-1][inside] + 1)
        assert torch.equal(row["labels"] == IGNORED, positions == 0)
        assert torch.equal(row["labels"][positions > 0], ids[positions > 0])


def test_documents_that_fill_no_row_are_refused():
    with pytest.raises(ValueError, match="3 documents have 48 tokens, fewer than a row of 49"):
        packed_rows(_documents()[:3], 49, seed=0)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    order = EpochOrder(50, seed=3)
    first = list(order)
    assert list(order) == first and sorted(first) == list(range(50))
    order.set_epoch(1)
    assert sorted(order) == sorted(first) and list(order) != first


def test_a_definition_begins_with_its_decorators_and_files_for_python_2_have_none():
    source = "import os\n\n@cached\ndef one():\n    return 1\n\nX = 2\nclass Two:\n    pass\n"
    assert definitions._definitions(source) == ["@cached\ndef one():\n    return 1\n", "class Two:\n    pass\n"]
    assert definitions._definitions("print 'two'") == []


def test_a_document_decodes_to_its_text_between_a_begin_and_an_end():
    text = "def greet(name):\n\treturn f'hällo {name}'\n"
    bpe = definitions.corpus.byte_pairs([text], 300, definitions.SPECIAL_TOKENS)
    (document,) = definitions._encode(bpe, [text])
    assert document[0] == BEGIN and document[-1] == END
    assert bpe.decode(document.tolist()) == text
