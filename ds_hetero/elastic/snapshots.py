"""Take snapshots of a running job every k steps: a thread copies them and sends them to other nodes.

    before_step()   wait until the thread has copied all tensors that the step will change
    after_step()    one all-reduce; every k steps, commit the newest save that all ranks have, and start the next save.
                    It returns when the tensors that the script may change are copied, see `content`

Timeline of one rank, k = 2 (S4: save of the state after step 4):

    training    | step 3 | step 4 |start S4| step 5 | step 6 |commit S4, start S6| ...
    thread                         copy S4, sign, send to other nodes

A rank waits for the save under way before a step after which the next save is due. So S4 is complete before step 6
begins, and a fault just before that costs steps 3 to 5: 2k - 1 steps at most.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ds_hetero.common.text import unlike_bytes_texts
from ds_hetero.elastic.content import Content
from ds_hetero.elastic.node.node_server_requests import REQUEST_TIMEOUT_S, put
from ds_hetero.elastic.node.place import is_full
from ds_hetero.elastic.node.wire import Message, Wire, connect
from ds_hetero.elastic.save_interval import SaveInterval
from ds_hetero.elastic.save_rules import SLOTS, Part, choose_copy_nodes, choose_slot
from ds_hetero.elastic.segments import (
    GROWTH_BYTES,
    HEADER_BYTES,
    SUFFIX,
    Header,
    Save,
    SegmentFile,
    read_header,
    signed,
)
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)

_FIRST_INTERVAL = 1  # steps between saves, until the cost of a save and of a step has been measured
# The first try uses the open connection. The other tries give a killed node server 1.5 s; it restarts in one second.
_SEND_TRIES = 4
_SEND_PAUSE_S = 0.5
_NEWCOMERS_POLL_S = 0.5
_MAX_FAILED_SAVES = 3  # in a row, after which rank 0 reports that no newer save is made; chosen


Cards = Mapping[str, Sequence[str | None]]
"""Models of the GPUs of each machine, as the driver names them, by machine; None for a GPU without a known name."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank of the world, and the shared memory of its node."""

    name: str
    node: str
    node_server: tuple[str, int]  # address of the node's server
    free_bytes: int  # of the node's shared memory
    file_bytes: Mapping[str, int]  # sizes of the segments on the node, by name
    num_bytes: int  # of this rank's part of a save

    @property
    def room_bytes(self) -> int:
        """Bytes on the node that saves may use: free bytes, and bytes of existing segments."""
        return self.free_bytes + sum(self.file_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A node with too little shared memory."""

    node: str
    free_bytes: int
    missing_bytes: int  # what saves need in addition to the existing segments; more than ``free_bytes``

    def __str__(self) -> str:
        free, missing = unlike_bytes_texts(self.free_bytes, self.missing_bytes)
        return f"node {self.node} has {free} of free shared memory, but saves need {missing} more than they have"


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """Settings of a rank's saves."""

    model: str  # its fingerprint
    start: str  # name of this world; greater than the names of earlier worlds
    every_steps: int | None  # number of steps between two saves; None to choose it by `SaveInterval`
    copies: int  # number of copies of each part, on other nodes
    notice_s: float  # from a preemption notice to the end of the node
    resumed: Save | None  # the save that this world has loaded


class Snapshots:
    """The saves of this rank.

    Args:
        worker: this rank.
        group: all ranks, over gloo.
        rules: settings of the saves.
        take: captures the content of a save; its argument says whether ``has_changed`` returned True on any rank.
        has_changed: called before each save; returns True if the save has to contain more than the save before.
        say: reports an event, on rank 0.
        pays: called on rank 0 with the GPUs of machines that wait; returns True if the job gains by letting them join.

    Attributes:
        is_paused: True to save nothing, for benchmarks that compare steps with and without saves.
        every_steps: number of steps between two saves; None until it has been chosen.
        committed_step: step of the newest save that all ranks have; -1 without one.
    """

    def __init__(
        self,
        worker: Worker,
        group: dist.ProcessGroup,
        rules: SaveSettings,
        take: Callable[[bool], Content],
        has_changed: Callable[[], bool],
        say: Callable[..., None],
        pays: Callable[[Cards], bool] = lambda _: True,
    ) -> None:
        self._worker, self._group, self._rules = worker, group, rules
        self._say, self._pays = say, pays
        self._take, self._has_changed = take, has_changed
        self.is_paused = False
        self.every_steps = rules.every_steps
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

        # Slots on this node, and the save that the next one must not overwrite.
        self._files = {slot: SegmentFile(self._path(slot)) for slot in SLOTS}
        self._slots = {slot: _save_in(self._path(slot)) for slot in SLOTS}
        self._committed = rules.resumed

        # Copies on other nodes; chosen by `_place` at the first save.
        self._targets: list[Peer] | None = None
        self._peers: list[Peer] = []
        # Open connections to the servers of other nodes, by node; a server closes idle connections.
        self._wires: dict[str, Wire] = {}

        # The save under way.
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()

        self._done_step = -1  # step of this rank's newest complete save
        self.committed_step = -1
        self._latest_step = 0 if rules.resumed is None else rules.resumed.step

        self._leave_reason: str | None = None  # why all ranks end, once they have agreed to end
        self._interval = SaveInterval()
        self._last_step_end_s: float | None = None
        self._was_busy = False  # whether a save was under way when the latest step began
        self._num_failed_saves = 0  # number in a row of saves that were due, but not complete on all ranks
        self._last_failure = ""  # kind of this rank's latest failure; empty after a success
        self._newcomers_answer: Message = {"newcomers": []}  # latest answer of the rendezvous: agents that wait to join
        if self._rank == 0:
            threading.Thread(target=self._look_for_newcomers, daemon=True).start()

    def _path(self, slot: str) -> Path:
        """Return the file of one of this rank's slots."""
        return self._worker.place.folder / f"own-{self._worker.name}-{slot}{SUFFIX}"

    def before_step(self) -> None:
        """Wait until the tensors that the step changes are copied; if a save is due after it, until the save is done.

        Collectives: those of `leave_if_due`.
        """
        self.leave_if_due()
        self._is_copied.wait()
        if self._is_due(self._latest_step + 1):
            self.wait()

    def _is_due(self, step: int) -> bool:
        """Return True if a save is due after a step. Several steps may have passed since the latest recorded step.

        Example: with 5 steps between saves and 4 as the latest step, a save is due after step 5, 6 or later.
        """
        every = self.every_steps or _FIRST_INTERVAL
        return step // every > self._latest_step // every

    def after_step(self, step: int) -> None:
        """Commit and save if due; agree to leave if a rank has a preemption notice, or a machine waits to join.

        Collectives: one all_reduce of five integers; one more if all leave while no save is due; `on_all_ranks` at the
            first save.
        """
        self._worker.note_step(step)
        if self.is_paused:
            self._last_step_end_s = None
            return
        is_due = self._is_due(step)
        self._latest_step = step
        if is_due or self._worker.has_notice:
            self.wait()
        newcomers = self._newcomers() if is_due and self._rank == 0 else []
        # One maximum over ranks for each number. The newest step that every rank has (`save_rules.committed_step`) is a
        # minimum over ranks, so its negative is sent.
        has_notice, admits_newcomers, minus_done, needed_steps, has_changed = self._agree(
            int(self._worker.has_notice),
            int(bool(newcomers)),
            -self._done_step,
            self._interval.needed_steps(),
            int(is_due and self._has_changed()),
        )
        if is_due:
            self._commit(-minus_done)
            self._count_failed_save(step)
            if self._rules.every_steps is None:
                self.every_steps = needed_steps
        if (has_notice or admits_newcomers) and not is_due:
            (has_changed,) = self._agree(int(self._has_changed()))
        if is_due or has_notice or admits_newcomers:
            has_room = self._save(step, has_changed=bool(has_changed))
            if not has_room:
                admits_newcomers = 0  # joining without this save would cost the steps since the newest one
        if has_notice:
            self._leave_reason = "notice"
        elif admits_newcomers:
            self._leave_reason = f"{', '.join(newcomers) or 'somebody'} joins"
        self._add_step_time(begins=is_due)

    def _add_step_time(self, *, begins: bool) -> None:
        """Give `SaveInterval` the time since the end of the step before. ``begins``: whether a save began in it."""
        now_s = time.perf_counter()
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._last_step_end_s is not None:
            seconds = now_s - self._last_step_end_s
            self._interval.add_step(seconds, begins=begins, is_busy=self._was_busy or is_busy or begins)
        self._last_step_end_s = now_s
        self._was_busy = is_busy

    def _agree(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all ranks."""
        agreed = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in agreed.tolist()]

    def _look_for_newcomers(self) -> None:
        """Poll the rendezvous for machines that wait. Runs in a thread of rank 0, so that no step waits for it."""
        while True:
            try:
                self._newcomers_answer = self._worker.ask_rendezvous({"do": "newcomers"})
            except OSError:
                self._newcomers_answer = {"newcomers": []}
            time.sleep(_NEWCOMERS_POLL_S)

    def _newcomers(self) -> list[str]:
        """Return the agents that wait to join, if the job gains by letting them in."""
        answer = self._newcomers_answer
        names: list[str] = answer["newcomers"]
        return names if names and self._pays(answer["cards"]) else []

    def wait(self) -> None:
        """Wait until the save under way, if any, is written and its copies are sent."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _commit(self, step: int) -> None:
        """Record that all ranks have a save of ``step``, so that older saves may be overwritten."""
        if step <= self.committed_step:
            return
        is_first = self.committed_step < 0
        self.committed_step = step
        self._committed = self._save_of(step)
        if self._num_failed_saves >= _MAX_FAILED_SAVES:
            self._say("saved again", step=step)
        self._num_failed_saves = -1  # `_count_failed_save` follows, and makes it 0
        if is_first:
            nodes_of_copies = [peer.node for peer in self._targets or []]
            self._say("commit", step=step, every_steps=self.every_steps, targets=nodes_of_copies)
            self._delete_stale_segments()
            step_s, save_s = self._interval.step_s, self._interval.save_s
            if step_s + save_s > self._rules.notice_s:
                self._say("notice too short", step_s=step_s, save_s=save_s, notice_s=self._rules.notice_s)

    def _delete_stale_segments(self) -> None:
        """Delete segments of earlier worlds on this node, except files that this world writes again."""
        node = self._worker.place.node
        targets = self._targets_by_rank()
        prefixes_in_use = []
        for rank, peer in enumerate(self._peers):
            if peer.node == node:
                prefixes_in_use.append(_part_prefix(peer))
            if any(target.node == node for target in targets[rank]):
                prefixes_in_use.append(_copy_prefix(peer))
        committed = asdict(self._save_of(self.committed_step))
        try:
            self._worker.ask_node_server({"do": "free", "kept": committed, "in_use": prefixes_in_use})
        except OSError as error:
            logger.warning("the server of this node does not free older saves: %s", error)

    def _count_failed_save(self, step: int) -> None:
        """Report saves that fail in a row, because the next fault costs all steps since the newest complete save."""
        self._num_failed_saves += 1
        if self._num_failed_saves == _MAX_FAILED_SAVES:
            newest = -1 if self._committed is None else self._committed.step
            self._say("not saved", step=step, newest_save=newest, reason="each rank logs why it could not save")

    def _save_of(self, step: int) -> Save:
        """Return the name of this world's save of ``step``."""
        return Save(step=step, start=self._rules.start, world_size=self._size)

    def _save(self, step: int, *, has_changed: bool) -> bool:
        """Start a save: copy the tensors that the script may change now, and the other tensors in a thread.

        Returns:
            False if a node has too little memory; the same on every rank.
        """
        self.wait()
        begin_s = time.perf_counter()
        content = self._take(has_changed)
        if self._targets is None and not self._place(content.num_bytes, step):
            return False
        slot = choose_slot(self._slots, self._committed)
        self._slots[slot] = None  # dirty from here on
        if self._files[slot].has_room(content.num_bytes):
            with self._files[slot].begin(content.num_bytes) as room:
                content.write_now(room)
        else:
            content.copy_to_host_now()
        self._is_copied.clear()
        self._thread = threading.Thread(target=self._work, args=(slot, step, content, begin_s), daemon=True)
        self._thread.start()
        return True

    def _work(self, slot: str, step: int, content: Content, begin_s: float) -> None:
        """Copy, sign and send a save; runs in the thread."""
        try:
            room = self._files[slot].begin(content.num_bytes)
            try:
                header = self._write(slot, step, content, room)
                if header is not None:
                    # A list: all targets are tried, even if one fails.
                    stored = [self._send(target, slot, header, room) for target in self._targets or []]
                    if all(stored):
                        self._done_step = step
                        self._last_failure = ""
            finally:
                room.release()
            self._interval.save_s = time.perf_counter() - begin_s
        except OSError as error:
            free = ""
            if is_full(error):
                free = f", {shutil.disk_usage(self._worker.place.folder).free:,} are free"
            self._note_failure(f"{error}: {content.num_bytes:,} bytes are to be written{free}")
        except Exception:
            logger.exception("rank %d: the save of step %d failed; the save before it stays.", self._rank, step)
        finally:
            self._is_copied.set()

    def _note_failure(self, reason: str) -> None:
        """Log why this rank's save has failed, unless the previous failure was of the same kind."""
        kind = reason.partition(":")[0]
        if kind != self._last_failure:
            logger.warning("rank %d cannot save: %s. The newest save stays; the job goes on.", self._rank, reason)
        self._last_failure = kind

    def _write(self, slot: str, step: int, content: Content, room: memoryview) -> Header | None:
        """Copy the remaining tensors and complete the segment.

        Returns:
            The header; None if the script has changed a deferred tensor, so that the content is invalid.
        """
        content.write_now(room)
        is_sound = content.write_deferred(room)
        self._is_copied.set()
        if not is_sound:
            self._note_failure(
                "the script changes tensors of the engine in place before the next step; from now on they are copied "
                "while the script waits"
            )
            return None
        header = Header(
            job=self._worker.place.job,
            model=self._rules.model,
            save=self._save_of(step),
            rank=self._rank,
            end_bytes=content.num_bytes,
            index_bytes=content.index_bytes,
        )
        header = signed(header, room[: content.num_bytes], self._worker.token)
        self._files[slot].finish(header)
        self._slots[slot] = header.save
        return header

    def _send(self, target: Peer, slot: str, header: Header, room: memoryview) -> bool:
        """Send a segment to the node of a copy. Return True if its node server has stored it."""
        name = f"{_copy_prefix(self._peers[self._rank])}{slot}{SUFFIX}"
        for _ in range(_SEND_TRIES):
            wire = self._wires.pop(target.node, None)
            is_new = wire is None  # an open connection may just have been closed by the node server: no failure yet
            try:
                wire = wire or connect(*target.node_server, self._worker.token, REQUEST_TIMEOUT_S)
                put(wire, name, header, room)
                self._wires[target.node] = wire
                return True
            except OSError as error:
                if wire is not None:
                    wire.close()
                if is_new:
                    self._note_failure(f"node {target.node} does not take a copy: {error}")
                    time.sleep(_SEND_PAUSE_S)
        return False

    def _place(self, num_bytes: int, step: int) -> bool:
        """Agree on the nodes of all copies, once per world. Return False if their shared memory is too small.

        With too little memory, a job that has resumed from a save trains without newer saves. It measures the memory
        again when the next save is due.

        Raises:
            ConfigError: the shared memory is too small, and the job has not saved before.
        """
        shortages = self._measure(num_bytes)
        if shortages:
            swept: list[str] = []
            for swept_by_rank in on_all_ranks(lambda: self._sweep(shortages), self._group):
                swept.extend(swept_by_rank)
            if swept:
                self._say("freed", leftovers=swept)
                shortages = self._measure(num_bytes)
        if not shortages:
            self._targets = self._targets_by_rank()[self._rank]
            if self._rank == 0 and self._rules.copies and not self._targets:
                self._say("no copies", reason="all ranks are on one node, and no other failure domain is left")
            return True
        fewer = ', or set "elastic": {"copies": 0}' if self._rules.copies else ""
        text = (
            f"{'; '.join(map(str, shortages))}: two slots of each part and of each copy. Give it more "
            f"(docker run --shm-size, --memory-gib){fewer}."
        )
        if self._rules.resumed is None:
            raise ConfigError(text)
        if self._num_failed_saves <= 1 or self._num_failed_saves == _MAX_FAILED_SAVES:
            self._say("no room", step=step, newest_save=self._rules.resumed.step, reason=text)
        return False

    def _measure(self, num_bytes: int) -> list[Shortage]:
        """Exchange sizes and free memory, and return the nodes with too little; the same on every rank."""

        def describe() -> Peer:
            node_server = self._worker.place.address()
            assert node_server is not None
            answer = self._worker.ask_node_server({"do": "list"})
            return Peer(
                name=self._worker.name,
                node=self._worker.place.node,
                node_server=node_server,
                free_bytes=int(answer["free_bytes"]),
                file_bytes=answer["file_bytes"],
                num_bytes=num_bytes + GROWTH_BYTES,
            )

        self._peers = list(on_all_ranks(describe, self._group))
        first_peers = self._first_peers()
        missing = dict.fromkeys(first_peers, 0)
        for rank, targets in self._targets_by_rank().items():
            part = self._peers[rank]
            segments = [(part.node, _part_prefix(part))]
            segments += [(target.node, _copy_prefix(part)) for target in targets]
            for node, prefix in segments:
                for slot in SLOTS:
                    file_bytes = first_peers[node].file_bytes.get(f"{prefix}{slot}{SUFFIX}", 0)
                    # A file of this size is reused, even when no other memory is free.
                    is_enough = file_bytes >= HEADER_BYTES + part.num_bytes - GROWTH_BYTES
                    if not is_enough:
                        missing[node] += part.num_bytes - file_bytes
        return [
            Shortage(node=node, free_bytes=peer.free_bytes, missing_bytes=missing[node])
            for node, peer in first_peers.items()
            if missing[node] > peer.free_bytes
        ]

    def _sweep(self, shortages: Sequence[Shortage]) -> list[str]:
        """If this node has too little memory, let its server delete the saves of ended jobs; one rank per node asks."""
        node = self._worker.place.node
        first_rank_of_node = next(rank for rank, peer in enumerate(self._peers) if peer.node == node)
        is_short = any(shortage.node == node for shortage in shortages)
        if self._rank != first_rank_of_node or not is_short:
            return []
        swept: list[str] = self._worker.ask_node_server({"do": "sweep"})["swept"]
        return swept

    def _targets_by_rank(self) -> dict[int, list[Peer]]:
        """Return, by rank, one peer on each node that stores a copy of the rank's part."""
        first_peers = self._first_peers()
        parts = [Part(rank=rank, node=peer.node, num_bytes=peer.num_bytes) for rank, peer in enumerate(self._peers)]
        free_bytes = {node: peer.room_bytes for node, peer in first_peers.items()}
        for part in parts:
            free_bytes[part.node] -= len(SLOTS) * part.num_bytes
        targets = {}
        for rank, nodes in choose_copy_nodes(parts, free_bytes, self._rules.copies).items():
            targets[rank] = [first_peers[node] for node in nodes]
        return targets

    def _first_peers(self) -> dict[str, Peer]:
        """Return the first rank of every node, by node."""
        return {peer.node: peer for peer in reversed(self._peers)}

    def leave_if_due(self) -> None:
        """Commit the save of the latest step and end this process, if all ranks have agreed to leave.

        Call it when the script has done everything that belongs to a step.

        Collectives: one all_reduce of one integer, if the ranks leave.
        """
        if self._leave_reason is None:
            return
        self.wait()
        (minus_done,) = self._agree(-self._done_step)
        self._say("leave", step=self._worker.step, committed=-minus_done, reason=self._leave_reason)
        self._worker.leave()


def _save_in(path: Path) -> Save | None:
    """Return the save whose part is in a segment; None if the segment is dirty or does not exist."""
    header = read_header(path)
    return None if header is None else header.save


def _part_prefix(peer: Peer) -> str:
    """Return the beginning of the names of a rank's segments on its node."""
    return f"own-{peer.name}-"


def _copy_prefix(peer: Peer) -> str:
    """Return the beginning of the names of the copies of a rank's segments on other nodes."""
    return f"from-{peer.name}-"
