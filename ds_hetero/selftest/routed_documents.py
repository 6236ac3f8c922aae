"""Compare attention over whole and sharded documents, whose KV is sent by routes, with the definition.

One document is on the last rank alone. Two more are sharded over all ranks, of which the first half stands for one node
and the second half for another. KV is sent around the nodes and inside them, over the communicator that a job on
several hosts has for messages between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.replica import make_replica
from ds_hetero.selftest.attention_case import TOLERANCE, AttentionCase, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.uneven_schedules import long_length_for, uneven_schedules
from ds_hetero.values.placement import Lane, Placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share

_NAME = "documents with routes"
_HEAD_DIM = 64
_TIMES = 3.0  # limits of a call that the documents may take: a kernel may be compiled first
_MIN_RANKS_WITH_PROXIES = 4  # two nodes of two ranks each


def check_routed_documents(session: Session) -> Iterator[Line]:
    """Yield one line of the report: whether attention is right for all three documents together."""
    if session.size == 1:
        yield Line(_NAME, "skip", "one process holds all documents")
        return
    schedule, length = uneven_schedules(session.size)["ring"], long_length_for(session)
    placement = _placement(schedule, length)
    documents = tuple(span for lane in placement.lanes for span in lane.spans)
    dtype = session.trained_dtype
    kernel = select(session.device, dtype, _HEAD_DIM, None, None)
    case = AttentionCase(AttentionSpec(kernel), dtype, _HEAD_DIM, documents=documents)
    with session.watch.call(f"process groups of {_NAME}"):
        replica = make_replica(Plan.of_replicas([schedule]), session.groups)
        far_group = replica.far_group or session.groups.of(replica.ranks, "between nodes")
    with session.watch.call(_NAME, times=_TIMES):
        error = largest_error(case, replace(replica, far_group=far_group), length, session.device, placement)
    if error <= TOLERANCE[dtype]:
        yield Line(_NAME, "pass", f"{len(documents)} documents, {length} tokens, two nodes")
    else:
        yield Line(_NAME, "fail", f"off by {error:.1e} of the largest value, allowed {TOLERANCE[dtype]:.0e}")


def _placement(schedule: Schedule, length: int) -> Placement:
    """Return two documents in uneven shards over all units (ranks of the ring), and one on the last unit."""
    units = schedule.ring_size
    weights = [1 + unit % 3 for unit in range(units)]
    first, second = length * 5 // 12, length * 3 // 4
    wide = Lane(
        members=tuple(range(units)),
        spans=((0, first), (first, second)),
        tokens=(share(first, weights), share(second - first, weights[::-1])),
        layout="zigzag",
        nodes=tuple(2 * unit // units for unit in range(units)),
        proxies=units >= _MIN_RANKS_WITH_PROXIES,
    )
    lone = Lane(members=(units - 1,), spans=((second, length),), tokens=((length - second,),), layout="contiguous")
    unit_tokens = [sum(tokens_of_documents) for tokens_of_documents in zip(*wide.tokens, strict=True)]
    unit_tokens[-1] += length - second
    by_rank = {group.ranks[0]: tokens for group, tokens in zip(schedule.ring_groups, unit_tokens, strict=True)}
    rank_tokens = tuple(by_rank[rank] for rank in schedule.ranks)
    return Placement(schedule=schedule, length=length, rank_tokens=rank_tokens, lanes=(wide, lone))
