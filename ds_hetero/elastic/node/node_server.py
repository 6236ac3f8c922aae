"""Node server: the process of a node that serves segments in shared memory, and the rendezvous of the agents.

    python -m ds_hetero.elastic.node.node_server --job J --node N --host 127.0.0.1 --port 0 [--rules JSON]

A segment is a file with one rank's part of a save. The server needs no torch and outlives the workers. If it is
killed, the next server of the node finds the same files. A connection must show the job's token first (`admission`,
`wire`) and then sends one request after the other. The server neither executes nor unpickles the data that it stores.

    request           action of ``do_...``
    list              send the complete segments of this node, and the free bytes
    get NAME          send a segment
    put NAME          store a copy; the copy is valid once its HMAC has been checked
    free KEPT         delete segments that are older than the save KEPT
    sweep             delete the saves of ended jobs, because memory is short
    meet, attach      serve an agent for as long as its connection lasts, see `rounds`
    newcomers         send the agents that wait while a round runs
    demand            set the smallest number of agents, and the memory limit
    come              redirect agents that wait for a first round to another node server
    status            send the state of this node server, with the latest events
    event             record an event for the status
    end               end the node server
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import logging
import mmap
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ds_hetero.common.private_files import open_file
from ds_hetero.elastic.node.admission import Admission
from ds_hetero.elastic.node.leftovers import lock_as_alive, sweep
from ds_hetero.elastic.node.messages import Tell
from ds_hetero.elastic.node.node_server_requests import REQUEST_TIMEOUT_S, ask
from ds_hetero.elastic.node.place import NodePlace, is_full, token_of
from ds_hetero.elastic.node.rounds import RoundRules, Rounds
from ds_hetero.elastic.node.split_brain import SplitBrainResolver
from ds_hetero.elastic.node.wire import Message, Wire, WireError
from ds_hetero.elastic.segments import (
    HEADER_BYTES,
    SUFFIX,
    Header,
    Save,
    SegmentFile,
    is_genuine,
    opened,
    parse_header,
    read_header,
)

SILENCE_S = 6.0  # time after which a silent agent counts as lost; agents send a heartbeat every second
_KEPT_EVENTS = 50  # latest events that are kept, and sent by `do_status`; older ones nobody can ask for
_SPARES_PERIOD_S = 5.0  # between two attempts to reserve pages for small files
logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"[A-Za-z0-9_.-]{1,200}\.seg")


class NodeServer:
    """State of the process; each connection has a thread of its own.

    Args:
        place: the node.
        token: of the job.
        rules: conditions under which a round of the rendezvous may begin.
        memory_bytes: limit of the memory of all segments on the node; None: all free memory.
    """

    def __init__(self, place: NodePlace, token: bytes, rules: RoundRules, memory_bytes: int | None = None) -> None:
        self.place = place
        self.token = token
        self.memory_bytes = memory_bytes
        self.rounds = Rounds(replace(rules, searches=True))
        self.events: deque[Message] = deque(maxlen=_KEPT_EVENTS)
        self.has_ended = threading.Event()
        self._lock = threading.RLock()  # of the rounds

        def ask_node_server(address: tuple[str, int], message: Message, timeout_s: float) -> Message:
            return ask(address, token, message, timeout_s)

        self._split_brain = SplitBrainResolver(place, self.rounds, self._lock, ask_node_server)
        self._files: dict[str, tuple[threading.Lock, SegmentFile]] = {}  # copies that were stored here, by name

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until `has_ended`."""
        listener.settimeout(0.2)
        threading.Thread(target=self._split_brain.run, args=(self.has_ended,), daemon=True).start()
        admission = Admission(self.token, REQUEST_TIMEOUT_S, self._answer)
        stocked_s = time.monotonic()
        while not self.has_ended.is_set():
            with self._lock:
                self.rounds.tick(time.monotonic())
            if time.monotonic() - stocked_s > _SPARES_PERIOD_S:
                with contextlib.suppress(OSError):  # the job's folder was deleted
                    self.place.stock_spares()
                stocked_s = time.monotonic()
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # this process has no free file descriptor
                self.has_ended.wait(0.1)
                continue
            admission.admit(connected)

    def _answer(self, wire: Wire) -> None:
        """Answer the requests of one connection; runs in a thread of its own."""
        action: Callable[[Wire, Message], None] | None = None
        try:
            while action != self.do_meet:  # do_meet returns when the connection has ended
                request = wire.receive()
                action = getattr(self, f"do_{request.get('do')}", None)
                if action is None:
                    raise WireError(f"there is no request {request.get('do')!r}")
                action(wire, request)
        except TimeoutError:
            pass  # the connection is idle; a client that still needs one connects again
        except (OSError, ValueError, KeyError, TypeError) as error:
            with contextlib.suppress(OSError):
                wire.send({"error": str(error)})
        except Exception:
            logger.exception("a request could not be answered")
        finally:
            wire.close()

    def do_list(self, wire: Wire, _: Message) -> None:
        """Send the headers of the complete segments, the free bytes, and the sizes of all segment files."""
        segments = [{"name": path.name, **asdict(header)} for path, header in self._segments()]
        wire.send({"segments": segments, "free_bytes": self.free_bytes(), "file_bytes": self._file_bytes()})

    def _file_bytes(self) -> dict[str, int]:
        """Sizes of all segment files, also of dirty ones: a save that reuses a file needs no new pages."""
        sizes = {}
        for path in self.place.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another thread has just deleted it
                sizes[path.name] = path.stat().st_size
        return sizes

    def _segments(self) -> list[tuple[Path, Header]]:
        """Return the complete segments of this node, with their headers."""
        segments = []
        for path in sorted(self.place.folder.glob(f"*{SUFFIX}")):
            header = read_header(path)
            if header is not None:
                segments.append((path, header))
        return segments

    def free_bytes(self) -> int:
        """Return how many bytes new segments may take."""
        free = shutil.disk_usage(self.place.folder).free
        if self.memory_bytes is None:
            return free
        return max(0, min(free, self.memory_bytes - sum(self._file_bytes().values())))

    def do_get(self, wire: Wire, request: Message) -> None:
        """Send the segment that the request names: its header, then its content."""
        path = self._path(request["name"])
        header = read_header(path)
        if header is None:
            raise WireError(f"{path.name} is not a complete segment")
        wire.send({"header": header.to_bytes().hex()})
        with (
            opened(path) as descriptor,
            mmap.mmap(descriptor, header.file_bytes, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped)[HEADER_BYTES : header.file_bytes] as content,
        ):
            wire.send_content(content)

    def do_put(self, wire: Wire, request: Message) -> None:
        """Store a copy of a segment. The header comes first; the copy is valid if it has the header's HMAC."""
        path = self._path(request["name"])
        header = parse_header(bytes.fromhex(request["header"]))
        if header is None or header.job != self.place.job:
            raise WireError(f"the header of {path.name} is malformed, or of another job than {self.place.job}")
        lock, file = self._files.setdefault(path.name, (threading.Lock(), SegmentFile(path)))
        with lock:
            file_bytes = path.stat().st_size if path.exists() else 0
            if header.file_bytes - file_bytes > self.free_bytes():
                raise WireError(self._no_room_text(header))
            if not path.exists():
                file.close()  # its mapping, if any, is that of a deleted file
            try:
                content = file.begin(header.end_bytes)
            except OSError as error:
                if is_full(error):
                    raise WireError(self._no_room_text(header)) from None
                raise
            try:
                wire.send({"ready": True})
                wire.receive_into(content)
                if not is_genuine(header, content, self.token):
                    raise WireError("the copy does not have the HMAC of its header: it is damaged, or not of this job")
            finally:
                content.release()
            file.finish(header)
        wire.send({"stored": True})
        # CPython keeps thousands of freed tuples for reuse, more after each copy; a full collection gives them back.
        gc.collect()

    def _no_room_text(self, header: Header) -> str:
        """Return the refusal of a copy that does not fit into the free memory."""
        return f"{header.file_bytes:,} bytes do not fit into {self.free_bytes():,} that are free"

    def do_free(self, wire: Wire, request: Message) -> None:
        """Delete the segments that are older than the save "kept" of the request; all segments if there is none.

        Segments whose names begin with one of "in_use" stay, because the present world writes them again.
        """
        kept_save = None if request.get("kept") is None else Save(**request["kept"])
        in_use = tuple(request.get("in_use", ()))
        for path in sorted(self.place.folder.glob(f"*{SUFFIX}")):
            header = read_header(path)
            is_old = kept_save is None or (header is not None and header.save < kept_save)
            is_in_use = bool(in_use) and path.name.startswith(in_use)
            if is_old and not is_in_use:
                lock, file = self._files.setdefault(path.name, (threading.Lock(), SegmentFile(path)))
                with lock:
                    path.unlink(missing_ok=True)
                    file.close()
        wire.send({"freed": True})

    def do_sweep(self, wire: Wire, _: Message) -> None:
        """Delete the saves of this user's ended jobs, although they could still be resumed; list what was deleted."""
        swept = sweep(self.place, with_saves=True)
        texts = [f"job {leftover.job}, node {leftover.node}: {leftover.num_bytes:,} bytes" for leftover in swept]
        wire.send({"swept": texts})

    def do_newcomers(self, wire: Wire, _: Message) -> None:
        """Send the names of the agents that wait to join, and the models of their GPUs."""
        with self._lock:
            wire.send({"newcomers": self.rounds.newcomers, "cards": self.rounds.newcomer_cards})

    def do_demand(self, wire: Wire, request: Message) -> None:
        """Apply settings of the job's section: the smallest number of agents, and the memory limit."""
        if request.get("least") is not None:
            with self._lock:
                self.rounds.demand(int(request["least"]), time.monotonic())
        if request.get("memory_bytes") is not None:
            self.memory_bytes = int(request["memory_bytes"])
        wire.send({"taken": True})

    def do_event(self, wire: Wire, request: Message) -> None:
        """Record an event for `do_status`."""
        self.events.append(request["event"])
        wire.send({"noted": True})

    def do_status(self, wire: Wire, _: Message) -> None:
        """Send the state of the rounds, the segments and the latest events."""
        with self._lock:
            rounds = self.rounds
            status = {
                "job": self.place.job,
                "node": self.place.node,
                "node_server": self.place.address(),
                "round": rounds.number,
                "members": rounds.members,
                "is_broken": rounds.is_broken,
                "newcomers": rounds.newcomers,
                "closed": rounds.closed,
                "num_here": rounds.epoch[2],
                "is_waited_for": rounds.is_waited_for,
            }
        segments = [{"name": path.name, **asdict(header)} for path, header in self._segments()]
        wire.send({**status, "free_bytes": self.free_bytes(), "segments": segments, "events": list(self.events)})

    def do_come(self, wire: Wire, request: Message) -> None:
        """Redirect agents that wait here for a first round to the node server that serves the job's rounds."""
        with self._lock:
            if not self.rounds.number:
                self.rounds.redirect(list(request["to"]))
        wire.send({"taken": True})

    def do_end(self, wire: Wire, _: Message) -> None:
        """End the node server. Segments stay in memory."""
        wire.send({"ended": True})
        self.has_ended.set()

    def do_meet(self, wire: Wire, request: Message) -> None:
        """Serve an agent for as long as its connection lasts."""
        sending = threading.Lock()

        def tell(message: Message) -> None:
            """Send the agent a message."""
            # An error means that the connection is lost; the `receive` below fails, too, and drops the agent.
            with sending, contextlib.suppress(OSError):
                wire.send(message)

        agent = str(request["agent"])
        is_done = False
        try:
            while request.get("do") != "leave":
                self._apply_message(agent, request, tell)
                wire.timeout_s = SILENCE_S
                request = wire.receive()
            is_done = bool(request.get("is_done"))
        except OSError:
            return  # the connection is lost
        finally:
            with self._lock:
                self.rounds.drop(agent, tell, time.monotonic(), is_done=is_done)

    def _apply_message(self, agent: str, request: Message, tell: Tell) -> None:
        """Pass an agent's message to the state machine."""
        kind = request.get("do")
        now_s = time.monotonic()
        with self._lock:
            if kind == "meet":
                self.rounds.join(agent, request["info"], request["last"], request["round"], tell, now_s)
            elif kind == "attach":
                self.rounds.attach(agent, request["info"], request["round"], tell, now_s)
            elif kind == "store":
                self.rounds.pass_on({"store": request["store"], "number": request["number"]})
            elif kind == "alive":
                tell({"alive": True})

    do_attach = do_meet

    def _path(self, name: object) -> Path:
        """Return the path of a segment. Raises `WireError`: the name could lead to another file."""
        if not isinstance(name, str) or not _SEGMENT.fullmatch(name) or name.startswith("."):
            raise WireError(f"{name!r} is not a valid name of a segment")
        return self.place.folder / name


def main() -> None:
    """Run the server of a node until it is ended."""
    parser = argparse.ArgumentParser(description="server of a node of an elastic job; started by ds_hetero.run")
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rules", default="{}")
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--fresh", action="store_true", help="delete small files of an earlier job of this name")
    options = parser.parse_args()
    place = NodePlace.of(options.job, options.node)
    place.make()
    lock_as_alive(place)
    lock = open_file(place.folder / ".lock", os.O_RDWR | os.O_CREAT)  # never closed: locked until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"a node server of job {place.job} already runs on node {place.node}")
    if options.fresh:
        place.clear()
    listener = socket.create_server((options.host, options.port), backlog=128)
    node_server = NodeServer(place, token_of(place.job), RoundRules(**json.loads(options.rules)), options.memory_bytes)
    signal.signal(signal.SIGTERM, lambda *_: node_server.has_ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host, port = listener.getsockname()[:2]
    try:
        place.write("node_server.json", {"host": host, "port": port, "pid": os.getpid()})
    except OSError as error:
        sys.exit(f"node {place.node} cannot take part in job {place.job}: {error}. Make room there.")
    node_server.serve(listener)


if __name__ == "__main__":
    main()
