"""Find free ports for the processes of a test or a benchmark."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to sockets that name none (ip_local_port_range, from 32768). One of those may be taken
# by any connection that is opened between the choice of a port and its use, and jobs here open hundreds.
_PORTS = range(20_000, 32_000)
_random = random.SystemRandom()  # tests seed the common one


def free_port() -> int:
    """Return a TCP port of this host on which no process listened a moment ago."""
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not matter
            try:
                probe.bind(("", port))  # as torch's store does: a listener on any address of this host is in its way
            except OSError:
                continue
            return port
