"""A gloo rank that blocks where the host of an NCCL rank would: a lock on GPUs is a lock here, named by all its ranks.

gloo connects all pairs before the first message and buffers what is sent. NCCL does neither, and what its host threads
wait for is written in its sources (2.30.7, the same structure in 2.18.3). These are the rules; `install` makes a rank
keep them, over a folder that all ranks see:

connect     The first message of a pair in one direction on a communicator blocks its rank until the peer makes the
            matching call there (transport.cc, ncclTransportP2pSetup: bootstrapSend, then bootstrapRecv, inside
            ncclGroupEnd). Of a batch round i of n - 1 serves the ranks rank - i and rank + i, and nobody leaves before
            its new peers have connected all of their batch. An all-to-all, a gather and a scatter are batches of
            messages (torch, ProcessGroupNCCL), less those that carry nothing.
truncated   Two ranks whose batches differ where rank - i is rank + i read each other's lists: "Message truncated"
            (the same function; seen with torch in NVIDIA/nccl#1279).
communicator  Without ``device_id`` a group's first call makes its communicator, which all its ranks must call (torch,
            docstring of batch_isend_irecv).
collective  The first collective of a kind on a communicator connects its ranks, and blocks until all have called
            (group.cc, ncclCollPreconnect, where NCCL_RUNTIME_CONNECT is on, as it is by default).

Only hosts are looked at. Streams are the graph's subject (`benchmarks.proof.order`): a kernel that waits blocks nobody
here. A wait of `LOCK_S` is called a lock.
"""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOCK_S = float(os.environ.get("STRICT_GROUP_LOCK_S", "20"))  # ranks of a busy machine may be late by some seconds

_MADE_OF_MESSAGES = ("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter")
_COLLECTIVES = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)


class Locked(RuntimeError):
    """The host of a rank waits for what does not come."""


class _End(NamedTuple):
    """One end of a connection to be made, as a rank sees it."""

    sends: bool
    peer: int  # rank in the group


class _Notes:
    """Notes that ranks leave each other in a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        folder.mkdir(exist_ok=True)

    def leave(self, name: str, text: str = "") -> None:
        """Leave a note, which appears at once as a whole."""
        path = self._path(name)
        part = path.with_name(f"{path.name}.{self._rank}")
        part.write_text(text)
        part.rename(path)

    def await_note(self, name: str, what: str) -> str:
        """Return a note when it is there. Raises `Locked`: it does not come; names what all ranks wait for."""
        path, own = self._path(name), self._folder / f"waits{self._rank}"
        began = time.monotonic()
        while not path.exists():
            waited = time.monotonic() - began
            if waited > 1 and not own.exists():
                own.write_text(f"rank {self._rank} waits for {what}\n{_stack()}")
            if waited > LOCK_S:
                time.sleep(0.5)  # others write theirs
                waits = "\n".join(each.read_text() for each in sorted(self._folder.glob("waits*")))
                raise Locked(f"locked for {LOCK_S:g} s; all waits:\n{waits}")
            time.sleep(0.001)
        own.unlink(missing_ok=True)
        return path.read_text()

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")


class _Rules:
    """What this rank has connected and made."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self._connected: set[tuple[str, _End]] = set()
        self._called: set[tuple[str, str]] = set()  # (group, kind of collective)
        self._batches: Counter[tuple[str, int]] = Counter()  # that two opposite ranks have exchanged
        self.in_batch = False

    def connect(self, group: Any, ends: list[_End]) -> None:
        """Connect those of a batch that are not connected."""
        self.use(group)
        name, own, size = group.group_name, group.rank(), group.size()
        new = [end for end in dict.fromkeys(ends) if end.peer != own and (name, end) not in self._connected]
        if not new:
            return
        self._connected.update((name, end) for end in new)
        for i in range(1, size):
            before, after = (own - i) % size, (own + i) % size
            if before == after:
                self._connect_opposite(group, before, new)
                continue
            ends_of_round = [end for end in (_End(False, before), _End(True, after)) if end in new]
            for end in ends_of_round:
                self._notes.leave(f"{name}/end/{own}-{end.peer}-{end.sends}")
            for end in reversed(ends_of_round):  # a send is answered before a receive is looked for
                other = "receive" if end.sends else "send"
                what = f"the first {other} of rank {_global(group, end.peer)} on {_described(group)}"
                self._notes.await_note(f"{name}/end/{end.peer}-{own}-{not end.sends}", what)
        for end in new:
            self._notes.leave(f"{name}/done/{own}-{end.peer}-{end.sends}")
        for end in new:
            what = f"rank {_global(group, end.peer)} to have connected the rest of its batch on {_described(group)}"
            self._notes.await_note(f"{name}/done/{end.peer}-{own}-{not end.sends}", what)

    def _connect_opposite(self, group: Any, peer: int, new: list[_End]) -> None:
        """The round in which both neighbours are one rank: the two tell each other all that they connect."""
        receives, sends = _End(False, peer) in new, _End(True, peer) in new
        if not (receives or sends):
            return
        name, own = group.group_name, group.rank()
        self._batches[name, peer] += 1
        turn = self._batches[name, peer]
        self._notes.leave(f"{name}/both/{own}-{peer}-{turn}", f"{receives} {sends}")
        what = f"the first messages of rank {_global(group, peer)} on {_described(group)}"
        theirs = self._notes.await_note(f"{name}/both/{peer}-{own}-{turn}", what)
        if theirs != f"{sends} {receives}":
            raise Locked(
                f"Message truncated: rank {_global(group, own)} connects (receives {receives}, sends {sends}) with "
                f"rank {_global(group, peer)} on {_described(group)}, which connects (receives, sends) {theirs}"
            )

    def use(self, group: Any) -> None:
        """The first call on a group makes its communicator."""
        self._by_all(group, "communicator", "make its first call, which makes the communicator,")

    def collective(self, group: Any, kind: str) -> None:
        """The first collective of a kind connects all ranks."""
        self.use(group)
        self._by_all(group, kind, f"make its first {kind}")

    def _by_all(self, group: Any, kind: str, what: str) -> None:
        name = group.group_name
        if (name, kind) in self._called:
            return
        self._called.add((name, kind))
        self._notes.leave(f"{name}/{kind}/{group.rank()}")
        for peer in range(group.size()):
            self._notes.await_note(
                f"{name}/{kind}/{peer}", f"rank {_global(group, peer)} to {what} on {_described(group)}"
            )


