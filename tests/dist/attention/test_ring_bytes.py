"""The bytes that the planner says a layer puts on every kind of link are those that the ranks send."""

import random
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.documents.wire import counted_bytes
from ds_hetero.planner.document_search.traffic import LINK_KINDS, KVBytes, exchange_bytes, ring_bytes
from ds_hetero.planner.documents import UnitCosts, place_documents
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.head_exchange import Exchange
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.attention.moves import _Mover
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import proportional
from ds_hetero.values.placement import Placement, Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

NODES = (0, 0, 1, 1)
HEAD_DIM = 8


def test_planned_bytes_equal_those_on_the_wire_by_link():
    run_ranks(_check_bytes, 4, 40)


def _check_bytes(rank, num_cases):
    rng = random.Random(5)
    schedules = [proportional((4, 3, 2, 1), 4, 2), proportional((1, 1, 1, 1), 4, 2), _grouped()]
    replicas = [make_replica(Plan.of_replicas([schedule])) for schedule in schedules]
    seen = set()
    for number in range(num_cases):
        schedule, replica = schedules[number % 3], replicas[number % 3]
        lengths = [rng.choice((1, 7, 90, 600)) + rng.randrange(40) for _ in range(rng.randint(1, 9))]
        window = rng.choice((None, None, 33))
        for placement in _placements(schedule, lengths, rng):
            sent = _sent(rank, replica, placement, window)
            once = 2 * HEAD_DIM * 4
            planned = ring_bytes(placement, NODES, KVBytes(once, once, once), window=window)
            assert planned == sent, (number, lengths, window, placement)
            seen |= {kind for kind, count in sent.items() if count}
    assert seen == {"inside_nodes", "between_nodes"}


def _grouped() -> Schedule:
    """Two groups of two ranks whose cuts lie at different heads, one of them inside a KV head."""
    groups = (Group(ranks=(0, 1), tokens=(2, 1), heads=(3, 1)), Group(ranks=(2, 3), tokens=(1, 1), heads=(2, 2)))
    return Schedule(num_heads=4, num_kv_heads=2, groups=groups, ring=(0, 1), layout="zigzag")


def _placements(
    schedule: Schedule, lengths: list[int], rng: random.Random, links: tuple[float, ...] = ()
) -> list[Placement]:
    """The planner's, on links of random speed or on these, and the stream."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    documents = tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))
    rows = (Rows(0, 1, documents),)
    speeds = [group.weight for group in schedule.ring_groups]
    node = tuple(NODES[group.ranks[0]] for group in schedule.ring_groups)
    costs = UnitCosts(
        token_s=tuple(1 / speed for speed in speeds),
        square_s=tuple(0.01 / speed for speed in speeds),
        most_tokens=(10**6,) * len(speeds),
        node=node,
        receive_s=(rng.choice((0.0, 0.1)),) * 2,
        cross_s=(rng.choice((0.0, 0.1, 1.0)),) * 2,
        link_s=rng.choice(((), (2.0, 2.0))),
    )
    if links:
        receive_s, cross_s, exchange = links
        costs = replace(
            costs, receive_s=(receive_s,) * 2, cross_s=(cross_s,) * 2, link_s=(), exchange_per_receive=exchange
        )
    placed = place_documents(schedule, documents, ends[-1], costs, min_cut_tokens=64).with_rows(rows)
    return [placed] if ends[-1] < schedule.sp_size else [placed, stream_placement(schedule, ends[-1], rows)]


def test_planned_bytes_of_exchanged_heads_equal_those_on_the_wire_by_link():
    run_ranks(_check_exchanged_bytes, 4, 24)


def _check_exchanged_bytes(rank, num_cases):
    rng = random.Random(6)
    schedules = [proportional((4, 3, 2, 1), 8, 4), proportional((1, 1, 1, 1), 4, 2), _grouped()]
    replicas = [make_replica(Plan.of_replicas([schedule])) for schedule in schedules]
    exchanged: Counter[str] = Counter()
    run = Exchange.run

    def counting(self, recv, send, recv_sizes, send_sizes):
        if self.process_group is not None:
            ranks = dist.get_process_group_ranks(self.process_group)
            for other, elements in zip(ranks, send_sizes, strict=True):
                if other != rank:
                    exchanged[LINK_KINDS[NODES[rank] != NODES[other]]] += 4 * elements
        run(self, recv, send, recv_sizes, send_sizes)

    move = _Mover.run

    def counting_moves(self, tensors, back):
        elements_of_token = tensors[0].shape[0] * sum(x.shape[1] for x in tensors) * tensors[0].shape[3]
        sent, _ = self.table.sizes(elements_of_token, back=back)
        for other, elements in zip(dist.get_process_group_ranks(self.process_group), sent, strict=True):
            exchanged[LINK_KINDS[NODES[rank] != NODES[other]]] += 4 * elements
        return move(self, tensors, back)

    Exchange.run, _Mover.run = counting, counting_moves
    by_heads = with_moves = 0
    for number in range(num_cases):
        schedule, replica = schedules[number % 3], replicas[number % 3]
        lengths = [rng.choice((90, 600, 1200)) + rng.randrange(40) for _ in range(rng.randint(1, 4))]
        (placement, *_) = _placements(schedule, lengths, rng, links=(0.1, 50.0, 1e-4))
        by_heads += any(lane.by_heads for lane in placement.lanes)
        with_moves += bool(placement.moves)
        exchanged.clear()
        in_rings = _sent(rank, replica, placement, None)
        totals = torch.tensor([exchanged[kind] for kind in LINK_KINDS])
        dist.all_reduce(totals)
        once = 2 * HEAD_DIM * 4
        assert ring_bytes(placement, NODES, KVBytes(once, once, once)) == in_rings
        assert exchange_bytes(placement, NODES, KVBytes(once, once, once)) == dict(
            zip(LINK_KINDS, totals.tolist(), strict=True)
        )
    assert by_heads > num_cases // 4 and with_moves


def _sent(rank: int, replica, placement: Placement, window: int | None) -> dict[str, int]:
    tokens, schedule = placement.tokens(rank), placement.schedule
    q = torch.randn(1, schedule.num_heads, tokens, HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(1, schedule.num_kv_heads, tokens, HEAD_DIM, requires_grad=True) for _ in range(2))
    spec = AttentionSpec(select(torch.device("cpu"), q.dtype, HEAD_DIM, None, None), window=window)
    layout = batch_layout(placement, placement.rows)
    return counted_bytes(lambda: attention(q, k, v, replica, layout, spec).sum().backward(), NODES)
