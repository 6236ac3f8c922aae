"""The watch over the other ranks, with one rank that answers its questions by hand. Budget: 20 s."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ds_hetero.runtime.peers.board import Board, Status
from ds_hetero.runtime.peers.calls import FETCH, History, own_calls
from ds_hetero.runtime.peers.diagnosis import Diagnosis
from ds_hetero.runtime.peers.main_thread import collectives_of_main_thread
from ds_hetero.runtime.peers.posted_calls import posted_calls
from ds_hetero.runtime.peers.processes import Processes
from ds_hetero.runtime.peers.watch import start_watch
from tests.support import run_ranks

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

COMPUTES, FETCHES = History([], 0, False), History([FETCH], 0, False)


def test_messages_between_two_ranks_do_not_count_as_collectives_of_all():
    counts = run_ranks(_count_collectives, 3, nccl_rules=False)
    assert counts == [[1, 2, 3]] * 3


def _count_collectives(rank: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    first, last = torch.ones(1), torch.ones(1)
    if rank < 2:  # before
        dist.send(first, 1) if rank == 0 else dist.recv(first, 0)
    dist.barrier()
    posted_calls.start()
    counts = []
    for _ in range(3):
        dist.all_reduce(last)
        counts.append(collectives_of_main_thread()[1][group.group_name])
        if rank < 2:
            message = dist.isend(first, 1) if rank == 0 else dist.irecv(first, 0)
            assert message is not None
            message.wait()
    return counts


@pytest.mark.slow  # rank 0 waits for eight seconds
def test_a_rank_that_was_freed_after_its_answer_is_not_blamed():
    """Rank 0 asks from a barrier; rank 1 frees it from there before it answers from the call after it."""
    assert run_ranks(_free_before_the_answer, 2, nccl_rules=False)[0] is None


def _free_before_the_answer(rank: int) -> Diagnosis | None:
    if rank == 0:
        watch = start_watch(60.0)
        dist.barrier()
        own_calls.record(FETCH)
        dist.barrier()
        return watch.diagnosis
    board, begin = Board(), time.monotonic()
    Processes(board, 1, 2)
    answered = 0
    while (asked := board.num_asked()) == answered or time.monotonic() - begin < 6.0:
        if asked > answered:
            board.write_status(1, Status(asked, "computing", False, False, 0.0, COMPUTES))
            answered = asked
        time.sleep(0.02)
    dist.barrier()
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        time.sleep(0.3)
        board.write_status(1, Status(board.num_asked(), "barrier", True, False, 0.3, FETCHES))
    dist.barrier()
    return None
