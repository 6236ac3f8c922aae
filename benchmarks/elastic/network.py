"""A network namespace for each emulated node, and a bridge between them whose ports can be cut.

It needs root and Linux's ``unshare``, ``nsenter``, ``ip`` and ``bridge``. The machine's own network is not touched: the
bridge is in a namespace, too.

    python -m benchmarks.elastic.network SOCKET PID     a fork server in the namespace of a process
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ds_hetero.elastic.node import client
from ds_hetero.elastic.node.fork_server import ForkServer

_CLONE_NEWNET = 0x40000000
_TOOLS = ("unshare", "nsenter", "ip", "bridge")


class Network:
    """A bridge with a port for each node.

    Args:
        num_nodes: number of nodes.
    """

    def __init__(self, num_nodes: int) -> None:
        self._holders = [_hold_namespace() for _ in range(num_nodes + 1)]
        try:
            self._on_hub("ip", "link", "add", "hub", "type", "bridge")
            self._on_hub("ip", "link", "set", "hub", "up")
            for number in range(num_nodes):
                self._connect(number)
        except BaseException:
            self.end()
            raise

    def _connect(self, number: int) -> None:
        """Connect a node's namespace with the bridge."""
        port, node = f"port{number}", self.prefix(number)
        peer = ["peer", "name", "eth0", "netns", str(self._holders[number + 1].pid)]
        self._on_hub("ip", "link", "add", port, "type", "veth", *peer)
        self._on_hub("ip", "link", "set", port, "master", "hub", "up")
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "address", "add", f"{address_of(number)}/24", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
        ):
            _run([*node, *command])

    def prefix(self, number: int) -> list[str]:
        """Return the words before a command that run it on a node."""
        return ["nsenter", "--net", f"--target={self._holders[number + 1].pid}"]

    def fork_warm_server(self, number: int, origin: Path, path: Path) -> subprocess.Popen[bytes]:
        """Fork a fork server into the namespace of a node, from a server that has imported the frameworks.

        Args:
            origin: socket of the server to fork.
            path: of the new server's socket.

        Returns:
            A process; the new server ends with it.
        """
        asks = [sys.executable, "-S", "-E", client.__file__, str(origin), "--", "-m", "benchmarks.elastic.network"]
        return subprocess.Popen([*asks, str(path), str(self._holders[number + 1].pid)])

    def cut(self, number: int) -> None:
        """Drop all packets from and to a node; neither side gets an error."""
        self._on_hub("bridge", "link", "set", "dev", f"port{number}", "state", "0")

    def mend(self, number: int) -> None:
        """Let packets from and to a node through again."""
        self._on_hub("bridge", "link", "set", "dev", f"port{number}", "state", "3")

    def _on_hub(self, *command: str) -> None:
        _run(["nsenter", "--net", f"--target={self._holders[0].pid}", *command])

    def end(self) -> None:
        """End the processes that keep the namespaces; the kernel deletes these with the last process inside."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


def address_of(number: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{number + 1}"


def _hold_namespace() -> subprocess.Popen[bytes]:
    """Start a process in a new namespace, which exists as long as the process."""
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]  # which ends with this process
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        holder.wait()
        raise OSError("no network namespace can be made here")
    return holder


def _run(command: list[str]) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise OSError(f"{' '.join(command)}: {completed.stderr.strip()}")


@contextlib.contextmanager
def network_of(num_nodes: int) -> Iterator[Network]:
    """Yield a network, and delete it.

    Raises:
        OSError: namespaces or a tool are missing.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise OSError(f"{', '.join(missing)} is not installed")
    network = Network(num_nodes)
    try:
        yield network
    finally:
        network.end()


def main() -> NoReturn:
    """Enter the namespace and serve, in a process that a fork server has forked with all of its imports."""
    path, pid = sys.argv[1:]
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    gc.freeze()
    ForkServer(path).serve()


if __name__ == "__main__":
    main()
