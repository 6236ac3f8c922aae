"""Process groups that are usable before anything depends on them: made, used once by all, connected pair by pair.

On NCCL three things happen late unless they are asked for early, and each blocks the thread that calls.

* **A communicator** is made at the first call on its group, where ``init_process_group`` was given no ``device_id``.
  That call has to come from all ranks of the group: torch calls anything else undefined (docstring of
  ``batch_isend_irecv``). So `ProcessGroups.of` lets all ranks of a new group use it once. With a ``device_id``, as
  DeepSpeed gives it, ``new_group`` makes the communicator on all its ranks (torch 2.13, distributed_c10d.py,
  _new_process_group_helper: eager_connect_single_device; ProcessGroupNCCL::pointToPoint then takes that one), and the
  call is not needed for it. It is made all the same: by it NCCL connects the ranks for sums, which also blocks, and a
  group that does not work fails at its making. That costs the buffers of a ring where a group carries messages alone;
  the self-test's line "memory of a communicator" says how many bytes they are.
* **A connection** of two ranks is made at their first message, one for each direction and communicator. Inside
  ``ncclGroupEnd`` the host waits there until the peer makes the matching call (NCCL 2.30, transport.cc,
  ncclTransportP2pSetup; so it is said in NVIDIA/nccl#783), whatever streams could run meanwhile. A stage that asks for
  a gradient before its first forward would stand still for ever, as the gradient comes of that forward. So
  `Connections.make` sends one element each way that will be used, in one order on all ranks. An all-to-all is made of
  messages, and needs them, too; collectives of other kinds connect among all their ranks at once.
* **Buffers** of a connection are allocated when it is made, so only what will be used is connected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.collectives import timeout_of_job
from ds_hetero.runtime.peers.watch import waiting_for_peers

Pair = tuple[int, int]
"""Global ranks of a sender and of its receiver."""


class Connections:
    """The pairs of ``group`` whose first message has passed."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._made: set[Pair] = set()

    def make(self, pairs: Collection[Pair]) -> None:
        """Connect those of ``pairs`` that are not yet connected.

        Caller: every rank that is in one of ``pairs``, with the same pairs, in the same order as whatever else blocks.
        Collectives: one batch of messages of one element, a send or receive for each new pair of this rank.
        """
        new = sorted({(sender, receiver) for sender, receiver in pairs if sender != receiver} - self._made)
        self._made.update(new)
        rank = dist.get_rank()
        messages = []
        for sender, receiver in new:
            if rank not in (sender, receiver):
                continue
            post, peer = (dist.isend, receiver) if rank == sender else (dist.irecv, sender)
            element = torch.zeros(1, dtype=torch.uint8, device=message_device(self.group))
            messages.append(dist.P2POp(post, element, peer, self.group))
        if not messages:
            return
        with waiting_for_peers("connecting ranks that will send each other messages"):
            for work in dist.batch_isend_irecv(messages):
                work.wait()


class ProcessGroups:
    """Process groups by their ranks, made when they are first needed and kept for plans to come.

    Every rank of the world must call `of` for the same groups in the same order.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
        self._connections: dict[ProcessGroup, Connections] = {}

    def of(self, ranks: Sequence[int], purpose: str = "") -> ProcessGroup:
        """Return the group of ``ranks``, ascending; made and used once the first time.

        Args:
            purpose: groups of the same ranks that must not wait for each other have different ones.

        Caller: every rank of the world, members or not.
        Collectives: the first time one new_group, and one all_reduce of one element among ``ranks``.
        """
        key = tuple(sorted(ranks)), purpose
        if key not in self._made:
            group = dist.new_group(list(key[0]), timeout=timeout_of_job())
            self._made[key] = group
            if dist.get_rank() in key[0]:
                with waiting_for_peers("making a process group"):
                    dist.all_reduce(torch.zeros(1, device=message_device(group)), group=group)
        return self._made[key]

    def made(self) -> list[tuple[tuple[int, ...], str, ProcessGroup]]:
        """Return ranks, purpose and group of all that were made, in the order in which every rank made them."""
        return [(ranks, purpose, group) for (ranks, purpose), group in self._made.items()]

    def connections_of(self, group: ProcessGroup) -> Connections:
        """Return the connections of ``group``, which may have been made elsewhere; the same on every rank of it."""
        return self._connections.setdefault(group, Connections(group))

    def close(self) -> None:
        """Close all groups; nothing of a replica can be used afterwards."""
        if dist.is_initialized():
            for group in self._made.values():
                dist.destroy_process_group(group)
        self._made.clear()
        self._connections.clear()
