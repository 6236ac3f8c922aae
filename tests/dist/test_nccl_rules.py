"""What hangs or goes wrong under NCCL is found on gloo: planted defects, one per rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.proof.events import Call, Event, Message, Wait
from benchmarks.proof.order import violations
from benchmarks.proof.recording import recording
from tests.support import run_ranks


@pytest.fixture(autouse=True)
def _on_plain_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks post is looked at here; the strict group would end them before it has all been posted."""
    monkeypatch.delenv("STRICT_GROUP", raising=False)


def _record(rank: int, body: Callable[[int], None]) -> list[Event]:
    with recording() as events:
        body(rank)
    return events


def _tagged(rank: int, tags_of_ranks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Rank 0 sends a message for each of its tags, rank 1 receives one for each of its own."""
    post = dist.isend if rank == 0 else dist.irecv
    works = [post(torch.ones(4), 1 - rank, tag=tag) for tag in tags_of_ranks[rank]]
    for work in works:
        assert work is not None
        work.wait()


def _swapped_sends(rank: int) -> None:
    """Only tags would tell the messages apart."""
    _tagged(rank, ((1, 2), (2, 1)))


def _unmatched_tag(rank: int) -> None:
    _tagged(rank, ((1,), (2,)))


def _other_order(rank: int) -> None:
    x = torch.ones(3)
    calls = [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, src=0)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def _unequal_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


def _messages(rank: int, together: bool) -> None:
    """Each of two ranks sends before it receives: NCCL needs that to be one group of messages."""
    out, into, peer = torch.full((4,), float(rank)), torch.empty(4), 1 - rank
    operations = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
    works = dist.batch_isend_irecv(operations) if together else [op.op(op.tensor, op.peer) for op in operations]
    for work in works:
        assert work is not None
        work.wait()
    assert into.tolist() == [float(peer)] * 4


def _sends_apart(rank: int) -> None:
    _messages(rank, together=False)


def _sends_together(rank: int) -> None:
    _messages(rank, together=True)


def _collectives(rank: int) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.broadcast(x, src=1)
    parts = [torch.empty(3) for _ in range(2)]
    dist.all_gather(parts, x)
    split = [1, 2] if rank == 0 else [2, 1]
    dist.all_to_all_single(torch.empty(3), x, split, split)
    dist.barrier()


def _receives_first(rank: int) -> None:
    """Each of two ranks posts a receive before the send that the other one's receive is of, over two groups."""
    there, back = dist.new_group(), dist.new_group()
    for group in (there, back):
        dist.barrier(group)
    peer = 1 - rank
    own, other = (there, back) if rank == 0 else (back, there)
    works = [
        *dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(4), peer, other)]),
        *dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), peer, own)]),
    ]
    for work in works:
        work.wait()


def _used_by_some(rank: int) -> None:
    """Two of three ranks use a group of all three."""
    group = dist.new_group()
    if rank < 2:
        post = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(post, torch.ones(4), 1 - rank, group)]):
            work.wait()
    dist.barrier()


def _missing_receive(rank: int) -> None:
    if rank == 0:
        work = dist.isend(torch.ones(1), 1)
        assert work is not None
    dist.barrier()


def test_code_that_keeps_the_rules_passes() -> None:
    assert violations(run_ranks(_record, 2, _collectives, nccl_rules=False)) == []
    assert violations(run_ranks(_record, 2, _sends_together, nccl_rules=False)) == []


@pytest.mark.parametrize(
    ("body", "rule", "calls"),
    [
        (
            _swapped_sends,
            "have other tags",
            ("send to 1 of 16 bytes of float32 with tag 1", "receive from 0 of 16 bytes"),
        ),
        (_missing_receive, "a call that no rank makes", ("send to 1 of 4 bytes of float32", "barrier")),
        (_other_order, "make different calls", ("allreduce", "broadcast")),
        (_unequal_sizes, "make different calls", ("('float32', 3)", "('float32', 4)")),
        (_unmatched_tag, "have other tags", ("with tag 1", "with tag 2")),
    ],
    ids=lambda value: value.__name__.strip("_").replace("_", " ") if callable(value) else "",
)
def test_a_planted_defect_ends_with_the_calls_that_do_not_match(
    body: Callable[[int], None], rule: str, calls: tuple[str, ...]
) -> None:
    """As any test of ranks would have it; some of these hang on gloo too, until its timeout."""
    with pytest.raises(AssertionError, match=r"breaks NCCL's rules") as caught:
        run_ranks(body, 2, timeout_s=16)
    lines = str(caught.value).partition("breaks NCCL's rules: ")[2].splitlines()
    assert rule in lines[0]
    assert lines[1].startswith("  rank 0: ") and calls[0] in lines[1] and "test_nccl_rules.py:" in lines[1]
    others = [line for line in lines[2:] if calls[1] in line]
    assert others and others[0].startswith("  rank") and "test_nccl_rules.py:" in others[0]


