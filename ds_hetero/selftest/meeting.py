"""Meeting of ranks while collectives are in question: the launcher's key-value store.

A store knows who has come to which call, also when that call hangs. It is the one at MASTER_ADDR and MASTER_PORT, kept
by torchrun's agent, or else by rank 0.
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
from ds_hetero.common.text import ranks_by_value
from ds_hetero.engine.start_name import is_kept_by_launcher, name_of_start
from ds_hetero.errors import PeerError

_REPORT_S = 10.0  # for another rank to write the report of a failure
_ANSWER_S = 3.0  # for a rank to say where it is
_GONE = "its process has ended"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why the test cannot go on."""

    rank: int
    number: int  # of the call, which counts alike on all ranks
    call: str  # what the rank was doing
    cause: str


class Meeting:
    """A connection to the store. ``store``: for keys of this test alone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def gather(self, name: str, value: Any, limit_s: float) -> list[Any]:
        """Return all ranks' values, in order; every rank calls it once per ``name``. Raises `PeerError`: who did not.

        Args:
            value: of this rank, as JSON can carry it.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise PeerError(f"{self._absent(keys)} did not come to {name} within {limit_s:.0f} s") from error
        return [json.loads(self.store.get(key)) for key in keys]

    def _absent(self, keys: list[str]) -> str:
        """Return the ranks whose keys are missing."""
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return "some rank, and rank 0 no longer keeps the store that says which:"
        if self.rank == 0:
            time.sleep(_ANSWER_S)  # the others ask as well
        return f"rank {', '.join(absent)}"

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Tell the others which process this rank is."""
        self.store.set(f"process/{rank}", json.dumps(process))

    def process(self, rank: int) -> JsonDict | None:
        """Return the process that a rank has introduced itself with; None where it has not yet."""
        key = f"process/{rank}"
        if not self.store.check([key]):
            return None
        process: JsonDict = json.loads(self.store.get(key))
        return process

    def come_to(self, number: int, call: str) -> None:
        """Note that this rank has come to a call."""
        self.store.set(f"at/{self.rank}", json.dumps([number, call]))

    def tell_site(self, site: str) -> None:
        """Note which line of code this rank is at, once a call has failed somewhere."""
        self.store.set(f"site/{self.rank}", site)

    def standing(self, number: int, dead: Collection[int] = ()) -> list[str]:
        """Describe where every rank is, seen from call ``number``: one line for ranks at the same place.

        Args:
            dead: ranks that will not answer, as their processes are gone.
        """
        answering = [rank for rank in range(self.size) if rank not in dead]
        with contextlib.suppress(RuntimeError):  # who does not answer in time is told below
            self.store.wait([f"site/{rank}" for rank in answering], timedelta(seconds=_ANSWER_S))
        sites = {rank: _GONE if rank in dead else self._site(rank) for rank in range(self.size)}
        places = ((rank, f"{self._place(rank, number)}; {site}") for rank, site in sites.items())
        return [f"rank {', '.join(map(str, ranks))}: {place}" for place, ranks in ranks_by_value(places).items()]

    def _place(self, rank: int, number: int) -> str:
        key = f"at/{rank}"
        if not self.store.check([key]):
            return "has not started"
        at, call = json.loads(self.store.get(key))
        if at == number:
            return "has come to the call"
        return f"has not come to the call, its last one is {call}" if at < number else f"is past the call, at {call}"

    def _site(self, rank: int) -> str:
        key = f"site/{rank}"
        if not self.store.check([key]):
            return "does not answer: its process has ended, or is stopped"
        return f"its process is in {self.store.get(key).decode()}"

    def declare(self, failure: Failure) -> Failure:
        """Make a failure that of all ranks, unless there is one already; return the one that counts."""
        return Failure(**json.loads(self.store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        """Return the failure that a rank has declared, if any."""
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def takes_report(self) -> bool:
        """Whether this rank is the first to ask, and so is to write the report of a failure."""
        return bool(self.store.add("reporters", 1) == 1)

    def end_report(self) -> None:
        """Let the other ranks end: the report is written."""
        self.store.set("reported", "1")

    def wait_for_report(self) -> None:
        """Wait until another rank has written the report, but not for long."""
        try:
            self.store.wait(["reported"], timedelta(seconds=_REPORT_S))
        except RuntimeError:
            return

    def leave(self, limit_s: float) -> None:
        """End together, when rank 0 has written the report: it may keep the store, and goes last."""
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        if self.rank == 0:
            self.end_report()
            if keys:
                self.store.wait(keys, timedelta(seconds=limit_s))
        else:
            self.store.wait(["reported"], timedelta(seconds=limit_s))
            self.store.set(f"left/{self.rank}", "1")


def meet(limit_s: float) -> tuple[Meeting, Meeting]:
    """Return two connections to the launcher's store or to our own. Raises `PeerError`: it cannot be reached.

    Args:
        limit_s: seconds to wait for the process that keeps the store.
    """
    if "RANK" not in os.environ:
        own = HashStore()
        return Meeting(own, 0, 1), Meeting(own, 0, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    meetings: list[Meeting] = []
    name = ""
    for is_master in (keeps, False):
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
            whose = "this rank" if is_master else "rank 0, or torchrun's agent,"
            raise PeerError(
                f"rank {rank} reaches no store at MASTER_ADDR and MASTER_PORT within {limit_s:.0f} s: {whose} does not "
                "keep one there. Is rank 0 started, is the port free, and does the address lead to its host?"
            ) from error
        if not meetings and is_kept_by_launcher(address, port):
            name = name_of_start(store, rank, size)
        meetings.append(Meeting(PrefixStore(f"ds_hetero/selftest/{name}", store), rank, size))
    return meetings[0], meetings[1]
