"""A board in the key-value store, by which ranks tell each other where they are when collectives no longer work.

    asked            number of questions where the ranks are; a rank that sees a new question writes its status
    status/RANK      status of that rank: where it is, and its calls
    num_ends, end/N  the last words of the N-th rank that has ended: how, and why
    diagnosis        the reason why the job cannot go on; the first diagnosis that is written counts
    process/RANK     host and id of that rank's process

Any process that reaches the store can write to it, since torch's store has no secret. The processes of an elastic job
share a token, so there ranks add an HMAC to their entries (`sign_with`), and ignore entries without a valid HMAC.

Every method raises `torch.distributed.DistError` or a RuntimeError if the store cannot be reached.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_hetero.common.reading import JsonDict
from ds_hetero.runtime.peers.calls import History
from ds_hetero.runtime.peers.posted_calls import Collective, PostedCollective

ENDED, FAILED, STOPPED = "ended", "failed", "stopped"  # values of `End.outcome`

T = TypeVar("T")

logger = logging.getLogger(__name__)

_num_boards = 0
_key: bytes | None = None  # of the HMACs


def sign_with(token: bytes) -> None:
    """Make later boards sign the entries of this rank, and ignore entries whose signature is wrong or missing."""
    global _key
    _key = hmac.digest(token, b"board", hashlib.sha256)


class Status(NamedTuple):
    """Where a rank is, as it answers a question of another rank.

    Attributes:
        question_number: of the question that the rank answers.
        place: for people: the function and the line of the script, such as "all_reduce at train.py:41".
        waits: the rank waits for other ranks there.
        in_script: the rank waits in a collective that the script itself has called.
        unchanged_s: seconds that the rank has been there.
        history: latest calls of the rank.
        collective: torch's collective in which the rank waits, if any.
        counts: number of collectives that the rank has begun, by the name of their process group.
        may_compute: the rank may wait for a kernel on its own device, and for no other rank; see `Place`.
        posted: latest collectives of the rank, by the name of their process group.
        gathers: modules for which the rank has gathered parameters on ZeRO-3, see `calls.own_gathers`.
    """

    question_number: int
    place: str
    waits: bool
    in_script: bool
    unchanged_s: float
    history: History
    collective: Collective | None = None
    counts: Mapping[str, int] = MappingProxyType({})
    may_compute: bool = False
    posted: Mapping[str, Sequence[PostedCollective]] = MappingProxyType({})
    gathers: History = History((), 0, False)


class End(NamedTuple):
    """The last words of a rank: how and why it has ended."""

    rank: int
    outcome: str  # `ENDED` with its script, `FAILED` with an error of its own, or `STOPPED` because of other ranks
    text: str  # of the error; "" if the rank ended with its script
    counts: dict[str, int] | None = None  # collectives that the rank has begun, by process group; None if not known


class Board:
    """This rank's access to the board.

    It has its own connection to the store, so that it works while another thread waits in the store.

    Args:
        attempt: a name that only the processes of this start share. torchrun's store outlives the processes, so after a
            restart the ranks would otherwise read the last words of the earlier ones.

    Attributes:
        has_lost_rank_0: returns whether rank 0 is known to be gone. If the store is in rank 0's process, no request is
            made after that: torch would print the stack of its C++ code before the error says which rank is gone.
    """

    def __init__(self, attempt: str = "") -> None:
        global _num_boards
        _num_boards += 1  # the same on every rank, even if a script makes several default groups, one after the other
        store = _get_default_store()
        clone = getattr(store, "clone", None)
        self.has_lost_rank_0: Callable[[], bool] = lambda: False
        self._is_store_in_rank_0 = _is_in_rank_0(store)
        self._prefix, self._key = f"ds_hetero/{_num_boards}/{attempt}", _key
        self._store: Store = PrefixStore(self._prefix, store if clone is None else clone())
        self._has_warned = False
        self._num_ends_read = 0
        self._ends: list[End] = []
        self._asked_at_s: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the begin of the present request to the store; 0 if no request runs."""
        asked_at_s = self._asked_at_s
        return 0.0 if asked_at_s is None else time.monotonic() - asked_at_s

    def num_asked(self) -> int:
        """Return the number of questions that ranks have asked so far."""
        return int(self._request(self._store.add, "asked", 0))

    def ask(self) -> int:
        """Ask all ranks where they are; return the number of the question."""
        return int(self._request(self._store.add, "asked", 1))

    def may_ask(self, num_asked: int) -> bool:
        """Whether this rank may ask the question after number ``num_asked``: the first rank that calls this may."""
        return int(self._request(self._store.add, f"asks_after/{num_asked}", 1)) == 1

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Write host, id and start time of the process of ``rank``, which is this rank."""
        self._write(f"process/{rank}", process)

    def process(self, rank: int) -> JsonDict | None:
        """Return the entry that a rank has written by `introduce`; None if it has written none yet."""
        content: JsonDict | None = self._read(f"process/{rank}")
        return content

    def write_status(self, rank: int, status: Status) -> None:
        """Write the status of this rank."""
        self._write(f"status/{rank}", status._replace(counts=dict(status.counts), posted=dict(status.posted)))

    def status(self, rank: int) -> Status | None:
        """Return the latest status of a rank."""
        content = self._read(f"status/{rank}")
        if content is None:
            return None
        status = Status(*content)
        collective = None if status.collective is None else Collective(*status.collective)
        posted = {group: [PostedCollective(*call) for call in calls] for group, calls in status.posted.items()}
        history, gathers = History(*status.history), History(*status.gathers)
        return status._replace(history=history, collective=collective, posted=posted, gathers=gathers)

    def write_end(self, end: End) -> None:
        """Write this rank's last words."""
        number = self._request(self._store.add, "num_ends", 1)
        self._write(f"end/{number}", end)

    def ends(self) -> list[End]:
        """Return the last words of all ranks that have ended."""
        while self._request(self._store.check, [f"end/{self._num_ends_read + 1}"]):
            self._num_ends_read += 1
            content = self._read(f"end/{self._num_ends_read}")
            if content is not None:
                self._ends.append(End(*content))
        return self._ends

    def settle(self, diagnosis: list[str]) -> list[str]:
        """Write a diagnosis, unless another rank has written one before; return the first diagnosis, which counts."""
        raw = self._request(self._store.compare_set, "diagnosis", "", self._signed("diagnosis", diagnosis))
        content: list[str] | None = self._verified("diagnosis", raw)
        return diagnosis if content is None else content

    def diagnosis(self) -> list[str] | None:
        """Return the first diagnosis that a rank has written with `settle`, which counts; None if there is none."""
        content: list[str] | None = self._read("diagnosis")
        return content

    def _read(self, key: str) -> Any:
        """Return the content of an entry; None if there is no valid entry."""
        has_key = self._request(self._store.check, [key])
        return self._verified(key, self._request(self._store.get, key)) if has_key else None

    def _write(self, key: str, content: object) -> None:
        self._request(self._store.set, key, self._signed(key, content))

    def _signed(self, key: str, content: object) -> str:
        text = json.dumps(content)
        return text if self._key is None else f"{self._mac(key, text)} {text}"

    def _verified(self, key: str, raw: bytes) -> Any:
        """Return the content of an entry; None if its HMAC shows that no rank of this job has written it."""
        text = raw.decode(errors="replace")
        if self._key is not None:
            mac, _, text = text.partition(" ")
            if not hmac.compare_digest(mac.encode(), self._mac(key, text).encode()):
                if not self._has_warned:
                    logger.warning(
                        "An entry of the job's store, %s, has no valid signature, so another process has written it; "
                        "it is ignored. Let only hosts of the job reach the store's port.",
                        key,
                    )
                self._has_warned = True
                return None
        return json.loads(text)

    def _mac(self, key: str, text: str) -> str:
        assert self._key is not None
        return hmac.new(self._key, f"{self._prefix}/{key}\0{text}".encode(), hashlib.sha256).hexdigest()

    def _request(self, ask: Callable[..., T], *args: Any) -> T:
        """Run a request to the store; record for `silent_s` when the request began."""
        if self._is_store_in_rank_0 and self.has_lost_rank_0():
            raise dist.DistNetworkError("rank 0, whose process had the store of the job, is gone")
        self._asked_at_s = time.monotonic()
        try:
            return ask(*args)
        finally:
            self._asked_at_s = None


def _is_in_rank_0(store: Store) -> bool:
    """Whether the store is in the process of rank 0, and not in the launcher's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def default_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group
