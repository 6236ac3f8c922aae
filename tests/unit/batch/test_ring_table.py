"""Blocks cover what is visible, once; transfers bring each group what it needs, when it needs it."""

import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.visible_blocks import Block, visible_blocks
from ds_hetero.planner.documents import UnitCosts, place_documents
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule
from tests.work import lines_run


@st.composite
def tables(draw, masks=True):
    num_groups = draw(st.integers(1, 7))
    weights = draw(st.lists(st.integers(0, 5), min_size=num_groups, max_size=num_groups).filter(any))
    schedule = Schedule(
        num_heads=2,
        num_kv_heads=1,
        groups=tuple(Group(ranks=(i,), tokens=(w,), heads=(2,)) for i, w in enumerate(weights)),
        ring=tuple(draw(st.permutations(range(num_groups)))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )
    length = draw(st.integers(num_groups, 40))
    cuts = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=5)))
    documents = tuple(pairwise(cuts)) if draw(st.booleans()) else ((0, length),)
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, length))) if causal else None
    placement = stream_placement(schedule, length, (Rows(0, 1, documents),))
    nodes = draw(st.sampled_from(((), (0,) * num_groups, tuple(draw(st.integers(0, 3)) for _ in range(num_groups)))))
    lane = replace(placement.lanes[0], nodes=nodes, proxies=draw(st.booleans()))
    return RingTable(placement, lane, causal, window)


def _pairs(block: Block):
    for i in range(*block.q):
        for j in range(*block.k):
            difference = (j - block.k[0]) - (i - block.q[0])
            if (block.lo is None or difference >= block.lo) and (block.hi is None or difference <= block.hi):
                yield i, j


@given(tables())
def test_blocks_cover_the_visible_pairs_once_and_waste_no_row_or_column(table):
    positions = [[p for a, b in chunks for p in range(a, b)] for chunks in table.lane.intervals]
    (_, _, documents), *_ = table.placement.rows
    for q, queries in enumerate(positions):
        for k, keys in enumerate(positions):
            (_, blocks), *_ = table.blocks_between(q, k)
            found = []
            for block in blocks:
                pairs = list(_pairs(block))
                assert len({i for i, _ in pairs}) == block.q[1] - block.q[0]
                assert len({j for _, j in pairs}) == block.k[1] - block.k[0]
                found += pairs
            visible = [
                (i, j)
                for i, p in enumerate(queries)
                for j, r in enumerate(keys)
                if any(a <= p < b and a <= r < b for a, b in documents)
                and (not table.causal or r <= p)
                and (table.window is None or r > p - table.window)
            ]
            assert sorted(found) == visible


def transfers(rounds, table):
    """All transfers of every round, from what each group says of its own; sends are what the receivers expect.

    Pairs of groups have them in one order, by which messages without tags find each other.
    """
    by_group = [rounds(position) for position in range(table.size)]
    out = []
    for step in range(table.steps):
        received = [transfer for own in by_group for transfer in own[step].receives]
        assert sorted(received) == sorted(transfer for own in by_group for transfer in own[step].sends)
        for k, own in enumerate(by_group):
            assert all(t.receiver == k and t.due > step for t in own[step].receives)
            assert all(t.sender == k and t.due > step for t in own[step].sends)
            for other in range(table.size):
                sent = [t for t in own[step].sends if t.receiver == other]
                assert sent == [t for t in by_group[other][step].receives if t.sender == k]
        out.append(received)
    return out


def test_a_group_sees_itself_through_one_triangle_and_others_through_one_rectangle():
    # zigzag over two groups of 6 tokens: group 0 holds 0-2 and 9-11, group 1 holds 3-8
    mine, other, whole = [(0, 3), (9, 12)], [(3, 6), (6, 9)], [(0, 12)]
    assert visible_blocks(mine, mine, whole, True, None) == (Block((0, 6), (0, 6), None, 0),)
    # of group 0 only the back half comes after group 1's tokens, and it sees all of them
    assert visible_blocks(mine, other, whole, True, None) == (Block((3, 6), (0, 6), None, None),)
    # all of group 1 comes after the front half of group 0
    assert visible_blocks(other, mine, whole, True, None) == (Block((0, 6), (0, 3), None, None),)


