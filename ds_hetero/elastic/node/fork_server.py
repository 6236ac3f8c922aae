"""Fork server of a node: imports the frameworks once, and forks a worker for each `client`.

    python -m ds_hetero.elastic.node.fork_server SOCKET

    client -> server    length of the request, with the descriptors of stdout and stderr; the request as JSON
    server -> client    process id of the worker, later its exit code
    client -> server    numbers of signals for the worker; the end of the connection kills it

A forked worker is ready 8 CPU seconds sooner than one that imports the frameworks itself. The server never uses a GPU,
because CUDA cannot be used in a fork of a process that has initialized it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

from ds_hetero.elastic.node.client import NUMBER, expect_own_peer
from ds_hetero.elastic.node.place import AGENT, ROUND, NodePlace
from ds_hetero.elastic.node.processes import end_with_parent
from ds_hetero.elastic.node.wire import Message

_POLL_S = 0.05
_FORK_TIMEOUT_S = 5.0  # chosen; a client sends its request at once


class ForkServer:
    """Forks workers, and sends their clients the exit codes."""

    def __init__(self, path: str) -> None:
        self._clients: dict[int, socket.socket] = {}  # by process id of the worker
        # Bound under another name and renamed, so that a client never finds a socket on which nobody listens.
        draft = f"{path}.{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)
        try:
            self._listener.bind(draft)
        finally:
            os.umask(mask)
        self._listener.listen(64)
        os.replace(draft, path)

    def serve(self) -> NoReturn:
        """Serve until the process is killed."""
        while True:
            ready, _, _ = select.select([self._listener, *self._clients.values()], [], [], _POLL_S)
            for connection in ready:
                if connection is self._listener:
                    self._accept()
                else:
                    self._forward_signal(connection)
            self._reap()

    def _accept(self) -> None:
        """Receive a client's request, and fork its worker."""
        streams: list[int] = []
        try:
            client, _ = self._listener.accept()
            client.settimeout(_FORK_TIMEOUT_S)
            expect_own_peer(client)
            raw, ancillary, _, _ = client.recvmsg(NUMBER.size, socket.CMSG_LEN(2 * NUMBER.size))
            for _, _, descriptors in ancillary:
                streams = list(array.array("i", descriptors))
            (size,) = NUMBER.unpack(raw)
            text = b""
            while len(text) < size:
                part = client.recv(size - len(text))
                if not part:
                    raise OSError("the client has ended")
                text += part
            request = json.loads(text)
            worker = os.fork()
            if worker == 0:
                self._run_worker(client, request, streams)
            self._clients[worker] = client
            _show_first_life(worker, request["environment"])
            client.sendall(NUMBER.pack(worker))
        except (OSError, ValueError, KeyError, RecursionError, struct.error):
            pass  # the client was killed while it sent its request
        finally:
            for stream in streams:
                os.close(stream)

    def _run_worker(self, client: socket.socket, request: Message, streams: list[int]) -> NoReturn:
        """Become the worker; runs in the fork."""
        code = 1
        try:
            end_with_parent()
            for connection in (self._listener, client, *self._clients.values()):
                connection.close()
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["folder"])
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            gc.unfreeze()
            code = _run(request["arguments"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _forward_signal(self, client: socket.socket) -> None:
        """Send a worker the signal that its client has received; kill the worker if the client has ended."""
        worker = next(pid for pid, connection in self._clients.items() if connection is client)
        try:
            raw = client.recv(NUMBER.size)
        except OSError:
            raw = b""
        number = NUMBER.unpack(raw)[0] if len(raw) == NUMBER.size else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)
        if not raw:
            self._clients.pop(worker).close()

    def _reap(self) -> None:
        """Send the clients of ended workers their exit codes."""
        while True:
            try:
                worker, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if worker == 0:
                return
            client = self._clients.pop(worker, None)
            if client is not None:
                with contextlib.suppress(OSError):
                    client.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                client.close()


def _show_first_life(worker: int, environment: dict[str, str]) -> None:
    """Write a worker's first heartbeat for it, because it may be stopped before it can write one itself."""
    place = NodePlace.of_environment(environment)
    if place is not None and all(name in environment for name in (AGENT, ROUND, "LOCAL_RANK")):
        name = f"{environment[AGENT]}-{environment['LOCAL_RANK']}"
        with contextlib.suppress(OSError):  # the job's folder was deleted
            place.show_life(name, worker, int(environment[ROUND]), has_stepped=False)


def _run(arguments: list[str]) -> int:
    """Run ``-m MODULE ARGUMENTS`` as Python does; return the exit code.

    A fork ends by `os._exit`, so the end of the interpreter is done here as Python does it: join the threads, run the
    exit handlers, flush.
    """
    code = 0
    assert arguments[0] == "-m", arguments
    sys.argv = [arguments[1], *arguments[2:]]
    try:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 1
    return code


def import_frameworks() -> None:
    """Import the modules that workers need, including those that `deepspeed.initialize` imports late.

    The late imports are most of the time of `deepspeed.initialize`.
    """
    importlib.import_module("ds_hetero").register().undo()
    for late in (
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.muon.original_muon",
        "torch._inductor.compile_fx",
        "torch.distributed.tensor",
        "torch.utils.tensorboard",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "ds_hetero.job.start",
        "ds_hetero.planner.planning",
        "ds_hetero.elastic.resume",
    ):
        with contextlib.suppress(ImportError):  # other releases have other modules; workers then import by themselves
            importlib.import_module(late)


def main() -> None:
    """Import, then serve. Until the server is ready, clients become workers themselves."""
    end_with_parent()
    begin_s = time.monotonic()
    # Let torch.cuda.is_available() ask NVML: its default asks CUDA, which forks could then not use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import_frameworks()
    # Collections in a worker do not visit, and so do not copy, the pages of imported modules.
    gc.collect()
    gc.freeze()
    server = ForkServer(sys.argv[1])
    print(f"ds_hetero: fork server ready after {time.monotonic() - begin_s:.1f} s", file=sys.stderr, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
