"""Device memory that a communicator takes: when it is made and first used, by large sums, and by messages of all pairs.

torch counts none of what NCCL allocates, so what a device has in use is looked at, less what torch has reserved. The
cost model counts these bytes by formulas that no device has confirmed (`ds_hetero.cost.terms.communicators`): both
stand in one line, for information.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost.terms.communicators import Channels, reads_peers
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session

_NAME = "memory of a communicator"
_MIB = 2**20
_LARGE_BYTES = 64 * _MIB  # NCCL sums as much by its ring; one element goes by its tree, which has other buffers


class _Taken(NamedTuple):
    """Bytes that one communicator takes on a card, by what they are taken for."""

    card: str  # by which ranks that share one are told
    when_made: float
    by_sums: float
    by_messages: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.when_made + self.by_sums + self.by_messages

    def of_ranks(self, count: int) -> _Taken:
        """The share of each of ``count`` ranks on the card."""
        return self._replace(**{name: getattr(self, name) / count for name in self._fields[1:]})


def check_communicator_memory(session: Session) -> Iterator[Line]:
    """One line, of the rank where it takes most."""
    if session.size == 1 or not session.is_on_gpu:
        reason = "one process has nobody to connect to" if session.size == 1 else "not measured on CPUs"
        yield Line(_NAME, "skip", reason)
        return
    with session.watch.call(_NAME):
        taken = _measure(session)
        by_rank = on_all_ranks(lambda: taken)
    yield Line(_NAME, "info", _text(by_rank, session))


def _measure(session: Session) -> _Taken:
    """Make a communicator of all ranks and let it allocate, step by step."""
    ranks = tuple(range(session.size))
    large = torch.zeros(_LARGE_BYTES // 4, device=session.device)
    before = _used_by_others_than_torch(session.device)
    group = session.groups.of(ranks, _NAME)
    made = _used_by_others_than_torch(session.device)
    dist.all_reduce(large, group=group)
    summed = _used_by_others_than_torch(session.device)
    session.groups.connections_of(group).make(tuple(permutations(ranks, 2)))
    connected = _used_by_others_than_torch(session.device)
    return _Taken(_card_of(session.device), made - before, summed - made, connected - summed)


def _used_by_others_than_torch(device: torch.device) -> float:
    """Bytes in use on the device, once all ranks are here: others of them may share it."""
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used = float(total - free - torch.cuda.memory_reserved(device))
    dist.barrier(device_ids=[device.index])
    return used


def _card_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _text(by_rank: Sequence[_Taken], session: Session) -> str:
    """The verdict of all ranks, the same on each."""
    num_ranks = Counter(taken.card for taken in by_rank)
    shares = [taken.of_ranks(num_ranks[taken.card]) for taken in by_rank]
    rank = max(range(len(shares)), key=lambda r: shares[r].total)
    most = shares[rank]
    text = (
        f"{most.total / _MIB:,.0f} MiB on rank {rank}: {most.when_made / _MIB:,.0f} when made and first used, "
        f"{most.by_sums / _MIB:,.0f} by large sums, {most.by_messages / _MIB:,.0f} by messages of all pairs"
    )
    counted = counted_bytes(torch.cuda.get_device_name(session.device), session.size)
    if len(session.nodes) > 1 or counted is None:
        return text
    return f"{text}; the cost model counts {counted / _MIB:,.0f}"


def counted_bytes(card: str, num_ranks: int) -> float | None:
    """What the cost model counts for a communicator on one node, with collectives and messages between all ranks.

    It counts the channels between such cards; ranks that share one may have fewer.

    Args:
        card: name, as torch gives it; None is returned where the catalogue does not have it, and of cards that do not
            read each other's memory, whose buffers are the host's.
    """
    try:
        cluster = cluster_from_dict(read_notation(card.removeprefix("NVIDIA ")).content)
    except HeteroError:
        return None
    if not reads_peers(cluster.devices[0]):
        return None
    channels = Channels.inside(cluster.nodes[0])
    return channels.collective_bytes(num_ranks) + channels.message_bytes(num_ranks - 1)