def test_messages_that_wait_for_each_other_are_found() -> None:
    (text,) = violations(run_ranks(_record, 2, _sends_apart, nccl_rules=False))
    assert "wait for each other" in text and "rank 0: send to 1 of 16 bytes" in text and "rank 1: send to 0" in text
    assert "test_nccl_rules.py" in text


def test_first_messages_that_block_their_ranks_are_found() -> None:
    """Both receives are posted, and each send waits for one of them: only the connections lock."""
    with pytest.raises(AssertionError, match="breaks NCCL's rules: calls that wait for each other") as caught:
        run_ranks(_receives_first, 2)
    assert "rank 0: receive from 1 of 16 bytes" in str(caught.value)
    assert "rank 1: receive from 0 of 16 bytes" in str(caught.value)


def test_a_group_that_only_some_of_its_ranks_use_is_found() -> None:
    with pytest.raises(AssertionError, match="used by some of its ranks alone") as caught:
        run_ranks(_used_by_some, 3)
    assert "rank 0: send to 1" in str(caught.value) and "rank 1: receive from 0" in str(caught.value)


def test_a_message_that_nobody_receives_is_found() -> None:
    (text,) = violations(run_ranks(_record, 2, _missing_receive, nccl_rules=False))
    assert "a call that no rank makes" in text and "rank 0: send to 1 of 4 bytes" in text


def test_messages_that_only_tags_can_pair_are_found() -> None:
    def pair(rank: int, sizes: tuple[int, int]) -> list[Event]:
        calls = [
            Call(
                i, "group 0, pair 0-1", rank, 2, "", (), None, (Message(rank == 0, 1 - rank, size, "float32"),), "here"
            )
            for i, size in enumerate(sizes)
        ]
        return [*calls, Wait(0), Wait(1)]

    assert violations([pair(0, (8, 32)), pair(1, (8, 32))]) == []
    (text,) = violations([pair(0, (8, 32)), pair(1, (32, 8))])
    assert "differ in size or type" in text and "send to 1 of 8 bytes" in text and "receive from 0 of 32 bytes" in text


@pytest.mark.parametrize(
    ("calls_of_ranks", "message"),
    [
        ([["all_reduce", "broadcast"], ["broadcast", "all_reduce"]], "make different calls"),
        ([["all_reduce 3"], ["all_reduce 4"]], "make different calls"),
        ([["all_reduce", "all_reduce"], ["all_reduce"]], "a call that no rank makes"),
    ],
    ids=["other order", "unequal sizes", "one call too many"],
)
def test_collectives_that_differ_between_ranks_are_found(calls_of_ranks: list[list[str]], message: str) -> None:
    logs: list[list[Event]] = [
        [Call(i, "group 0", rank, 2, name, (), None, (), f"line {i}") for i, name in enumerate(calls)]
        for rank, calls in enumerate(calls_of_ranks)
    ]
    (text,) = violations(logs)
    assert message in text and "rank 0: all_reduce" in text and "line" in text


def test_splits_of_an_all_to_all_that_do_not_match_are_found() -> None:
    def call(rank: int, sent: tuple[int, int], expected: tuple[int, int]) -> list[Event]:
        return [Call(0, "group 0", rank, 2, "alltoall_base", (), (sent, expected), (), "here")]

    assert violations([call(0, (1, 2), (1, 3)), call(1, (3, 1), (2, 1))]) == []
    (text,) = violations([call(0, (1, 2), (1, 3)), call(1, (3, 1), (4, 1))])
    assert "2 elements are sent where 4 are expected" in text


def test_a_wait_orders_calls_of_different_communicators() -> None:
    """Each rank waits for another communicator first: no queue is wrong, all of them together are."""

    def calls(rank: int, order: str) -> list[Event]:
        events: list[Event] = []
        for i, group in enumerate(order):
            events += [Call(i, f"group {group}", rank, 2, "barrier", (), None, (), group), Wait(i)]
        return events

    assert violations([calls(0, "ab"), calls(1, "ab")]) == []
    (text,) = violations([calls(0, "ab"), calls(1, "ba")])
    assert "wait for each other" in text


def _wrong_tensor(rank: int, kind: str) -> None:
    tensors: dict[str, Any] = {"strided": torch.ones(4, 4)[:, 1], "int16": torch.ones(4, dtype=torch.int16)}
    dist.broadcast(tensors[kind], src=0)


@pytest.mark.parametrize(
    ("kind", "message"), [("strided", "contiguous tensors only"), ("int16", "no data type for int16")]
)
def test_tensors_that_nccl_does_not_take_are_refused(kind: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(_record_wrong, 1, kind, nccl_rules=False)


def _record_wrong(rank: int, kind: str) -> None:
    with recording():
        _wrong_tensor(rank, kind)