def _global(group: Any, peer: int) -> int:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)[peer]


def _described(group: Any) -> str:
    import torch.distributed as dist

    return f"group {group.group_name} of ranks {dist.get_process_group_ranks(group)}"


def _stack() -> str:
    """Where the rank is, without this file and what starts ranks."""
    hidden = ("/strict_group.py", "multiprocessing", "frozen", "tests/support")
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in hidden)]
    lines = [f"    {frame.filename.split('/site-packages/')[-1]}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join(lines[-14:])


def install(folder: str, rank: int) -> None:
    """Let this process keep the rules, and believe that its groups pair messages by order; there is no way back.

    Args:
        folder: that all ranks of the run see, and no other run.
    """
    import torch.distributed as dist

    from ds_hetero.runtime import replica
    from ds_hetero.runtime.attention import channel

    rules = _Rules(_Notes(Path(folder, "strict_group"), rank))
    channel.pairs_by_order = lambda group=None: True  # type: ignore[attr-defined]
    replica._has_far_group = lambda hosts: True  # type: ignore[assignment]

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(make(original)))

    def message(original: Any, sends: bool) -> Any:
        def call(group: Any, tensors: Any, peer: int, tag: int) -> Any:
            if not rules.in_batch:
                rules.connect(group, [_End(sends, peer)])
            return original(group, tensors, peer, tag)

        return call

    def batch(original: Any) -> Any:
        def call(operations: Any) -> Any:
            group = operations[0].group or dist.group.WORLD
            rules.connect(group, [_End(op.op is dist.isend, op.group_peer) for op in operations])
            rules.in_batch = True
            try:
                return original(operations)
            finally:
                rules.in_batch = False

        return call

    def made_of_messages(original: Any, name: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            rules.connect(group, list(_messages(name, group, args)))
            return original(group, *args, **kwargs)

        return call

    def collective(original: Any, name: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            rules.collective(group, name)
            return original(group, *args, **kwargs)

        return call

    replace(dist.ProcessGroup, "send", functools.partial(message, sends=True))
    replace(dist.ProcessGroup, "recv", functools.partial(message, sends=False))
    replace(dist, "batch_isend_irecv", batch)
    for name in _MADE_OF_MESSAGES:
        replace(dist.ProcessGroup, name, functools.partial(made_of_messages, name=name))
    for name in _COLLECTIVES:
        replace(dist.ProcessGroup, name, functools.partial(collective, name=name))


def _messages(name: str, group: Any, args: Any) -> Iterator[_End]:
    """The messages that torch's NCCL backend makes of a call."""
    size, own = group.size(), group.rank()
    if name in ("alltoall_base", "all_to_all_single"):
        output, source, received, sent = args[:4]
        for peer in range(size):
            if (sent[peer] if sent else len(source)) and source.numel():
                yield _End(True, peer)
            if (received[peer] if received else len(output)) and output.numel():
                yield _End(False, peer)
    elif name == "alltoall":
        for peer in range(size):
            yield _End(True, peer)
            yield _End(False, peer)
    else:
        root = next(arg.rootRank for arg in args if hasattr(arg, "rootRank"))
        to_root = name == "gather"
        peers = range(size) if own == root else [root]
        for peer in peers:
            yield _End(to_root == (own != root), peer)
