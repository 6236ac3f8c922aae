"""Store of a round: a key-value store of torch that listens at one address of this machine."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil  # type: ignore[import-untyped]  # which DeepSpeed needs
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
)

STORE_TIMEOUT = timedelta(seconds=30)


def store_at(address: str) -> TCPStore:
    """A new store that listens at an address of this machine and at no other, as torch's own does at all of them.

    Raises:
        RendezvousClosedError: the address is not one of this machine.
    """
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise RendezvousClosedError(
            f"the store of the job cannot listen at {address}: {error}. Give this node an address of its own "
            "(--listen; --local-addr under torchrun)."
        ) from error
    with listener:  # the store takes a descriptor of its own, and closes it
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
    """The network interface that has an address; None where none has it, such as for 0.0.0.0."""
    try:
        numeric = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == numeric for one in addresses):
            return str(name)
    return None
