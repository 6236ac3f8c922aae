"""Store of a round: a key-value store of torch that listens at one address of this machine."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil  # type: ignore[import-untyped]  # a dependency of DeepSpeed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousClosedError

STORE_TIMEOUT = timedelta(seconds=30)


def store_at(address: str) -> TCPStore:
    """Create a store that listens at one address only. A plain `TCPStore` listens at all addresses of the machine.

    Raises:
        RendezvousClosedError: the address does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise RendezvousClosedError(
            f"the store of the job cannot listen at {address}: {error}. Give this node an address of its own "
            "(--listen; --local-addr under torchrun)."
        ) from error
    with listener:  # the store gets a duplicate of the descriptor, and closes that itself
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            use_libuv=True,
            master_listen_fd=os.dup(listener.fileno()),
        )


def interface_of(address: str) -> str | None:
    """Return the network interface with an address; None if there is none, as for 0.0.0.0."""
    try:
        numeric = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # IPv6 addresses end with their scope: fe80::1%eth0.
        if any(entry.address.partition("%")[0] == numeric for entry in addresses):
            return str(name)
    return None