def test_a_window_is_trimmed_to_the_rows_and_columns_it_touches():
    # window 3: query p sees p-2, p-1, p; of keys 0-3 the queries 4-7 see only 2 and 3, from 4 and 5
    assert visible_blocks([(4, 8)], [(0, 4)], [(0, 8)], True, 3) == (Block((0, 2), (2, 4), 0, None),)


def test_blocks_that_a_document_border_empties_are_absent():
    assert visible_blocks([(4, 8)], [(0, 4)], [(0, 4), (4, 8)], True, None) == ()


class Holdings:
    """What every group holds at each step, in single keys: of its own blocks, and as a proxy."""

    def __init__(self, table, blocks):
        self._table, self._due = table, defaultdict(list)
        self.keys = [{source: self._all(source) for source in sources} for sources in blocks]
        self._proxied = [{} for _ in blocks]

    def _all(self, source):
        return set(range(sum(stop - start for start, stop in self._table.travelling_keys(source))))

    def post(self, step, transfers):
        for t in transfers:
            keys = set(range(t.part.start, t.part.stop)) if t.part else self._all(t.source)
            if t.part and not t.part.is_first_hop:
                assert self._proxied[t.sender].pop((t.source, t.part.start)) == keys
            else:
                assert keys <= self.keys[t.sender][t.source]
            self._due[t.due].append((t, keys))
        for t, keys in self._due.pop(step + 1, ()):
            if t.part and not t.part.is_last_hop:
                self._proxied[t.receiver][t.source, t.part.start] = keys
            else:
                have = self.keys[t.receiver].setdefault(t.source, set())
                assert not have & keys
                have |= keys

    def holds(self, group, source):
        return self.keys[group].get(source) == self._all(source)


@given(tables())
def test_forward_transfers_deliver_every_block_in_time_and_only_where_needed(table):
    size, rounds = table.size, transfers(table.forward_rounds, table)
    needs = [{s for s in range(size) if s != k and any(b for _, b in table.blocks_between(k, s))} for k in range(size)]
    holdings = Holdings(table, [{k} for k in range(size)])
    for step in range(table.steps):
        for k in range(size):
            source = table.forward_source(k, step)
            assert source not in needs[k] or holdings.holds(k, source)
            assert (source == k) == (step == 0)
        holdings.post(step, rounds[step])
    assert [set(held) for held in holdings.keys] == [needs[k] | {k} for k in range(size)]
    for k in range(size):
        sources = [table.forward_source(k, step) for step in range(table.steps)]
        assert sorted(s for s in sources if s is not None) == list(range(size))
        assert table.kept_source(k) == next((s for s in reversed(sources) if s in needs[k]), None)


@given(tables())
def test_backward_transfers_bring_kv_to_who_works_on_it(table):
    size, rounds = table.size, transfers(table.backward_kv_rounds, table)
    holdings = Holdings(table, [{k, table.kept_source(k)} - {None} for k in range(size)])
    for step in range(table.steps):
        for k in range(size):
            source = table.forward_source(k, table.steps - 1 - step)
            assert source is None or not table.reads(k, source) or holdings.holds(k, source)
        holdings.post(step, rounds[step])
    for k, held in enumerate(holdings.keys):
        assert set(held) == {s for s in range(size) if s == k or table.reads(k, s)}


@given(tables())
def test_backward_transfers_take_every_gradient_home_once(table):
    size, rounds = table.size, transfers(table.backward_grad_rounds, table)
    widths = [sum(stop - start for start, stop in table.travelling_keys(source)) for source in range(size)]
    # By group and source: by key, the groups whose contribution is in its partial dK/dV.
    done = [{} for _ in range(size)]
    proxied, due = [{} for _ in range(size)], defaultdict(list)
    for step in range(table.steps):
        for t in rounds[step]:
            first, stop = (t.part.start, t.part.stop) if t.part else (0, widths[t.source])
            if t.part and not t.part.is_first_hop:
                due[t.due].append((t, first, proxied[t.sender].pop((t.source, first))))
            else:
                of_keys = done[t.sender][t.source]
                due[t.due].append((t, first, [of_keys[key] for key in range(first, stop)]))
                of_keys[first:stop] = [None] * (stop - first)  # nothing may be added to what has left
        for k in range(size):
            source = table.forward_source(k, table.steps - 1 - step)
            if source is not None and (source == k or table.reads(k, source)):
                own = done[k].setdefault(source, [[] for _ in range(widths[source])])
                done[k][source] = [[*before, k] for before in own]
        for t, first, parts in due.pop(step + 1, ()):
            if t.part and not t.part.is_last_hop:
                proxied[t.receiver][t.source, first] = parts
                continue
            own = done[t.receiver].setdefault(t.source, [[] for _ in range(widths[t.source])])
            for key, part in enumerate(parts, first):
                own[key] = own[key] + part
    assert not due
    for source in range(size):
        readers = [k for k in range(size) if k == source or table.reads(k, source)]
        assert all(sorted(part) == readers for part in done[source].pop(source))
    assert all(of_key is None for of_group in done for keys in of_group.values() for of_key in keys)


