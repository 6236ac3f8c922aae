"""Exchange values between ranks over a key-value store, which works while collectives hang or fail.

A rank writes the number of the call that it has reached to the store, so that the others can read the number also while
that call hangs. The store is the one at MASTER_ADDR and MASTER_PORT; torchrun's agent or rank 0 keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.engine.start_name import is_kept_by_launcher, name_of_start
from ds_hetero.errors import PeerError

_REPORT_S = 10.0  # seconds that a rank waits until another one has written the report of a failure
_ANSWER_S = 3.0  # seconds that a rank waits for the positions of the others
_GONE = "its process has ended"


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that ended the test: which rank has noticed it, in which call, and the cause."""

    rank: int  # the rank that has detected the failure
    number: int  # of the call, the same on all ranks
    call: str  # name of the call that the rank was in
    cause: str


class StoreConnection:
    """A rank's connection to the store.

    Args:
        store: holds keys of this self-test alone.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def gather(self, name: str, value: Any, limit_s: float) -> list[Any]:
        """Return the values of all ranks, in order of rank. Every rank calls it once per ``name``.

        Args:
            value: value of this rank, convertible to JSON.

        Raises `PeerError` with the ranks that did not call it within ``limit_s`` seconds.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise PeerError(self._describe_silence(keys, f"did not answer within {limit_s:.0f} s ({name})")) from error
        return [json.loads(self.store.get(key)) for key in keys]

    def _describe_silence(self, keys: list[str], predicate: str) -> str:
        """Return a sentence about the ranks whose keys are missing.

        Args:
            keys: one key of each rank.
            predicate: of the sentence, such as "did not answer".
        """
        try:
            absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return (
                f"a rank {predicate}; which one is not known, because the store cannot be reached any more: the "
                "process that keeps it, the launcher or rank 0, has ended"
            )
        if self.rank == 0:
            time.sleep(_ANSWER_S)  # the others ask as well
        return f"{ranks_text(absent)} {predicate}"

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Publish the process of a rank: host, id and start time."""
        self.store.set(f"process/{rank}", json.dumps(process))

    def process(self, rank: int) -> JsonDict | None:
        """Return the process that `introduce` has published for a rank; None before."""
        key = f"process/{rank}"
        if not self.store.check([key]):
            return None
        process: JsonDict = json.loads(self.store.get(key))
        return process

    def publish_call(self, number: int, call: str) -> None:
        """Publish that this rank has reached a call."""
        self.store.set(f"at/{self.rank}", json.dumps([number, call]))

    def publish_site(self, site: str) -> None:
        """Publish the line of code that this rank executes. Called when a call has failed on some rank."""
        self.store.set(f"site/{self.rank}", site)

    def describe_positions(self, number: int, dead: Collection[int] = ()) -> list[str]:
        """Describe the position of every rank, relative to call ``number``; return one line for each position.

        Args:
            dead: ranks whose processes have ended, so that they will not answer.
        """
        answering = [rank for rank in range(self.size) if rank not in dead]
        with contextlib.suppress(RuntimeError):  # `_site` says which ranks have not answered in time
            self.store.wait([f"site/{rank}" for rank in answering], timedelta(seconds=_ANSWER_S))
        sites = {rank: _GONE if rank in dead else self._site(rank) for rank in range(self.size)}
        places = ((rank, f"{self._place(rank, number)}; {site}") for rank, site in sites.items())
        return [f"rank {', '.join(map(str, ranks))}: {place}" for place, ranks in ranks_by_value(places).items()]

    def _place(self, rank: int, number: int) -> str:
        """Return a text that says whether a rank is before, in or after call ``number``."""
        key = f"at/{rank}"
        if not self.store.check([key]):
            return "has not started"
        reached, call = json.loads(self.store.get(key))
        if reached == number:
            return "has come to the call"
        if reached < number:
            return f"has not come to the call, its last one is {call}"
        return f"is past the call, at {call}"

    def _site(self, rank: int) -> str:
        """Return a text with the line of code that a rank has published."""
        key = f"site/{rank}"
        if not self.store.check([key]):
            return "does not answer: its process has ended, or is stopped"
        return f"its process is in {self.store.get(key).decode()}"

    def declare(self, failure: Failure) -> Failure:
        """Declare a failure for all ranks, unless a rank has declared one before; return the first one."""
        return Failure(**json.loads(self.store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        """Return the failure that some rank has declared for all; None if no rank has."""
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def claim_report(self) -> bool:
        """Return True on the first rank that asks: this rank writes the report of the failure."""
        return bool(self.store.add("reporters", 1) == 1)

    def end_report(self) -> None:
        """Publish that the report is written, so that the other ranks may end."""
        self.store.set("reported", "1")

    def wait_for_report(self) -> None:
        """Wait until another rank has written the report, for at most 10 s."""
        try:
            self.store.wait(["reported"], timedelta(seconds=_REPORT_S))
        except RuntimeError:
            return

    def leave(self, limit_s: float) -> None:
        """Wait until rank 0 has written the report. Rank 0 waits for all others, because it may keep the store."""
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        if self.rank == 0:
            self.end_report()
            if keys:
                self.store.wait(keys, timedelta(seconds=limit_s))
        else:
            self.store.wait(["reported"], timedelta(seconds=limit_s))
            self.store.set(f"left/{self.rank}", "1")


def connect_to_store(limit_s: float) -> tuple[StoreConnection, StoreConnection]:
    """Return two connections to the launcher's store, or to a store in memory in a process without a launcher.

    Args:
        limit_s: seconds to wait for the process that keeps the store.

    Raises `PeerError` if the store cannot be reached.
    """
    if "RANK" not in os.environ:
        store_in_memory = HashStore()
        return StoreConnection(store_in_memory, 0, 1), StoreConnection(store_in_memory, 0, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    connections: list[StoreConnection] = []
    name = ""
    for is_master in (keeps_store, False):
        try:
            store = TCPStore(
                address,
                port,
                is_master=is_master,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            owner = "this rank" if is_master else "rank 0, or torchrun's agent,"
            raise PeerError(
                f"rank {rank} reaches no store at MASTER_ADDR and MASTER_PORT within {limit_s:.0f} s: {owner} does not "
                "keep one there. Is rank 0 started, is the port free, and does the address lead to its host?"
            ) from error
        if not connections and is_kept_by_launcher(address, port):
            name = name_of_start(store, rank, size)
        connections.append(StoreConnection(PrefixStore(f"ds_hetero/selftest/{name}", store), rank, size))
    return connections[0], connections[1]
