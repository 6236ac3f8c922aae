"""A replica: the ranks over which one sequence is split, and their process groups."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.batch.ring_colours import num_ring_colours, ring_colour
from ds_hetero.errors import ScheduleError
from ds_hetero.runtime.backends import pairs_by_order
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.process_groups import Pair, ProcessGroups
from ds_hetero.runtime.ring_groups import RingGroups
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Group, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """This rank's place in its sequence-parallel replica.

    Attributes:
        plan: of the whole job.
        rank: global rank of this process.
        sp_group: process group of all ranks of the replica, on which the ring sends its messages.
        a2a_group: process group of this rank's all-to-all group; None if the rank is alone in it.
        far_group: another process group of the ranks of ``sp_group``, for messages between nodes, so that no other
            message waits behind them. None if the backend has tags, so that messages do not wait for each other.
        colour_groups: more process groups of the ranks of ``sp_group``, for the colours 1, 2, ... of the ring's
            messages, see `ds_hetero.batch.ring_colours`. Empty if the backend has tags, or all messages can go
            together.
    """

    plan: Plan
    rank: int
    sp_group: ProcessGroup
    a2a_group: ProcessGroup | None
    far_group: ProcessGroup | None = None
    colour_groups: tuple[ProcessGroup, ...] = ()

    @cached_property
    def replica_id(self) -> int:
        """Index of the replica among the plan's pipelines."""
        place = self.plan.place_of(self.rank)
        assert place is not None
        return place[0]

    @cached_property
    def schedule(self) -> Schedule:
        """The replica's schedule, in global ranks."""
        return self.plan.schedules[self.replica_id]

    @property
    def num_replicas(self) -> int:
        """Number of replicas in the job, over which data parallelism runs."""
        return len(self.plan.pipelines)

    @property
    def batch_split(self) -> BatchSplit | None:
        """How the replicas share the samples of an optimizer step; None if all take the same number."""
        return self.plan.batch_split

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the replica, ascending; the order of ``sp_group``."""
        return self.schedule.ranks

    @property
    def sp_size(self) -> int:
        """Number of ranks of the replica."""
        return self.schedule.sp_size

    @property
    def sp_rank(self) -> int:
        """This rank's index in the replica."""
        return self.ranks.index(self.rank)

    @property
    def ring_position(self) -> int:
        """Position in the ring of the group that holds this rank."""
        return self.schedule.ring_position(self.rank)

    @property
    def group(self) -> Group:
        """The all-to-all group that holds this rank."""
        return self.schedule.ring_groups[self.ring_position]

    @cached_property
    def ring_groups(self) -> RingGroups:
        """Process groups of the ring's messages."""
        ring, colour_of_peer = self.schedule.ring_groups, {}
        for position, group in enumerate(ring):
            colour = ring_colour(self.ring_position, position, len(ring))
            colour_of_peer.update(dict.fromkeys(group.ranks, colour))
        return RingGroups(self.sp_group, self.far_group, self.colour_groups, colour_of_peer)


def make_replica(plan: Plan, groups: ProcessGroups | None = None) -> Replica:
    """Compare the plans of all ranks, make the process groups of all replicas, and return this rank's replica.

    Args:
        plan: of replicas that together have every rank of the world once; the same on every rank.
        groups: process groups of earlier plans, to be used again; None: make all groups.

    Caller: every rank of the world, at start and whenever the plan changes.
    Collectives: one `on_all_ranks` with a fingerprint; one `ProcessGroups.of` for every replica, another one if
        messages between its hosts have their own group, one for every colour of its ring but the first, and one for
        every all-to-all group, in the same order on every rank; then one `Connections.make` for every colour of this
        rank's ring, if it has several.

    Raises:
        ScheduleError: the plans differ between ranks, or do not fit the world; on every rank.
        PlanError: the plan has pipelines of several stages; on every rank.
    """
    hosts = _expect_same_plan(plan)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if plan.ranks != tuple(range(world_size)):
        raise ScheduleError(
            f"the schedules hold ranks {list(plan.ranks)}, the job has {world_size} processes; each needs one place. "
            "Plan for this number of ranks, or start as many processes as the plan has."
        )
    groups = ProcessGroups() if groups is None else groups
    replica: Replica | None = None
    # In torch, all ranks of the world make a group together, so each rank also makes the groups of other replicas.
    for schedule in plan.schedules:
        has_ring = schedule.ring_size > 1
        sp_group = groups.of(schedule.ranks, overlaps=has_ring)
        far_group = None
        if _has_far_group([hosts[member] for member in schedule.ranks]):
            far_group = groups.of(schedule.ranks, "between nodes", overlaps=has_ring)
        num_colours = num_ring_colours(schedule) if pairs_by_order() else 1
        colour_groups = tuple(
            groups.of(schedule.ranks, f"ring colour {colour}", connects=False, overlaps=True)
            for colour in range(1, num_colours)
        )
        a2a_groups = [groups.of(g.ranks) if len(g.ranks) > 1 else None for g in schedule.ring_groups]
        if rank in schedule.ranks:
            a2a_group = a2a_groups[schedule.ring_position(rank)]
            replica = Replica(
                plan=plan,
                rank=rank,
                sp_group=sp_group,
                a2a_group=a2a_group,
                far_group=far_group,
                colour_groups=colour_groups,
            )
    assert replica is not None
    if replica.colour_groups:
        _connect_neighbours(replica, groups)
    return replica


def _connect_neighbours(replica: Replica, groups: ProcessGroups) -> None:
    """Connect the ranks of neighbouring groups that share a sub-ring task, both ways, colour by colour.

    Then no first message of a ring blocks a host inside a step, where it would hold up the other colours. Lanes of
    documents may also send between groups that are not neighbours; these connect at their first message.
    """
    ring_size = replica.schedule.ring_size
    for colour, process_group in enumerate((replica.sp_group, *replica.colour_groups)):
        pairs: set[Pair] = set()
        for position in range(ring_size):
            after = (position + 1) % ring_size
            if ring_colour(position, after, ring_size) != colour:
                continue
            for task in replica.schedule.sub_rings:
                one, other = task.owners[position], task.owners[after]
                pairs |= {(one, other), (other, one)}
        groups.connections_of(process_group).make(pairs)


@lru_cache(maxsize=64)
def part_of_replica(replica: Replica, schedule: Schedule) -> Replica:
    """Return the replica with another schedule of the same ranks, whose all-to-alls run over all of them.

    This is for a part of a placement in which other ranks exchange heads than in the replica's own schedule.
    """
    if schedule == replica.schedule:
        return replica
    return replace(replica, plan=Plan.of_replicas([schedule]), a2a_group=replica.sp_group)


def _has_far_group(hosts: Sequence[str]) -> bool:
    """Whether messages between hosts get a communicator of their own, since they delay the messages behind them."""
    return len(set(hosts)) > 1 and pairs_by_order()


def _expect_same_plan(plan: Plan) -> list[str]:
    """Return the host of each rank. Raises `ScheduleError` on every rank: the plans of the ranks differ."""
    plans_and_hosts = on_all_ranks(lambda: (plan.fingerprint, socket.gethostname()))
    by_rank = [fingerprint for fingerprint, _ in plans_and_hosts]
    if len(set(by_rank)) > 1:
        raise ScheduleError(
            "the ranks do not hold the same schedule: fingerprints by rank are "
            f"{[f'{fingerprint & 0xFFFFFFFF:08x}' for fingerprint in by_rank]}. "
            "Give every node the same ds_config.json, schedule and cluster files, and the same version of ds_hetero."
        )
    return [host for _, host in plans_and_hosts]
