"""Start a node's server from the rendezvous handler of an agent, and end it with that agent."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from ds_hetero.elastic.node.leftovers import free_node
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.wire import connect
from ds_hetero.errors import ConfigError

CONNECT_TIMEOUT_S = 3.0
_START_TIMEOUT_S = 30.0  # chosen; a node server imports no torch and starts within a second


def is_served(place: NodePlace) -> bool:
    """Return True if the server of a node runs and has the job's token."""
    address = place.address()
    if address is None:
        return False
    try:
        connect(*address, token_of(place.job), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def start_node_server(
    place: NodePlace, host: str, port: int, rules: str, memory_bytes: int | None = None
) -> subprocess.Popen[bytes]:
    """Start the server of a node, and wait until it listens.

    Raises:
        ConfigError: the node server does not start, such as when another process uses the port.
    """
    command = [sys.executable, "-m", "ds_hetero.elastic.node.node_server", "--job", place.job, "--node", place.node]
    command += ["--host", host, "--port", str(port), "--rules", rules, "--fresh"]
    if memory_bytes is not None:
        command += ["--memory-bytes", str(memory_bytes)]
    process = subprocess.Popen(command, start_new_session=True)
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        if place.address(pid=process.pid) is not None:
            return process
        time.sleep(0.02)
    process.kill()
    raise ConfigError(f"the server of node {place.node} did not start on {host}:{port}; its message is above.")


def end_node_server(node_server: subprocess.Popen[bytes], place: NodePlace, agent: str) -> None:
    """End a node's server with the agent that started it, and free the node's memory if the script has finished."""
    node_server.terminate()
    node_server.wait()
    if place.read(f"done-{agent}.json") is not None:
        free_node(place)


def is_local_address(host: str) -> bool:
    """Return True if an address belongs to this machine."""
    try:
        with socket.create_server((host, 0)):
            return True
    except OSError:
        return False


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it would send to ``host``; no packet is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
