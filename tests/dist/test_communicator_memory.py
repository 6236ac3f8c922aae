"""The self-test's line on device memory of a communicator, of real groups over figures that stand for a card's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hetero.common.units import GIB
from ds_hetero.selftest import communicator_memory
from ds_hetero.selftest.session import Session
from tests.support import run_ranks

MIB = 2**20


def _line(rank: int, cards: list[str], used_mib: list[list[int]]) -> str:
    """The line of this rank where its card shows these figures, one after the other."""
    session = Session(
        rank=rank,
        size=len(cards),
        device=torch.device("cpu"),
        watch=None,  # type: ignore[arg-type]  # of calls that hang
        nodes=(tuple(range(len(cards))),),
        quick=True,
        trained_dtype=torch.bfloat16,
    )
    figures = iter(used_mib[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator_memory, "_used_by_others_than_torch", lambda device: next(figures) * MIB)
        patch.setattr(communicator_memory, "_gpu_uuid", lambda device: cards[rank])
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
        taken = communicator_memory._measure(session)
        by_rank: list[Any] = [None] * len(cards)
        torch.distributed.all_gather_object(by_rank, taken)
        assert not list(figures)
        return communicator_memory._text(by_rank, session)


def test_the_rank_with_the_largest_communicator_is_named_and_what_is_counted_stands_beside_it() -> None:
    lines = run_ranks(_line, 2, ["a", "b"], [[500, 512, 536, 560], [500, 512, 560, 620]])
    said = "120 MiB on rank 1: 12 when made and first used, 48 by large sums, 60 by messages of all pairs"
    assert lines == [f"{said}; the cost model counts 60"] * 2


def test_ranks_that_share_a_card_have_their_part_of_what_it_shows() -> None:
    lines = run_ranks(_line, 2, ["a", "a"], [[500, 520, 540, 560]] * 2)
    said = "30 MiB on rank 0: 10 when made and first used, 10 by large sums, 10 by messages of all pairs"
    assert lines == [f"{said}; the cost model counts 60"] * 2


def test_what_torch_has_reserved_is_no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(communicator_memory, "dist", SimpleNamespace(barrier=lambda device_ids: None))
    assert communicator_memory._used_by_others_than_torch(torch.device("cuda", 0)) == 2 * GIB
