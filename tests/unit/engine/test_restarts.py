"""Processes that are started again meet under a name of their own, though their store outlives them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from ds_hetero.engine.start_name import is_kept_by_launcher, name_of_start
from ds_hetero.errors import PeerError


def _start(store: Store, ranks_in_their_order: list[int]) -> list[str]:
    """The names that the ranks of one start agree on; each rank comes a moment after the one before."""
    names: dict[int, str] = {}

    def come(rank: int) -> None:
        names[rank] = name_of_start(store, rank, len(ranks_in_their_order))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks_in_their_order]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    for thread in threads:
        thread.join()
    return [names[rank] for rank in sorted(names)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["rank 0 first", "rank 0 last"])
def test_ranks_that_are_started_again_share_a_new_name(order: list[int]) -> None:
    kept = HashStore()
    before, after = _start(kept, order), _start(kept, order)
    assert len(set(before)) == len(set(after)) == 1 and before != after


def test_a_start_that_was_cut_short_does_not_confuse_the_next() -> None:
    kept = HashStore()
    patience = kept.timeout
    kept.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerError):
        name_of_start(kept, 1, 2)  # nobody answers; its word stays in the store
    kept.set_timeout(patience)
    first, second = _start(kept, [1, 0])
    assert first == second


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0")])
def test_a_rank_that_does_not_come_is_named(rank: int, missing: str) -> None:
    kept = HashStore()
    kept.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerError, match=f"^{missing} did not make the process group within 0 s"):
        name_of_start(kept, rank, 3)


@pytest.mark.parametrize(
    ("variables", "is_kept"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1235"}, False),
        ({}, False),
    ],
)
def test_only_the_store_of_torchrun_is_kept(variables: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "1234", **variables}.items():
        monkeypatch.setenv(name, value)
    assert is_kept_by_launcher("host", 1234) is is_kept
