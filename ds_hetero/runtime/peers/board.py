"""Messages of the ranks of a job in its key-value store, where no collective can help any more.

    asked            how often ranks have asked where the others are; who sees it grow writes its status
    status/RANK      where that rank is
    num_ends, end/N  the last words of the ranks that have ended, in their order
    diagnosis        why the job cannot go on; the first one counts

A store that cannot be reached raises `torch.distributed.DistError` or a RuntimeError, from any method.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_hetero.common.reading import JsonDict
from ds_hetero.runtime.peers.calls import History

ENDED, FAILED, STOPPED = "ended", "failed", "stopped"

T = TypeVar("T")

_num_boards = 0


class Status(NamedTuple):
    """Where a rank is.

    Args:
        counts: of the collectives that it has begun, by the name of their process group.
    """

    asked: int  # the question that this answers
    place: str  # file, line and function of the script, and of the collective that it waits in, if it does
    waits: bool  # whether it waits for other ranks there
    in_script: bool  # whether in a collective that the script itself calls
    unchanged_s: float  # for how long it has been there
    history: History
    collective: Collective | None = None  # of torch's that it waits in
    counts: Mapping[str, int] = MappingProxyType({})


class Collective(NamedTuple):
    """A collective of torch's in which a rank waits."""

    name: str
    group: str  # name of its process group
    ranks: Sequence[int]  # of the group, in the whole job


class End(NamedTuple):
    """The last words of a rank."""

    rank: int
    how: str  # `ENDED` with its script, `FAILED` with an error of its own, or `STOPPED` because of other ranks
    text: str


class Board:
    """This rank's access to what the ranks write.

    It has a connection of its own, so that it works while another thread waits in the store.

    Args:
        attempt: a name that these processes share, and no others: torchrun's store outlives them, and processes that it
            starts again would read the last words of those before.

    Attributes:
        has_lost_rank_0: whether rank 0 is seen to be gone. If it has kept the store, nothing is asked any more: torch
            would print the stack of its C++ code before the error says who is gone.
    """

    def __init__(self, attempt: str = "") -> None:
        global _num_boards
        _num_boards += 1  # the same on every rank, also where process groups are made one after another
        store = _get_default_store()
        clone = getattr(store, "clone", None)
        self.has_lost_rank_0: Callable[[], bool] = lambda: False
        self._is_kept_by_rank_0 = _is_kept_by_rank_0(store)
        self._store: Store = PrefixStore(f"ds_hetero/{_num_boards}/{attempt}", store if clone is None else clone())
        self._num_ends_read = 0
        self._ends: list[End] = []
        self._asked_at_s: float | None = None

    @property
    def silent_s(self) -> float:
        """For how long the store has left the request under way without an answer; 0 where there is none."""
        asked_at_s = self._asked_at_s
        return 0.0 if asked_at_s is None else time.monotonic() - asked_at_s

    def asked(self) -> int:
        """How often ranks have asked."""
        return int(self._request(self._store.add, "asked", 0))

    def ask(self) -> int:
        """Ask all ranks where they are; return the number of the question."""
        return int(self._request(self._store.add, "asked", 1))

    def may_ask(self, asked: int) -> bool:
        """Whether this rank is the one that asks after question ``asked``; one of all that want to."""
        return int(self._request(self._store.add, f"asks_after/{asked}", 1)) == 1

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Tell the others which process this rank is."""
        self._request(self._store.set, f"process/{rank}", json.dumps(process))

    def process(self, rank: int) -> JsonDict | None:
        """The process that a rank has introduced itself with."""
        content: JsonDict | None = self._read(f"process/{rank}")
        return content

    def write_status(self, rank: int, status: Status) -> None:
        """Write where this rank is."""
        self._request(self._store.set, f"status/{rank}", json.dumps(status._replace(counts=dict(status.counts))))

    def status(self, rank: int) -> Status | None:
        """The latest status of a rank."""
        content = self._read(f"status/{rank}")
        if content is None:
            return None
        asked, place, waits, in_script, unchanged_s, history, collective, counts = content
        own = None if collective is None else Collective(*collective)
        return Status(asked, place, waits, in_script, unchanged_s, History(*history), own, counts)

    def write_end(self, end: End) -> None:
        """Write this rank's last words."""
        number = self._request(self._store.add, "num_ends", 1)
        self._request(self._store.set, f"end/{number}", json.dumps(end))

    def ends(self) -> list[End]:
        """The last words of all ranks that have ended."""
        while (content := self._read(f"end/{self._num_ends_read + 1}")) is not None:
            self._num_ends_read += 1
            self._ends.append(End(*content))
        return self._ends

    def settle(self, diagnosis: list[str]) -> list[str]:
        """Write a diagnosis unless there is one; return the one that counts."""
        content: list[str] = json.loads(self._request(self._store.compare_set, "diagnosis", "", json.dumps(diagnosis)))
        return content

    def diagnosis(self) -> list[str] | None:
        """The diagnosis that counts, if there is one."""
        content: list[str] | None = self._read("diagnosis")
        return content

    def _read(self, key: str) -> Any:
        has_key = self._request(self._store.check, [key])
        return json.loads(self._request(self._store.get, key)) if has_key else None

    def _request(self, ask: Callable[..., T], *args: Any) -> T:
        if self._is_kept_by_rank_0 and self.has_lost_rank_0():
            raise dist.DistNetworkError("rank 0, which has kept the store, is gone")
        self._asked_at_s = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._asked_at_s = None


def _is_kept_by_rank_0(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_group() -> dist.ProcessGroup:
    """The process group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group
