"""Describe the live ranks to each other before they are timed; make a process group for it if there is none."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from ds_hetero.cluster.names import catalogue_name
from ds_hetero.profiler.cluster_file import RankFacts
from ds_hetero.profiler.device_probes import AttentionProbe
from ds_hetero.runtime.collectives import on_all_ranks


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Make and destroy the default process group if there is none and the launcher's variables are set."""
    if dist.is_initialized() or "RANK" not in os.environ:
        yield
        return
    if device.type != "cpu":
        torch.cuda.set_device(device)
    # With device_id all ranks make NCCL's communicator here. Otherwise the first call would make it, and only some of
    # the ranks take part in a round of pairs.
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl", device_id=None if device.type == "cpu" else device
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def current_rank() -> int:
    """Return this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def describe_ranks(device: torch.device, dtype: torch.dtype, attention: AttentionProbe) -> list[RankFacts]:
    """Return the descriptions of all ranks. The memory of a CPU rank is an equal share of its host's memory.

    Caller: every rank.
    Collectives: one `on_all_ranks`.
    """
    ranks = on_all_ranks(lambda: _describe(device, dtype, attention))
    cpu_ranks_on_host = Counter(rank.host for rank in ranks if rank.device == "CPU")

    def with_memory_share(rank: RankFacts) -> RankFacts:
        """Divide a host's memory by the number of its CPU ranks."""
        if rank.device != "CPU":
            return rank
        return replace(rank, memory_bytes=rank.memory_bytes // cpu_ranks_on_host[rank.host])

    return list(map(with_memory_share, ranks))


def _describe(device: torch.device, dtype: torch.dtype, attention: AttentionProbe) -> RankFacts:
    """Return this rank's host, device, memory and software, for `describe_ranks`."""
    if device.type == "cpu":
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory
        name = catalogue_name(properties.name, memory) or properties.name
    return RankFacts(
        node=f"{socket.gethostname()} {_network_namespace()}",
        host=socket.gethostname(),
        device=name,
        memory_bytes=memory,
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        attention=attention.name,
        head_dim=attention.head_dim,
        softcap=attention.softcap,
    )


def _network_namespace() -> str:
    """Return the id of this process's network namespace; empty outside Linux.

    Containers of one host have different namespaces, and talk over the network like different hosts.
    """
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
