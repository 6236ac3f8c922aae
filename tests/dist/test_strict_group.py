"""Ranks that block where hosts of NCCL ranks do: planted locks are found, and the package's own messages pass.

Budget: 40 s; runs of DeepSpeed are in tests/integration/pipelines/test_pipeline_connections.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hetero.runtime.pipeline import runner as runner_module
from ds_hetero.runtime.pipeline.runner import PipelineRunner
from tests.dist.attention.test_attention import _check_by_heads, _check_cases, _check_moves, _check_routes
from tests.dist.lone_stages import lone_stages
from tests.support import half_of, is_strict, run_ranks

SHORT = {"STRICT_GROUP_LOCK_S": "4"}  # of planted locks
STRICT_EVERYWHERE = is_strict()  # before any test runs


def _receives_first(rank: int) -> None:
    """Each of two ranks asks for what the other sends after its own receive."""
    there, back = dist.new_group(), dist.new_group()
    for group in (there, back):
        dist.barrier(group)
    peer = 1 - rank
    own, other = (there, back) if rank == 0 else (back, there)
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(4), peer, other)])
    works += dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), peer, own)])
    for work in works:
        work.wait()


def _used_by_some(rank: int) -> None:
    """Two of three ranks use a group of all three."""
    group = dist.new_group()
    if rank < 2:
        post = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(post, torch.ones(4), 1 - rank, group)]):
            work.wait()


def _unlike_batches(rank: int) -> None:
    """One rank sends and receives in a batch of its own each, the other in one."""
    operations = [
        dist.P2POp(dist.isend, torch.ones(4), 1 - rank),
        dist.P2POp(dist.irecv, torch.empty(4), 1 - rank),
    ]
    for batch in [operations] if rank else [operations[:1], operations[1:]]:
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def _other_first_collective(rank: int) -> None:
    """The first collectives of the ranks wait for each other's second."""
    calls = [lambda: dist.all_reduce(torch.ones(1), async_op=True), lambda: dist.barrier(async_op=True)]
    for call in calls if rank == 0 else reversed(calls):
        call()


@pytest.mark.parametrize(
    ("body", "world_size", "words"),
    [
        (_receives_first, 2, ("the first messages of rank 0 on", "the first messages of rank 1 on")),
        (_used_by_some, 3, ("rank 2 to make its first call, which makes the communicator",)),
        (_unlike_batches, 2, ("Message truncated",)),
        (_other_first_collective, 2, ("to make its first allreduce", "to make its first barrier")),
    ],
    ids=["connect", "communicator", "truncated", "collective"],
)
def test_what_blocks_a_host_on_nccl_is_a_lock_that_names_all_ranks(
    body: Callable[[int], None], world_size: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(body, world_size, strict=True, nccl_rules=False, env=SHORT, timeout_s=60)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def _pipeline(rank: int, connects: bool) -> None:
    """A step of as many stages as ranks, which pass on what they get."""
    runner, batches = lone_stages(rank, micro_batches=4)
    with nullcontext() if connects else _asking_at_once():
        total = runner.train(batches)
        runner.train(batches)
        runner.evaluate(batches)
    assert total is None or float(total) == 4 * 64 * 4 ** (dist.get_world_size() - 2)


@contextmanager
def _asking_at_once() -> Iterator[None]:
    """Stages that connect when they happen to send, and ask for a gradient as soon as its output has left."""
    with (
        mock.patch.object(PipelineRunner, "_connect", lambda *args: None),
        mock.patch.object(runner_module, "gradients_due", lambda in_flight_after, sent, micro_batches: sent),
    ):
        yield


@pytest.mark.parametrize("world_size", [2, 3])
def test_stages_that_are_connected_run(world_size: int) -> None:
    run_ranks(_pipeline, world_size, True, strict=True)


def test_three_stages_that_are_not_connected_lock() -> None:
    """Stage 0 connects for a gradient before it sends what stage 1 needs for its first backward."""
    with pytest.raises(AssertionError, match="locked") as caught:
        run_ranks(_pipeline, 3, False, strict=True, nccl_rules=False, env=SHORT, timeout_s=60)
    assert "rank 0 waits for the first messages of rank 1 on" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "world_size", "args"),
    [
        (_check_routes, 4, (4,)),
        (_check_moves, 4, (6,)),
        (_check_by_heads, 4, (2, 2, 4)),
        (_check_cases, 3, (10, (torch.float64,), True)),
        (_check_cases, 4, (10, (torch.float64,), False)),
    ],
    ids=["routes between nodes", "moved tokens", "heads between nodes", "documents", "streams"],
)
def test_attention_passes(body: Callable[..., object], world_size: int, args: tuple[object, ...]) -> None:
    run_ranks(body, world_size, *args, strict=True)


@pytest.mark.parametrize("number", range(4))  # of both halves
def test_the_half_that_is_asked_for_is_strict(request, number):
    half = request.config.option.strict_half
    if half is None or STRICT_EVERYWHERE:
        pytest.skip("all tests run alike")
    assert is_strict() == (half_of(request.node.nodeid) == half)
