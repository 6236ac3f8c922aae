"""A sample of `benchmarks.proof`, the symmetries that it uses, five planted faults, and what lies beyond its scope."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.proof import messages, plans, scopes, tables
from benchmarks.proof.__main__ import check
from benchmarks.proof.chance import large_replicas
from benchmarks.proof.families import FAMILIES, table_of_readers
from benchmarks.proof.messages import PipelineJob
from benchmarks.proof.order import violations
from benchmarks.proof.scopes import QUICK, cuts, one_lane, placement_of
from benchmarks.proof.walk import lane_violations
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Round, Routes
from ds_hetero.planner.document_search.remapping import remap
from ds_hetero.planner.documents import UnitCosts
from ds_hetero.sharding.gradient_chunks import chunks_of
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.plans.activation_transfers import transfers
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD, one_f_one_b
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_sample_of_the_small_scope_holds(family):
    portions = list(family.portions(QUICK))
    for portion in portions[:: max(1, len(portions) // 4)]:
        wrong = [(text, first) for text, bad in islice(family.cases(*portion), 0, 400, 7) if (first := next(bad, None))]
        assert not wrong, wrong[0]


def test_the_proof_imports_no_torch():
    code = "import sys, benchmarks.proof.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_outcome_counts_cases_and_names_what_is_violated():
    family = next(family for family in FAMILIES if family.name == "remap")
    checked = check(family, ((0, 0), 2))
    assert checked.cases > 4 and not checked.violations
    broken = replace(family, cases=lambda *_: iter([("this one", iter(["is wrong"])), ("that one", iter(()))]))
    assert check(broken, ())[0] == 2 and check(broken, ()).examples == ("this one: is wrong",)


# --- planted faults: a table is changed before it is checked ------------------------------------------


def _table(tokens=(2, 3, 2), documents=((0, 7),), window=None, nodes=(0, 0, 1)) -> RingTable:
    lane = one_lane(tokens, "zigzag", nodes)
    return RingTable(placement_of([lane], len(tokens), documents), lane, True, window)


def _violations(table: RingTable) -> list[str]:
    (_, _, documents), *_ = table.placement.rows
    visible = tables.visible_keys(table.placement.length, documents, table.causal, table.window)
    return [*tables.block_violations(table, visible), *lane_violations(table)]


def test_the_tables_that_faults_are_planted_in_are_sound():
    assert _violations(_table()) == []


def test_a_dropped_kv_block_is_found(monkeypatch):
    real = RingTable.blocks_between

    def dropped(self, q, k):
        return tuple((rows, blocks[:-1] if (q, k) == (1, 0) else blocks) for rows, blocks in real(self, q, k))

    monkeypatch.setattr(RingTable, "blocks_between", dropped)
    assert any("and should see" in text for text in _violations(_table()))


def test_a_kv_block_that_nobody_sends_is_found(monkeypatch):
    real = Routes.forward
    monkeypatch.setattr(Routes, "forward", lambda self, p: tuple(Round((), ()) for _ in real(self, p)))
    assert any("without holding it" in text for text in _violations(_table()))


def test_a_doubled_gradient_is_found(monkeypatch):
    """Position 1 sends home what it got and keeps it too: it comes once more with the next round."""
    real = Routes.backward_grads

    def doubled(self, p):
        rounds = list(real(self, p))
        for number, round_ in enumerate(rounds[:-1]):
            again = [t._replace(due=number + 2) for t in (*round_.sends, *round_.receives) if t.source == 0]
            more = rounds[number + 1]
            sends, receives = ([t for t in again if getattr(t, end) == p] for end in ("sender", "receiver"))
            rounds[number + 1] = Round((*more.receives, *receives), (*more.sends, *sends))
        return tuple(rounds)

    monkeypatch.setattr(Routes, "backward_grads", doubled)
    wrong = _violations(_table())
    assert any("gradient" in text and ("twice" in text or "without holding" in text) for text in wrong), wrong


def test_a_doubled_gradient_chunk_is_found():
    layout = ParameterLayout((4, 2), (Cut.whole((4, 2), 0), Cut.along(0, (1, 2), (1, 3))))
    chunks = chunks_of("p", layout, 1)
    assert list(plans.given_chunk_violations(layout, chunks)) == []
    assert any("times in a chunk" in text for text in plans.given_chunk_violations(layout, (*chunks, chunks[0])))


def test_a_lost_token_is_found():
    stages = [Stage(ranks=(r, r + 1), inner="sequence", schedule=_pair(r, w)) for r, w in ((0, (1, 3)), (2, (2, 2)))]
    messages = transfers(*stages, 8)
    lost = [messages[0]._replace(intervals=messages[0].intervals[1:]), *messages[1:]]
    assert list(plans.hop_message_violations(*stages, 8, messages)) == []
    assert any("get the tokens" in text for text in plans.hop_message_violations(*stages, 8, lost))
    placement = stream_placement(_pair(0, (1, 3)), 8)
    shifted = replace(placement)
    shifted.__dict__["_intervals"] = {0: ((0, 2),), 1: ((3, 8),)}
    assert any("ranks hold the positions" in text for text in tables.token_violations(shifted))


def _pair(first: int, weights: tuple[int, int]) -> Schedule:
    groups = tuple(Group(ranks=(first + i,), tokens=(w,), heads=(2,)) for i, w in enumerate(weights))
    return Schedule(num_heads=2, num_kv_heads=2, groups=groups, layout="zigzag")


def test_wrong_bytes_are_found(monkeypatch):
    real = RingTable.num_keys_of
    monkeypatch.setattr(RingTable, "num_keys_of", lambda self, transfer: real(self, transfer) + (transfer.source == 1))
    assert any("is counted as" in text for text in _violations(_table()))


def test_a_swapped_pair_is_found(monkeypatch):
    """Of two messages between the same ranks in one round one is sent, and the other expected, first."""
    patterns = (table_of_readers(4, (0, 0, 1, 1), True, (2, 2, 2, 2), pattern) for pattern in range(4095, 0, -1))
    table = next(t for t in patterns if any(_repeats(r) for p in range(4) for r in t.forward_rounds(p)))
    assert list(lane_violations(table)) == []
    real = Routes.forward

    def swapped(self, p):
        return tuple(round_._replace(sends=round_.sends[::-1]) for round_ in real(self, p))

    monkeypatch.setattr(Routes, "forward", swapped)
    assert any("sent" in text and "received" in text for text in lane_violations(table))


def _repeats(round_: Round) -> bool:
    receivers = [transfer.receiver for transfer in round_.sends]
    return len(set(receivers)) < len(receivers)


# --- symmetries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_member_without_tokens_changes_no_other_members_blocks(layout):
    for tokens, at in product(cuts(4, 2, 1), range(3)):
        wider = (*tokens[:at], 0, *tokens[at:])
        others = [i for i in range(3) if i != at]
        for documents, (causal, window) in product(scopes.documents_of(4, 2), scopes.masks_of(4)):
            few, many = (
                RingTable(placement_of([lane], len(lane.members), documents), lane, causal, window)
                for lane in (one_lane(tokens, layout), one_lane(wider, layout))
            )
            for (i, q), (j, k) in product(enumerate(others), repeat=2):
                assert [b for _, b in few.blocks_between(i, j)] == [b for _, b in many.blocks_between(q, k)]
                assert few.travelling_keys(j) == many.travelling_keys(k) and (
                    i == j or few.reads(i, j) == many.reads(q, k)
                )
            assert not any(many.reads(at, k) or many.reads(k, at) for k in others) and many.travelling_keys(at) == ()


def test_rounds_depend_on_readers_nodes_and_widths_only():
    """Of a table made by documents, and of one that is given the same readers and widths, they are the same."""
    seen = set()
    for tokens, documents in islice(product(cuts(6, 3), scopes.documents_of(6, 2)), 0, None, 7):
        for nodes, proxies in (((0, 0, 0), False), ((0, 1, 0), True), ((0, 1, 2), False)):
            lane = one_lane(tokens, "contiguous", nodes, proxies=proxies)
            table = RingTable(placement_of([lane], 3, documents), lane, True, None)
            widths = [sum(b - a for a, b in table.travelling_keys(s)) for s in range(3)]
            pairs = [(s, r) for s, r in product(range(3), repeat=2) if s != r]
            pattern = sum(1 << bit for bit, (s, r) in enumerate(pairs) if table.reads(r, s))
            given_readers = table_of_readers(3, nodes, proxies, [max(w, 1) for w in widths], pattern)
            for p in range(3):
                for rounds in ("forward_rounds", "backward_kv_rounds", "backward_grad_rounds", "kept_source"):
                    assert getattr(table, rounds)(p) == getattr(given_readers, rounds)(p)
            seen.add(pattern)
    assert len(seen) > 5


@pytest.mark.parametrize(("nodes", "other"), [((0, 1, 0, 2), (5, 3, 5, 0)), ((0, 0, 1, 1), (7, 7, 2, 2))])
def test_nodes_may_be_numbered_in_any_way(nodes, other):
    a, b = (table_of_readers(4, n, True, (1, 2, 3, 4), 0b101101110111) for n in (nodes, other))
    for p in range(4):
        assert a.forward_rounds(p) == b.forward_rounds(p)


def test_heads_and_tokens_do_not_know_of_each_other():
    for schedule in islice(scopes.schedules_by_heads(3, 4), 0, None, 17):
        groups = tuple(
            replace(g, tokens=tuple(r + 1 for r in g.ranks), heads=(4, *(0,) * (len(g.ranks) - 1)))
            for g in schedule.groups
        )
        weights = tuple(replace(g, tokens=tuple(r + 1 for r in g.ranks)) for g in schedule.groups)
        one, other = (replace(schedule, groups=made) for made in (groups, weights))
        for rank in range(3):
            assert stream_placement(one, 8).intervals(rank) == stream_placement(other, 8).intervals(rank)
        assert other.sub_rings == schedule.sub_rings


@pytest.mark.parametrize(("have", "want"), [((5, 0), (2, 3)), ((1, 4), (3, 2))])
def test_remapping_depends_on_surpluses_only(have, want):
    costs = UnitCosts.from_weights(_pair(0, (1, 1)))
    both = [min(pair) for pair in zip(have, want, strict=True)]
    less = ([a - b for a, b in zip(side, both, strict=True)] for side in (have, want))
    assert remap(have, want, costs.node, costs) == remap(*less, costs.node, costs)


# --- beyond the scope -------------------------------------------------------------------------------


@st.composite
def _lanes(draw):
    size = draw(st.integers(2, 9))
    tokens = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size).filter(any))
    length = sum(tokens)
    ends = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=9)))
    documents = tuple(pairwise(ends))
    nodes = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    lane = one_lane(tokens, draw(st.sampled_from(LAYOUTS)), nodes, proxies=draw(st.booleans()))
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, length))) if causal else None
    return RingTable(placement_of([lane], size, documents), lane, causal, window)


@given(_lanes())
@settings(max_examples=60, deadline=None)
def test_lanes_beyond_the_scope_hold(table):
    assert _violations(table) == []


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_schedules_beyond_the_scope_hold(data):
    ranks = data.draw(st.integers(2, 7))
    num_kv_heads = data.draw(st.integers(1, 3))
    num_heads = num_kv_heads * data.draw(st.integers(1, 4))
    classes = data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    groups = []
    for members in (tuple(r for r in range(ranks) if classes[r] == c) for c in sorted(set(classes))):
        ends = sorted(data.draw(st.integers(0, num_heads)) for _ in members[1:])
        heads = tuple(b - a for a, b in pairwise((0, *ends, num_heads)))
        tokens = tuple(data.draw(st.integers(0, 4)) for _ in members)
        groups.append(Group(ranks=members, tokens=tokens if any(tokens) else (1, *tokens[1:]), heads=heads))
    schedule = Schedule(num_heads=num_heads, num_kv_heads=num_kv_heads, groups=tuple(groups), layout="zigzag")
    length = data.draw(st.integers(ranks, 24))
    placement = stream_placement(schedule, length, (Rows(0, 1, ((0, length // 3), (length // 3, length))),))
    checks = (tables.token_violations, tables.head_violations, tables.sub_ring_violations)
    assert [text for check_ in checks for text in check_(placement)] == []
    assert list(tables.composite_violations(placement, True, data.draw(st.sampled_from((None, 3))))) == []


# --- order of messages: planted cycles, and calls that meet others than they should ---------------------


def _job(tied: bool = False) -> PipelineJob:
    """Three stages, the middle one of two ranks, beside a pipeline of one stage."""
    sequence = Stage(ranks=(1, 2), layers=(1, 2), inner="sequence", schedule=_pair(1, (1, 3)))
    first, last = (Stage(ranks=(rank,), layers=(layer, layer + 1)) for rank, layer in ((0, 0), (3, 2)))
    alone = Stage(ranks=(4,), layers=(0, 3))
    pipelines = (
        Pipeline(stages=(first, sequence, last), micro_batch_size=1, micro_batches=6),
        Pipeline(stages=(alone,), micro_batch_size=1, micro_batches=1),
    )
    plan = Plan(pipelines=pipelines, model=PlannedModel(num_layers=3, num_heads=2, num_kv_heads=2))
    return PipelineJob(plan=plan, lengths=((8,) * 6, (8,)), tied=tied)


@pytest.mark.parametrize("by_order", [True, False])
def test_a_step_without_a_planted_fault_has_no_cycle(by_order):
    assert list(_job().violations(by_order)) == []
    assert list(large_replicas(1).violations(by_order)) == []


def test_both_directions_of_a_boundary_on_one_communicator_lock(monkeypatch):
    """Where activations are asked for one pass ahead: then they stand before a gradient that they depend on."""
    real = messages._Passes._ask
    monkeypatch.setattr(messages, "GRADIENTS", messages.ACTIVATIONS)
    monkeypatch.setattr(
        messages._Passes, "_ask", lambda passes, kind, count: real(passes, kind, count + (kind == FORWARD))
    )
    (text,) = _job().violations(True)
    assert text.startswith("calls that wait for each other") and "on activations [" in text
    assert list(_job().violations(False)) == []  # tags tell directions apart


def test_a_receive_of_a_gradient_before_the_first_forward_locks_where_it_connects(monkeypatch):
    """As pipelines did: each of two stages stood in a receive that its neighbour was to answer after a forward."""
    real = messages._Passes._ask

    def ahead(passes, kind, count):
        real(passes, kind, count)
        if kind == FORWARD:
            real(passes, BACKWARD, 1)

    monkeypatch.setattr(messages._Passes, "_ask", ahead)
    assert list(_job().violations(True)) == []  # a step connects before its first message
    monkeypatch.setattr(messages._Passes, "_connect", lambda passes: None)
    (text,) = _job().violations(True)
    assert text.startswith("calls that wait for each other") and "receive from" in text
    assert list(_job().violations(False)) == []  # gloo is connected before


def test_a_bucket_that_connects_its_ranks_inside_a_hook_locks(monkeypatch):
    """The last stage waits in the bucket of tied weights for the first, which waits for the gradient after it."""
    monkeypatch.setattr(messages, "connect_owners", lambda log, buckets: None)
    assert list(_job(tied=True).violations(True)) == []  # a bucket is held back until that gradient has been sent
    held_at_nothing = property(lambda sync: False, lambda sync, value: None)
    monkeypatch.setattr(messages.Sync, "holds_back", held_at_nothing, raising=False)
    (text,) = _job(tied=True).violations(True)
    assert text.startswith("calls that wait for each other") and "all_to_all" in text


def test_a_communicator_that_some_of_its_ranks_use_first_is_never_made():
    """A rank without tokens has no message over the boundary; every new group is used once by all its ranks for it."""
    sequence = Stage(ranks=(1, 2), layers=(1, 2), inner="sequence", schedule=_pair(1, (0, 4)))
    stages = (Stage(ranks=(0,), layers=(0, 1)), sequence)
    pipeline = Pipeline(stages=stages, micro_batch_size=1, micro_batches=2)
    plan = Plan(pipelines=(pipeline,), model=PlannedModel(num_layers=2, num_heads=2, num_kv_heads=2))
    job = PipelineJob(plan=plan, lengths=((8, 8),))
    steps = [messages.pipeline_step(job, rank, by_order=True) for rank in plan.ranks]
    (text,) = violations(steps, from_the_start=True)
    assert text.startswith("a communicator is used by some of its ranks alone") and "[0, 1, 2]" in text

    made = []
    for rank, step in enumerate(steps):
        log = messages.Log(rank, by_order=True)
        for purpose in (messages.ACTIVATIONS, messages.GRADIENTS):
            log.wait(log.collective("allreduce", (0, 1, 2), purpose, ("first",)))
        of_step = [replace(event, work=event.work + len(log.events)) for event in step]
        made.append([*log.events, *of_step])
    assert violations(made, from_the_start=True) == []


def test_messages_of_a_round_that_are_not_posted_together_lock(monkeypatch):
    def apart(log, groups, posted, unfinished):
        for message, due, _ in sorted(posted, key=lambda entry: not entry.message.sends):
            works = log.messages(groups.ranks, "", [message])
            unfinished += works
            if not message.sends:
                yield due, works

    monkeypatch.setattr(messages, "_post_round", apart)
    found = [text for seed in range(1, 24, 2) for text in large_replicas(seed).violations(True)]
    assert any(text.startswith("calls that wait for each other") for text in found)


def test_ends_of_a_message_that_name_unlike_colours_never_meet(monkeypatch):
    """In a ring of two groups each is before and after the other, which one of them has to overlook."""
    job = large_replicas(55)  # lanes exchange heads in two groups, in a replica whose ring has colours
    assert list(job.violations(True)) == []
    real = messages.ring_colour
    monkeypatch.setattr(messages, "ring_colour", lambda at, peer, size: at if size == 2 else real(at, peer, size))
    assert list(large_replicas(55).violations(True))


def test_lanes_in_another_order_on_one_rank_meet_other_messages(monkeypatch):
    real = messages.AttentionTables._post_rings

    def reversed_on_first(self, log, rings, ranks, backward):
        real(self, log, rings[::-1] if log.rank == 0 else rings, ranks, backward)

    monkeypatch.setattr(messages.AttentionTables, "_post_rings", reversed_on_first)
    assert any(text for seed in range(1, 24, 2) for text in large_replicas(seed).violations(True))


def test_buckets_in_another_order_on_one_rank_meet_others(monkeypatch):
    real = messages.Sync.__init__

    def reversed_on_first(self, log, buckets):
        real(self, log, buckets)
        if log.rank == 0:
            self._left.reverse()

    monkeypatch.setattr(messages.Sync, "__init__", reversed_on_first)
    (text,) = _job().violations(True)
    assert "rank 0: all_to_all" in text


def test_a_backward_before_the_next_stage_has_its_forward_locks(monkeypatch):
    """The first stage lets fewer micro-batches in flight than the stages after it need."""
    job = _job()
    swapped = {3: 1, 2: 2, 1: 3}
    monkeypatch.setattr(messages, "one_f_one_b", lambda in_flight, count: one_f_one_b(swapped[in_flight], count))
    (text,) = job.violations(True)
    assert text.startswith("calls that wait for each other")
