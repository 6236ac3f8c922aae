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

What runs on the device, and where a host waits for it, is in `tests.strict_device`. Orders of streams are the graph's
subject (`benchmarks.proof.order`). A wait of `LOCK_S` is called a lock.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.strict_device import Device, Locked, block_inside_torch, seem_of_torch

LOCK_S = 20.0  # ranks of a busy machine may be late by some seconds

_COLLECTIVES_OF_MESSAGES = ("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter")


class _End(NamedTuple):
    """A connection to be made, as one of its two ranks sees it."""

    sends: bool
    peer: int  # rank in the group


class _Notes:
    """Notes that ranks leave each other as files in a folder."""

    def __init__(self, folder: Path, rank: int, lock_s: float | None) -> None:
        self._folder, self._rank, self._lock_s = folder, rank, lock_s
        folder.mkdir(exist_ok=True)

    def leave(self, name: str, text: str = "") -> None:
        """Write a note; it appears at once and complete."""
        path = self._path(name)
        part = path.with_name(f"{path.name}.{self._rank}")
        part.write_text(text)
        part.rename(path)

    def await_note(self, name: str, what: str) -> str:
        """Wait for a note and return it. Raises `Locked` if it does not come, with what every rank waits for."""
        path, waiting_note = self._path(name), self._folder / f"waits{self._rank}"
        if not _appears(path, 1.0):
            waiting_note.write_text(f"rank {self._rank} waits for {what}\n{_stack()}")
            if not _appears(path, self._lock_s):
                time.sleep(0.5)  # others write theirs
                waits = "\n".join(note.read_text() for note in sorted(self._folder.glob("waits*")))
                raise Locked(f"locked for {self._lock_s:g} s; all waits:\n{waits}")
            waiting_note.unlink()
        return path.read_text()

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")


def _appears(path: Path, limit_s: float | None) -> bool:
    """Wait until a file exists, in one call that seems to be torch.distributed's; return False at the limit, if any."""
    if path.exists():
        return True
    came, waited = [False], threading.Lock()
    waited.acquire()

    def look() -> None:
        began = time.monotonic()
        while not path.exists() and (limit_s is None or time.monotonic() - began < limit_s):
            time.sleep(0.001)
        came[0] = path.exists()
        waited.release()

    threading.Thread(target=look, daemon=True).start()
    block_inside_torch(waited.acquire)
    return came[0]


