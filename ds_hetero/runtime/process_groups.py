"""Make process groups and connect their ranks early, before a step depends on them.

NCCL does three things late unless a call makes them happen early, and each blocks the calling thread.

* **A communicator** is made at the first call on its group, if ``init_process_group`` got no ``device_id``. All ranks
  of the group have to make that call: torch calls anything else undefined (docstring of ``batch_isend_irecv``). So
  `ProcessGroups.of` lets all ranks of a new group run one all_reduce. With a ``device_id``, as DeepSpeed passes it,
  ``new_group`` itself makes the communicator on all its ranks (torch 2.13, distributed_c10d.py,
  _new_process_group_helper: eager_connect_single_device; ProcessGroupNCCL::pointToPoint then takes that one). The
  all_reduce is run nevertheless: by it NCCL connects the ranks for reductions, which also blocks, and a group that does
  not work fails at once. In a group that only carries messages, this costs the buffers of a ring; the self-test's line
  "memory of a communicator" shows how many bytes. Groups for the colours of a ring save them (``connects=False``):
  their first call is an all-to-all of nothing, which makes the communicator and connects nobody.
* **A connection** of two ranks is made at their first message, one for each direction and communicator. Inside
  ``ncclGroupEnd`` the host waits until the peer makes the matching call (NCCL 2.30, transport.cc,
  ncclTransportP2pSetup; NVIDIA/nccl#783 says the same), even if other streams could run. A stage that posted the
  receive of a gradient before its first forward would wait for ever, since the gradient depends on that forward. So
  `Connections.make` sends one element in each direction that will be used, in one order on all ranks. An all-to-all
  consists of messages, and needs connections as well; other collectives connect all their ranks at once.
* **Buffers** of a connection are allocated when it is made, so only pairs that will be used are connected.

NCCL's kernels take their turn among those of attention. A message of a ring is ready together with the attention of its
step, whose many blocks would fill the GPU first, and the message would run after them. So groups that carry messages
beside attention launch their kernels on streams of high priority (``overlaps=True``): the message gets the SMs that the
next blocks to end leave. That changes no result. How much of a message it hides was never measured; the section
"overlap" of `benchmarks.first_gpu` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import backend_of, message_device
from ds_hetero.runtime.collectives import timeout_of_job
from ds_hetero.runtime.peers.watch import waiting_for_peers

Pair = tuple[int, int]
"""Global ranks of a sender and of its receiver."""


class Connections:
    """The pairs of ranks of a group that have been connected by a first message."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._connected_pairs: set[Pair] = set()

    def make(self, pairs: Collection[Pair]) -> None:
        """Connect the ``pairs`` that are not connected yet.

        Caller: every rank in one of ``pairs``, with the same pairs; all ranks make their blocking calls in one order.
        Collectives: one batch of messages of one element, a send or receive for each new pair of this rank.
        """
        pairs_of_two = {(sender, receiver) for sender, receiver in pairs if sender != receiver}
        new_pairs = sorted(pairs_of_two - self._connected_pairs)
        self._connected_pairs.update(new_pairs)
        rank = dist.get_rank()
        messages = []
        for sender, receiver in new_pairs:
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
    """Makes process groups when they are first needed, and returns the same groups for later plans.

    Every rank of the world must call `of` for the same groups in the same order.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
        self._connections: dict[ProcessGroup, Connections] = {}

    def of(
        self, ranks: Sequence[int], purpose: str = "", *, connects: bool = True, overlaps: bool = False
    ) -> ProcessGroup:
        """Return the group of ``ranks``, in ascending order; the first call makes it and uses it once.

        Args:
            purpose: distinguishes groups of the same ranks, whose messages must not wait for each other.
            connects: connect the ranks for reductions; False for a group that only carries messages.
            overlaps: messages of the group travel while attention is computed, and go first. A group that exists
                keeps its streams.

        Caller: every rank of the world, members or not.
        Collectives: the first time one new_group, and among ``ranks`` one all_reduce of one element, or one
            all_to_all_single of none.
        """
        key = tuple(sorted(ranks)), purpose
        if key not in self._groups:
            options = _high_priority() if overlaps else {}
            group = dist.new_group(list(key[0]), timeout=timeout_of_job(), **options)
            self._groups[key] = group
            if dist.get_rank() in key[0]:
                with waiting_for_peers("making a process group"):
                    _use_once(group, connects=connects)
        return self._groups[key]

    def all_groups(self) -> list[tuple[tuple[int, ...], str, ProcessGroup]]:
        """Return (ranks, purpose, group) of all groups, in the order in which every rank made them."""
        return [(ranks, purpose, group) for (ranks, purpose), group in self._groups.items()]

    def connections_of(self, group: ProcessGroup) -> Connections:
        """Return the connections of any ``group``, also one that was not made here."""
        return self._connections.setdefault(group, Connections(group))

    def close(self) -> None:
        """Destroy all groups; replicas that use them cannot be used afterwards."""
        if dist.is_initialized():
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups.clear()
        self._connections.clear()


def _high_priority() -> dict[str, Any]:
    """Return the arguments of ``new_group`` for streams of high priority; {} if the job's backend has none."""
    if backend_of() != "nccl":
        return {}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # torch warns where this differs from the argument ``timeout`` (distributed_c10d.py, _new_process_group_helper).
    options._timeout = timeout_of_job()
    return {"pg_options": options}


def _use_once(group: ProcessGroup, *, connects: bool) -> None:
    """Make the first call on a group, see the module."""
    device = message_device(group)
    if connects:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return
    nothing, no_splits = torch.empty(0, device=device), [0] * dist.get_world_size(group)
    dist.all_to_all_single(torch.empty_like(nothing), nothing, no_splits, no_splits, group=group)