@given(tables())
def test_keys_travel_that_another_group_sees_and_no_others(table):
    for source in range(table.size):
        blocks_of = {q: [b for _, blocks in table.blocks_between(q, source) for b in blocks] for q in range(table.size)}
        del blocks_of[source]
        seen = {key for blocks in blocks_of.values() for block in blocks for key in range(*block.k)}
        assert sorted(seen) == [key for columns in table.travelling_keys(source) for key in range(*columns)]
        assert [q for q in blocks_of if blocks_of[q]] == [q for q in blocks_of if table.reads(q, source)]
        gaps = [b[0] - a[1] for a, b in pairwise(table.travelling_keys(source))]
        assert all(gap > 0 for gap in gaps)


def test_a_dense_ring_moves_the_published_number_of_blocks():
    groups = tuple(Group(ranks=(i,), tokens=(1,), heads=(2,)) for i in range(4))
    placement = stream_placement(Schedule(num_heads=2, num_kv_heads=1, groups=groups), 64, (Rows(0, 1, ((0, 64),)),))
    table = RingTable(placement, placement.lanes[0], False, None)
    forward, kv, grads = (
        [len(of_step) for of_step in transfers(rounds, table)]
        for rounds in (table.forward_rounds, table.backward_kv_rounds, table.backward_grad_rounds)
    )
    assert forward == [4, 4, 4, 0]
    assert kv == [4, 4, 0, 0]  # the last remote KV of the forward is still there
    assert grads == [0, 4, 4, 4]


def test_a_window_stops_kv_from_travelling_on():
    groups = tuple(Group(ranks=(i,), tokens=(1,), heads=(2,)) for i in range(4))
    schedule = Schedule(num_heads=2, num_kv_heads=1, groups=groups, layout="contiguous")
    placement = stream_placement(schedule, 64, (Rows(0, 1, ((0, 64),)),))
    table = RingTable(placement, placement.lanes[0], True, 8)
    assert [len(r) for r in transfers(table.forward_rounds, table)] == [3, 0, 0, 0]
    assert [table.travelling_keys(source) for source in range(4)] == [((9, 16),), ((9, 16),), ((9, 16),), ()]


def test_tables_of_1000_documents_on_64_ranks_are_little_work_for_a_rank():
    rng = random.Random(0)
    lengths = [1 + int(rng.lognormvariate(5, 1.3)) for _ in range(990)] + [30_000 + 50 * i for i in range(10)]
    rng.shuffle(lengths)
    documents = tuple(pairwise(accumulate(lengths, initial=0)))
    schedule, rows = ring(64, 32, 8), (Rows(0, 1, documents),)
    placement = place_documents(schedule, documents, sum(lengths), UnitCosts.from_weights(schedule)).with_rows(rows)
    cut = [lane for lane in placement.lanes if len(lane.members) > 1]
    assert len(cut) >= 5
    for of_batch in (placement, stream_placement(schedule, sum(lengths), rows)):
        rank = cut[0].members[0]
        made = partial(_make_tables, replace(of_batch), rank)
        assert lines_run(made) < 40_000  # 3 ms on an idle machine


def _make_tables(placement, rank):
    placement.intervals(rank)
    for own in BatchLayout(placement=placement).rings(rank, True, None):
        assert own.calls and own.forward_rounds and own.backward_kv_rounds and own.backward_grad_rounds and own.pairs
