"""Stand-in for a worker, started by torchrun: asks the node's fork server for the worker, or becomes it.

    python -S -E client.py SERVER_SOCKET -- ARGUMENTS_OF_PYTHON

    server answers    the worker is a fork of the server; this process forwards signals and ends with the same code
    no server         this process executes Python with the arguments

It starts in milliseconds and imports only the standard library.
"""

import array
import json
import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("i")  # a length, a signal or an exit code on the socket
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> None:
    """Run the worker as a fork of the server, or in this process."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    path, arguments = sys.argv[1], sys.argv[3:]
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
        expect_own_peer(server)
        _ask(server, arguments)
    except OSError:
        _become_worker(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda received, _: server.sendall(NUMBER.pack(received)))
    _exit_like_worker(_receive_number(server))


def expect_own_peer(connected: socket.socket) -> None:
    """Refuse a peer of another user, who would receive the environment, which contains the job's secret.

    Raises:
        OSError: the peer is a process of another user.
    """
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise OSError(f"the process at the other end of the socket is of user {user}")


def _ask(server: socket.socket, arguments: "list[str]") -> None:
    """Send arguments, environment, working folder, stdout and stderr, and wait for the worker's process id.

    Raises:
        OSError: the server has ended, or cannot start a process.
    """
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    streams = array.array("i", [1, 2])
    server.sendmsg([NUMBER.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(request)
    if _receive_number(server) is None:
        raise OSError("the server has ended")


def _receive_number(server: socket.socket) -> "int | None":
    """Receive a number; None if the server has ended."""
    try:
        raw = server.recv(NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return NUMBER.unpack(raw)[0] if len(raw) == NUMBER.size else None


def _become_worker(arguments: "list[str]") -> None:
    """Replace this process by Python with the worker's arguments."""
    os.execv(sys.executable, [sys.executable, *arguments])


def _exit_like_worker(code: "int | None") -> None:
    """End like the worker: with its exit code, or by the signal ``-code`` that killed it."""
    if code is not None and code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(1 if code is None else code)


if __name__ == "__main__":
    main()