class _Rules:
    """The communicators and connections of this rank so far."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self._connected: set[tuple[str, _End]] = set()
        self._called: set[tuple[str, str]] = set()  # (group, kind of collective)
        self._batches: Counter[tuple[str, int]] = Counter()  # that two opposite ranks have exchanged
        self.in_batch = False

    def connect(self, group: Any, ends: list[_End]) -> None:
        """Connect the pairs of a batch that are not connected yet."""
        self.use(group)
        name, rank, size = group.group_name, group.rank(), group.size()
        new = [end for end in dict.fromkeys(ends) if end.peer != rank and (name, end) not in self._connected]
        if not new:
            return
        self._connected.update((name, end) for end in new)
        for i in range(1, size):
            before, after = (rank - i) % size, (rank + i) % size
            if before == after:
                self._connect_opposite(group, before, new)
                continue
            ends_of_round = [end for end in (_End(False, before), _End(True, after)) if end in new]
            for end in ends_of_round:
                self._notes.leave(f"{name}/end/{rank}-{end.peer}-{end.sends}")
            for end in reversed(ends_of_round):  # a send is answered before a receive is looked for
                other = "receive" if end.sends else "send"
                what = f"the first {other} of rank {_global(group, end.peer)} on {_described(group)}"
                self._notes.await_note(f"{name}/end/{end.peer}-{rank}-{not end.sends}", what)
        for end in new:
            self._notes.leave(f"{name}/done/{rank}-{end.peer}-{end.sends}")
        for end in new:
            what = f"rank {_global(group, end.peer)} to have connected the rest of its batch on {_described(group)}"
            self._notes.await_note(f"{name}/done/{end.peer}-{rank}-{not end.sends}", what)

    def _connect_opposite(self, group: Any, peer: int, new: list[_End]) -> None:
        """Connect to the peer that is both neighbours in its round; the two exchange all that they connect."""
        receives, sends = _End(False, peer) in new, _End(True, peer) in new
        if not (receives or sends):
            return
        name, rank = group.group_name, group.rank()
        self._batches[name, peer] += 1
        turn = self._batches[name, peer]
        self._notes.leave(f"{name}/both/{rank}-{peer}-{turn}", f"{receives} {sends}")
        what = f"the first messages of rank {_global(group, peer)} on {_described(group)}"
        theirs = self._notes.await_note(f"{name}/both/{peer}-{rank}-{turn}", what)
        if theirs != f"{sends} {receives}":
            raise Locked(
                f"Message truncated: rank {_global(group, rank)} connects (receives {receives}, sends {sends}) with "
                f"rank {_global(group, peer)} on {_described(group)}, which connects (receives, sends) {theirs}"
            )

    def use(self, group: Any) -> None:
        """Make the communicator of a group, at its first call."""
        self._by_all(group, "communicator", "make its first call, which makes the communicator,")

    def collective(self, group: Any, kind: str) -> None:
        """Connect all ranks of a group, at its first collective of a kind."""
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
    """Return where the rank is, without frames of this file and of the code that starts ranks."""
    hidden = ("/strict_group.py", "multiprocessing", "frozen", "tests/support")
    frames = [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in hidden)]
    lines = [f"    {frame.filename.split('/site-packages/')[-1]}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join(lines[-14:])


def install(folder: str, rank: int) -> Device:
    """Let this process keep the rules, and believe that its groups pair messages by order; there is no way back.

    Args:
        folder: that all ranks of the run see, and no other run.

    The variable STRICT_GROUP_LOCK_S takes the place of `LOCK_S`; 0 stands for waits that end in another way.
    """
    import torch.distributed as dist

    from ds_hetero.runtime import replica
    from ds_hetero.runtime.attention import channel
    from ds_hetero.runtime.peers.posted_calls import COLLECTIVES
    from ds_hetero.runtime.pipeline import runner

    lock_s = float(os.environ.get("STRICT_GROUP_LOCK_S", LOCK_S)) or None
    rules = _Rules(_Notes(Path(folder, "strict_group"), rank, lock_s))
    device = Device(lock_s)
    for module in (channel, replica, runner):
        module.pairs_by_order = lambda group=None: True  # type: ignore[attr-defined]
    replica._has_far_group = lambda hosts: True  # type: ignore[assignment]

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(make(original)))

    def message(original: Any, sends: bool) -> Any:
        def call(group: Any, tensors: Any, peer: int, tag: int) -> Any:
            device.before_posting(tensors)
            if not rules.in_batch:
                rules.connect(group, [_End(sends, peer)])
            work = original(group, tensors, peer, tag)
            end = f"receive of rank {_global(group, peer)}" if sends else f"send of rank {_global(group, peer)}"
            return device.post(work, group.group_name, f"the {end} on {_described(group)}", tensors, is_message=True)

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

    def collective(original: Any, name: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            device.before_posting(args)
            if name in _COLLECTIVES_OF_MESSAGES:
                rules.connect(group, list(_messages(name, group, args)))
            else:
                rules.collective(group, name)
            for options in (*args, *kwargs.values()):
                if hasattr(options, "asyncOp"):
                    options.asyncOp = True  # else torch may wait below Python
            what = name if name == "barrier" else f"{name} on {_described(group)}"
            return device.post(original(group, *args, **kwargs), group.group_name, what, args)

        return call

    seem_of_torch(message, batch, collective)
    replace(dist.ProcessGroup, "send", functools.partial(message, sends=True))
    replace(dist.ProcessGroup, "recv", functools.partial(message, sends=False))
    replace(dist, "batch_isend_irecv", batch)
    for name in COLLECTIVES:
        replace(dist.ProcessGroup, name, functools.partial(collective, name=name))
    device.install()
    return device


def own_device() -> Device:
    """Return the device of a rank that keeps the rules; tests use up its memory."""
    import torch.distributed as dist

    device: Device = dist.Work.wait.device  # type: ignore[attr-defined]
    return device


def _messages(name: str, group: Any, args: Any) -> Iterator[_End]:
    """Yield the messages that torch's NCCL backend makes of a call."""
    size, rank = group.size(), group.rank()
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
        peers = range(size) if rank == root else [root]
        for peer in peers:
            yield _End(to_root == (rank != root), peer)


seem_of_torch(_appears, _Notes.await_note)
seem_of_torch(_Rules.connect, _Rules._connect_opposite, _Rules.use, _Rules.collective, _Rules._by_all)
