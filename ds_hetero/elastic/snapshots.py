"""Snapshots of a running job: taken every k steps, copied by a thread, sent to other nodes, committed by agreement.

    before_step()   waits until the thread has copied what the step is about to change
    after_step()    one all-reduce; every k steps the newest save that all have is committed, and the next is taken:
                    what the script can change is copied before it returns, see `content`

Before a step after which a save is due, the one under way is waited for, so at most 2k - 1 steps are lost.
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
from ds_hetero.elastic.node.keeper_requests import REQUEST_TIMEOUT_S, put
from ds_hetero.elastic.node.place import is_full
from ds_hetero.elastic.node.wire import Message, Wire, connect
from ds_hetero.elastic.pace import Pace
from ds_hetero.elastic.save_rules import SLOTS, Part, choose_slot, place_copies
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

_FIRST_EVERY = 1  # steps, until the cost of a save and of a step is known
_SEND_TRIES = 4  # with the kept connection first; a keeper that was killed is back in a second
_PAUSE_S = 0.5
_NEWCOMERS_POLL_S = 0.5
_MOST_UNSAVED = 3  # saves in a row that come to nothing before it is said that the job has no newer one


Cards = Mapping[str, Sequence[str | None]]
"""What the drivers of machines call their cards, by name of the machine; None where one is not known."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A rank of the world, and where it keeps its state."""

    name: str
    node: str
    keeper: tuple[str, int]  # address of the node's keeper
    free_bytes: int  # of the node's shared memory
    file_bytes: Mapping[str, int]  # of the segments that the node has
    num_bytes: int

    @property
    def room_bytes(self) -> int:
        """Bytes that saves could take on the node, with the pages that they have."""
        return self.free_bytes + sum(self.file_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A node with too little shared memory."""

    node: str
    free_bytes: int
    missing_bytes: int  # that saves need beside the pages that they have

    def __str__(self) -> str:
        free, missing = unlike_bytes_texts(self.free_bytes, self.missing_bytes)
        return f"node {self.node} has {free} of free shared memory, and saves need {missing} more than they have"


@dataclass(frozen=True, kw_only=True)
class SaveRules:
    """Rules by which a rank saves."""

    model: str
    start: str  # of this world; greater than those before
    every_steps: int | None  # between two saves; None for as few as cost nothing
    copies: int  # of each part, on other nodes
    notice_s: float  # seconds that a node has from its notice to its end
    resumed: Save | None  # the save that this world began with


class Snapshots:
    """The saves of this rank.

    Args:
        group: all ranks, over gloo.
        take: makes the content of a save, given whether ``has_changed`` holds on any rank.
        has_changed: whether more belongs to a save than to the one before; asked before each.
        say: tells an event, on rank 0.
        pays: whether it does to let machines in, by their cards; asked on rank 0.

    Attributes:
        is_paused: no step is saved, as a benchmark has it that compares.
    """

    def __init__(
        self,
        worker: Worker,
        group: dist.ProcessGroup,
        rules: SaveRules,
        take: Callable[[bool], Content],
        has_changed: Callable[[], bool],
        say: Callable[..., None],
        pays: Callable[[Cards], bool] = lambda _: True,
    ) -> None:
        self._worker, self._group, self._rules, self._say, self._pays = worker, group, rules, say, pays
        self._take, self._has_changed = take, has_changed
        self.every_steps = rules.every_steps
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._files = {slot: SegmentFile(self._path(slot)) for slot in SLOTS}
        self._slots = {slot: getattr(read_header(self._path(slot)), "save", None) for slot in SLOTS}
        self._kept = rules.resumed
        self._targets: list[Peer] | None = None
        self._peers: list[Peer] = []
        self._wires: dict[str, Wire] = {}  # to keepers of copies, by node; a keeper closes one that is not used
        self._thread: threading.Thread | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._done_step = self.committed_step = -1
        self._latest_step = 0 if rules.resumed is None else rules.resumed.step
        self._leaving: str | None = None  # why all ranks end
        self._pace = Pace()
        self._last_step_s: float | None = None
        self._is_busy = False  # whether a save was under way when the latest step began
        self._num_unsaved = 0  # saves in a row that were due and that not all ranks have
        self._last_failure = ""  # of this rank's own saves, until one succeeds
        self.is_paused = False
        self._waiting: Message = {"newcomers": []}  # to be let in
        if self._rank == 0:
            threading.Thread(target=self._look_for_newcomers, daemon=True).start()

    def _path(self, slot: str) -> Path:
        return self._worker.place.folder / f"own-{self._worker.name}-{slot}{SUFFIX}"

    def before_step(self) -> None:
        """Wait until nothing is left to copy of what the step changes, or of the save before where one is due."""
        self.leave_if_due()
        self._is_copied.wait()
        if self._is_due(self._latest_step + 1):
            self.wait()

    def _is_due(self, step: int) -> bool:
        """Whether a save is, after a step; several may have been done since the latest one that was noted."""
        every = self.every_steps or _FIRST_EVERY
        return step // every > self._latest_step // every

    def after_step(self, step: int) -> None:
        """Commit and save if they are due; leave if a rank was given notice, or somebody waits to join.

        Collectives: one all_reduce of five integers, one more at a save that is not due; `on_all_ranks` at the first.
        """
        self._worker.note_step(step)
        if self.is_paused:
            self._last_step_s = None
            return
        is_due = self._is_due(step)
        self._latest_step = step
        if is_due or self._worker.has_notice:
            self.wait()
        newcomers = self._newcomers() if is_due and self._rank == 0 else []
        has_changed = int(is_due and self._has_changed())
        leaving, joining, minus_done, needed, has_changed = self._agree(
            int(self._worker.has_notice), int(bool(newcomers)), -self._done_step, self._pace.needed_steps(), has_changed
        )
        if is_due:
            self._commit(-minus_done)
            self._count_unsaved(step)
        if is_due and self._rules.every_steps is None:
            self.every_steps = needed
        if (leaving or joining) and not is_due:
            (has_changed,) = self._agree(int(self._has_changed()))
        if (is_due or leaving or joining) and not self._save(step, has_changed=bool(has_changed)):
            joining = 0  # they would cost the steps since the newest save
        if leaving or joining:
            self._leaving = "notice" if leaving else f"{', '.join(newcomers) or 'somebody'} joins"
        now_s = time.perf_counter()
        is_under_way = self._thread is not None and self._thread.is_alive()
        if self._last_step_s is not None:
            seconds = now_s - self._last_step_s
            self._pace.add_step(seconds, begins=is_due, is_busy=self._is_busy or is_under_way or is_due)
        self._last_step_s, self._is_busy = now_s, is_under_way

    def _agree(self, *numbers: int) -> list[int]:
        agreed = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in agreed.tolist()]

    def _look_for_newcomers(self) -> None:
        """In a thread of rank 0, so that no step waits for the answer."""
        while True:
            try:
                self._waiting = self._worker.ask_meeting({"do": "newcomers"})
            except OSError:
                self._waiting = {"newcomers": []}
            time.sleep(_NEWCOMERS_POLL_S)

    def _newcomers(self) -> list[str]:
        answer = self._waiting
        names: list[str] = answer["newcomers"]
        return names if names and self._pays(answer["cards"]) else []

    def wait(self) -> None:
        """Wait until the save that is under way, if any, is written and copied."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _commit(self, step: int) -> None:
        """All ranks have a save of ``step``: what is older may go."""
        if step <= self.committed_step:
            return
        is_first = self.committed_step < 0
        self.committed_step = step
        self._kept = self._save_of(step)
        if self._num_unsaved >= _MOST_UNSAVED:
            self._say("saved again", step=step)
        self._num_unsaved = -1
        if is_first:
            self._say("commit", step=step, every_steps=self.every_steps, targets=[p.node for p in self._targets or []])
            self._free()
            step_s, save_s = self._pace.step_s, self._pace.save_s
            if step_s + save_s > self._rules.notice_s:
                self._say("notice too short", step_s=step_s, save_s=save_s, notice_s=self._rules.notice_s)

    def _free(self) -> None:
        """Delete what worlds before have left on this node; segments that are written again stay."""
        node = self._worker.place.node
        targets = self._targets_by_rank()
        own = [f"own-{peer.name}-" for peer in self._peers if peer.node == node]
        copies = [
            _copy_prefix(peer) for rank, peer in enumerate(self._peers) if any(t.node == node for t in targets[rank])
        ]
        try:
            self._worker.ask_keeper(
                {"do": "free", "kept": asdict(self._save_of(self.committed_step)), "in_use": own + copies}
            )
        except OSError as error:
            logger.warning("the keeper of this node does not free older saves: %s", error)

    def _count_unsaved(self, step: int) -> None:
        """Say it where saves come to nothing: the next fault would cost all steps since the newest one."""
        self._num_unsaved += 1
        if self._num_unsaved == _MOST_UNSAVED:
            newest = -1 if self._kept is None else self._kept.step
            self._say("not saved", step=step, newest_save=newest, reason="each rank says why its own were not made")

    def _save_of(self, step: int) -> Save:
        return Save(step=step, start=self._rules.start, world_size=self._size)

    def _save(self, step: int, *, has_changed: bool) -> bool:
        """Capture the state: what the script can change now, by a thread what is held. Whether all ranks have room."""
        self.wait()
        begin_s = time.perf_counter()
        content = self._take(has_changed)
        if self._targets is None and not self._place(content.num_bytes, step):
            return False
        slot = choose_slot(self._slots, self._kept)
        self._slots[slot] = None
        if self._files[slot].has_room(content.num_bytes):
            with self._files[slot].begin(content.num_bytes) as room:
                content.write_now(room)
        else:
            content.take_now()
        self._is_copied.clear()
        self._thread = threading.Thread(target=self._work, args=(slot, step, content, begin_s), daemon=True)
        self._thread.start()
        return True

    def _work(self, slot: str, step: int, content: Content, begin_s: float) -> None:
        """In the thread: copy, sign, send."""
        try:
            room = self._files[slot].begin(content.num_bytes)
            try:
                header = self._write(slot, step, content, room)
                if header is not None:
                    stored = [self._send(target, slot, header, room) for target in self._targets or []]
                    if all(stored):
                        self._done_step, self._last_failure = step, ""
            finally:
                room.release()
            self._pace.save_s = time.perf_counter() - begin_s
        except OSError as error:
            free = f", {shutil.disk_usage(self._worker.place.folder).free:,} are free" if is_full(error) else ""
            self._note_failure(f"{error}: {content.num_bytes:,} bytes are to be written{free}")
        except Exception:
            logger.exception("a save of step %d failed; the one before stays", step)
        finally:
            self._is_copied.set()

    def _note_failure(self, reason: str) -> None:
        """Say once why this rank's saves come to nothing."""
        kind = reason.partition(":")[0]
        if kind != self._last_failure:
            logger.warning("rank %d cannot save: %s. The newest save stays; the job goes on.", self._rank, reason)
        self._last_failure = kind

    def _write(self, slot: str, step: int, content: Content, room: memoryview) -> Header | None:
        """Copy what is left and make the segment whole; None where the script has changed what was held."""
        content.write_now(room)
        is_sound = content.write_held(room)
        self._is_copied.set()
        if not is_sound:
            self._note_failure(
                "the script changes tensors in place that belong to the engine, before its next step; from now on they "
                "are copied while it waits"
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
        """Send a segment to the node of a copy; whether it has it."""
        name = f"{_copy_prefix(self._peers[self._rank])}{slot}{SUFFIX}"
        for _ in range(_SEND_TRIES):
            wire = self._wires.pop(target.node, None)
            is_new = wire is None
            try:
                wire = wire or connect(*target.keeper, self._worker.token, REQUEST_TIMEOUT_S)
                put(wire, name, header, room)
                self._wires[target.node] = wire
                return True
            except OSError as error:
                if wire is not None:
                    wire.close()
                if is_new:
                    self._note_failure(f"node {target.node} does not take a copy: {error}")
                    time.sleep(_PAUSE_S)
        return False

    def _place(self, num_bytes: int, step: int) -> bool:
        """Agree on the nodes of all copies, once per world; whether the shared memory is large enough.

        Raises:
            ConfigError: it is too small, and the job begins. One that goes on trains without newer saves, and looks
                again when the next one is due.
        """
        shortages = self._measure(num_bytes)
        if shortages:
            swept = [text for of_rank in on_all_ranks(lambda: self._sweep(shortages), self._group) for text in of_rank]
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
            f"{'; '.join(map(str, shortages))}: two slots of each own part and of each copy. Give it more "
            f"(docker run --shm-size, --memory-gib){fewer}."
        )
        if self._rules.resumed is None:
            raise ConfigError(text)
        if self._num_unsaved <= 1 or self._num_unsaved == _MOST_UNSAVED:
            self._say("no room", step=step, newest_save=self._rules.resumed.step, reason=text)
        return False

    def _measure(self, num_bytes: int) -> list[Shortage]:
        """Nodes whose shared memory is too small, the same on every rank."""

        def describe() -> Peer:
            keeper = self._worker.place.address()
            assert keeper is not None
            known = self._worker.ask_keeper({"do": "list"})
            return Peer(
                name=self._worker.name,
                node=self._worker.place.node,
                keeper=keeper,
                free_bytes=int(known["free_bytes"]),
                file_bytes=known["file_bytes"],
                num_bytes=num_bytes + GROWTH_BYTES,
            )

        self._peers = list(on_all_ranks(describe, self._group))
        by_node = {peer.node: peer for peer in reversed(self._peers)}
        missing = dict.fromkeys(by_node, 0)
        for rank, targets in self._targets_by_rank().items():
            part = self._peers[rank]
            names = [(part.node, f"own-{part.name}-"), *((target.node, _copy_prefix(part)) for target in targets)]
            for node, prefix in names:
                for slot in SLOTS:
                    has = by_node[node].file_bytes.get(f"{prefix}{slot}{SUFFIX}", 0)
                    # What has the size of this save is written again, when nothing else is left as well.
                    is_enough = has >= HEADER_BYTES + part.num_bytes - GROWTH_BYTES
                    missing[node] += 0 if is_enough else part.num_bytes - has
        return [
            Shortage(node=node, free_bytes=peer.free_bytes, missing_bytes=missing[node])
            for node, peer in by_node.items()
            if missing[node] > peer.free_bytes
        ]

    def _sweep(self, shortages: Sequence[Shortage]) -> list[str]:
        """Let the keeper of this node delete what jobs that have ended have left, if the node is short of room."""
        node = self._worker.place.node
        is_first_here = next(rank for rank, peer in enumerate(self._peers) if peer.node == node) == self._rank
        if not is_first_here or all(one.node != node for one in shortages):
            return []
        swept: list[str] = self._worker.ask_keeper({"do": "sweep"})["swept"]
        return swept

    def _targets_by_rank(self) -> dict[int, list[Peer]]:
        """By rank, peers on the nodes that may hold its copies; the first ``copies`` of them do."""
        by_node = {peer.node: peer for peer in reversed(self._peers)}
        parts = self._parts()
        free = {node: peer.room_bytes for node, peer in by_node.items()}
        for part in parts:
            free[part.node] -= len(SLOTS) * part.num_bytes
        places = place_copies(parts, free, self._rules.copies)
        return {rank: [by_node[node] for node in nodes] for rank, nodes in places.items()}

    def _parts(self) -> list[Part]:
        return [Part(rank=r, node=peer.node, num_bytes=peer.num_bytes) for r, peer in enumerate(self._peers)]

    def leave_if_due(self) -> None:
        """End this process, as all ranks do, if it was agreed on: the save of the latest step is committed first.

        Call it where the script has done all that belongs to a step.

        Collectives: one all_reduce of a number, if it is due.
        """
        if self._leaving is None:
            return
        self.wait()
        (minus_done,) = self._agree(-self._done_step)
        self._say("leave", step=self._worker.step, committed=-minus_done, reason=self._leaving)
        self._worker.leave()


def _copy_prefix(peer: Peer) -> str:
    return f"from-{peer.name}-"
