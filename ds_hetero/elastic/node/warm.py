"""Warm server of a node: has imported the frameworks, and forks a worker whenever a `client` asks.

    python -m ds_hetero.elastic.node.warm SOCKET

A worker is ready 8 CPU seconds sooner than one that imports for itself. The server never touches a GPU: CUDA cannot be
used in a process that was forked after it began.
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
_FORK_TIMEOUT_S = 5.0


class WarmServer:
    """Forks workers and tells their clients how they end."""

    def __init__(self, path: str) -> None:
        self._clients: dict[int, socket.socket] = {}  # by process id of the worker
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
        """Serve until the process is ended."""
        while True:
            ready, _, _ = select.select([self._listener, *self._clients.values()], [], [], _POLL_S)
            for one in ready:
                if one is self._listener:
                    self._accept()
                else:
                    self._pass_on(one)
            self._reap()

    def _accept(self) -> None:
        streams: list[int] = []
        try:
            client, _ = self._listener.accept()
            client.settimeout(_FORK_TIMEOUT_S)
            expect_own_peer(client)
            raw, ancillary, _, _ = client.recvmsg(NUMBER.size, socket.CMSG_LEN(2 * NUMBER.size))
            for _, _, descriptors in ancillary:
                streams = list(array.array("i", descriptors))
            (size,) = NUMBER.unpack(raw)
            request = b""
            while len(request) < size:
                part = client.recv(size - len(request))
                if not part:
                    raise OSError("the client has ended")
                request += part
            wanted = json.loads(request)
            worker = os.fork()
            if worker == 0:
                self._work(client, wanted, streams)
            self._clients[worker] = client
            _show_first_life(worker, wanted["environment"])
            client.sendall(NUMBER.pack(worker))
        except (OSError, ValueError, KeyError, RecursionError, struct.error):
            pass  # a client that was killed amid its request
        finally:
            for stream in streams:
                os.close(stream)

    def _work(self, client: socket.socket, wanted: Message, streams: list[int]) -> NoReturn:
        """In the fork: become the worker."""
        code = 1
        try:
            end_with_parent()
            for other in (self._listener, client, *self._clients.values()):
                other.close()
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.clear()
            os.environ.update(wanted["environment"])
            os.chdir(wanted["folder"])
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            gc.unfreeze()
            code = _run(wanted["arguments"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _pass_on(self, client: socket.socket) -> None:
        """Give a worker the signal that its client was sent; kill it where the client is gone."""
        worker = next(pid for pid, one in self._clients.items() if one is client)
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
    """Write the first sign of life of a worker, who may be stopped before it can."""
    place = NodePlace.of_environment(environment)
    if place is not None and all(name in environment for name in (AGENT, ROUND, "LOCAL_RANK")):
        name = f"{environment[AGENT]}-{environment['LOCAL_RANK']}"
        with contextlib.suppress(OSError):  # the node's folder is gone, and so is the node
            place.show_life(name, worker, int(environment[ROUND]), has_stepped=False)


def _run(arguments: list[str]) -> int:
    """Run ``-m MODULE ARGUMENTS`` as Python does; return the exit code."""
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
    """Import what workers need: what `deepspeed.initialize` imports late takes most of its time."""
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
        with contextlib.suppress(ImportError):  # another release has it elsewhere; workers import it themselves
            importlib.import_module(late)


def main() -> None:
    """Import, then serve; workers start by themselves until it is ready."""
    end_with_parent()
    begin_s = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import_frameworks()
    gc.collect()
    gc.freeze()
    server = WarmServer(sys.argv[1])
    print(f"ds_hetero: warm server ready after {time.monotonic() - begin_s:.1f} s", file=sys.stderr, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
