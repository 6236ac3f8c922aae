"""Ranks whose calls return at once, as on NCCL: rules of the stand-in, each broken on purpose, and what then holds.

Budget: 60 s; jobs that fail under these rules are in tests/integration/job/test_faults.py.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.runtime.peers.main_thread import Stay, collectives_of_main_thread
from ds_hetero.runtime.peers.posted_calls import has_unfinished_call, posted_calls, shows_unfinished_call
from ds_hetero.runtime.pipeline.runner import PipelineRunner, neighbours_of
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from tests.dist.lone_stages import lone_stages
from tests.dist.test_pipeline import LAYERS, WIDTH, Batch, Model, batches_of, one_process
from tests.strict_group import own_device
from tests.support import run_ranks

SHORT = {"STRICT_GROUP_LOCK_S": "4"}  # of planted locks


def _looks(for_s: float, store: dist.Store) -> tuple[threading.Thread, list[Any]]:
    """What another thread sees of the main one for a while: its last place, and the collective that it is in.

    Every thread looks for the last time before the key "seen" counts all ranks.
    """
    seen: list[Any] = []
    stay = Stay()

    def look() -> None:
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            time.sleep(0.1)
            stay.look()
        collective, counts = collectives_of_main_thread()
        seen[:] = [stay.place, stay.unchanged_s, collective, counts]
        store.add("seen", 1)

    thread = threading.Thread(target=look)
    thread.start()
    return thread, seen


def _waits_for_a_number(rank: int) -> Any:
    """Rank 1 comes late to an all_reduce whose sum rank 0 wants to know."""
    dist.all_reduce(torch.ones(2))  # connects
    dist.barrier()
    posted_calls.start()
    store = distributed_c10d._get_default_store()
    thread, seen = _looks(1.5, store)
    if rank == 1:
        thread.join()
        while store.add("seen", 0) < 2:  # rank 0 is still looking
            time.sleep(0.01)
    total = torch.ones(2)
    began = time.monotonic()
    dist.all_reduce(total)
    returned_s = time.monotonic() - began
    assert total[0].item() == 2
    thread.join()
    (_, _, collective, counts) = seen
    place, unchanged_s = seen[:2]
    return (
        returned_s,
        place._replace(mark=()),
        unchanged_s,
        collective and collective.name,
        counts,
        has_unfinished_call(),
    )


@pytest.mark.alone  # looks at a rank for a second and a half, in which a busy machine may not let it come so far
def test_who_waits_for_a_number_is_seen_to_wait_for_what_it_has_posted() -> None:
    (returned_s, place, unchanged_s, collective, counts, is_left), (_, other, *_) = run_ranks(
        _waits_for_a_number, 2, strict=True
    )
    assert returned_s < 1.0 and unchanged_s > 0.5
    assert place.waits and place.in_script and place.may_compute and not place.in_store
    assert place.text.startswith("all_reduce at test_strict_device.py:")
    assert collective == "all_reduce" and list(counts.values()) == [1]
    assert not is_left
    assert not other.waits  # rank 1 was in join(), with nothing posted


def _sends_apart(rank: int) -> None:
    """Both send and use what they have before they receive."""
    dist.barrier()
    mine, theirs = torch.full((4,), float(rank)), torch.empty(4)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)])
    own_device().need_idle()  # connected now
    dist.send(mine, 1 - rank)
    mine.sum().item()
    dist.recv(theirs, 1 - rank)


def _answers_late(rank: int) -> None:
    """Rank 0 asks for what rank 1 sends once it has something of rank 0, and gives memory back in between."""
    dist.barrier()
    out, into = torch.ones(4), torch.empty(4)
    there, back = dist.new_group(), dist.new_group()
    for group in (there, back):
        dist.barrier(group)
    ends = [(there, 0, 1), (back, 1, 0)]
    for group, sender, receiver in ends:  # connected, so that hosts go on
        post = dist.isend if rank == sender else dist.irecv
        peer = receiver if rank == sender else sender
        dist.batch_isend_irecv([dist.P2POp(post, torch.empty(1), peer, group)])[0].wait()
    if rank == 0:
        answer = dist.irecv(into, 1, group=back)
        own_device().need_idle()
        dist.send(out, 1, group=there)
        assert answer is not None
        answer.wait()
    else:
        dist.recv(into, 0, group=there)
        dist.send(into, 0, group=back)
    own_device().drain()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_sends_apart, "the device waits for the receive of rank"),
        (_answers_late, "cudaFree needs an idle device, which waits for the send of rank 1"),
    ],
    ids=["unbuffered", "idle"],
)
def test_what_a_device_waits_for_in_vain_is_a_lock(body: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(body, 2, strict=True, nccl_rules=False, env=SHORT, timeout_s=60)


def _dies(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(2)[:1])
    torch.ones(1).item()


def test_nothing_is_raised_where_a_peer_is_gone() -> None:
    with pytest.raises(AssertionError, match="planted") as caught:
        run_ranks(_dies, 2, strict=True, nccl_rules=False, timeout_s=60)
    assert "failed, killed by run_ranks" in str(caught.value) and "closed by peer" not in str(caught.value)


def _short_of_memory(rank: int, short: tuple[int, ...]) -> float | None:
    """A step of as many stages as ranks; on some of them every allocation needs an idle device."""
    runner, batches = lone_stages(rank, micro_batches=5)
    with own_device().allocating_by_free() if rank in short else nullcontext():
        total = runner.train(batches)
        runner.evaluate(batches)
    return None if total is None else float(total)


@pytest.mark.parametrize(
    ("world_size", "short"),
    [
        *((world_size, (rank,)) for world_size, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 2))),
        *((world_size, tuple(range(world_size))) for world_size in (2, 3, 4)),
        (3, (1, 2)),
    ],
    ids=lambda value: str(value).strip("()"),
)
def test_stages_may_give_memory_back_at_any_time(world_size: int, short: tuple[int, ...]) -> None:
    """Each waits for what it has posted: a gradient that came of a later forward would never come."""
    *_, total = run_ranks(_short_of_memory, world_size, short, strict=True)
    assert total == 5 * 64 * 4 ** (world_size - 2)


def _short_with_tied_embedding(rank: int, short: tuple[int, ...]) -> bool:
    """The weight of both ends is in a bucket of both ends, which the last stage fills first."""
    torch.set_default_dtype(torch.float64)
    middle = (0, 2, LAYERS) if dist.get_world_size() == 2 else (0, 1, 3, LAYERS)
    stages = tuple(Stage(ranks=(i,), layers=cut) for i, cut in enumerate(pairwise(middle)))
    pipeline = Pipeline(stages=stages, micro_batch_size=2, micro_batches=3)
    plan = Plan(pipelines=(pipeline,), model=PlannedModel(num_layers=LAYERS, num_heads=4, num_kv_heads=4))
    made, model = ProcessGroups(), Model(tied=True)
    groups = make_boundary_groups(plan, made)
    layers = stages[rank].layers
    assert layers is not None
    held = model.held(layers)
    # One parameter a bucket, so that each leaves as soon as it may.
    sync = AsymmetricGradientSync(
        held, pipeline_layouts(held, plan), replicas=[plan.ranks], groups=made, bucket_bytes=1
    )

    def compute(batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        loss_or_hidden: torch.Tensor = model.run(layers, batch, [(0, batch.length)], hidden)
        return loss_or_hidden

    runner = PipelineRunner(neighbours_of(plan, rank, groups, torch.device("cpu")), compute, WIDTH, torch.float64)
    (batches,) = batches_of(plan, 0)
    with own_device().allocating_by_free() if rank in short else nullcontext():
        runner.train(batches, sync)
        sync.finish()
    _, expected = one_process(plan, 0, tied=True)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt().item()
    return abs(sync.grad_norm() - norm) < 1e-12


@pytest.mark.parametrize(("world_size", "short"), [(2, (1,)), (2, (0, 1)), (3, (0, 1, 2))], ids=str)
def test_a_tied_embedding_leaves_no_stage_waiting(world_size: int, short: tuple[int, ...]) -> None:
    """The first stage has its part of the bucket after the input gradient of the last one."""
    assert all(run_ranks(_short_with_tied_embedding, world_size, short, strict=True))


def _posts_on_gloo(rank: int) -> tuple[bool, bool]:
    """What torch's own recorder of gloo says of a collective before the other rank comes to it, and after."""
    dist.barrier()
    store = distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["read"])
    work = dist.all_reduce(torch.ones(2), async_op=True)
    recorder = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    before = shows_unfinished_call(recorder(False))
    store.set("read", "")
    assert work is not None
    work.wait()
    time.sleep(0.5)
    return before, shows_unfinished_call(recorder(False))


@pytest.mark.measured  # the strict group posts to gloo later
def test_counters_of_torchs_flight_recorder_tell_what_is_not_over() -> None:
    assert run_ranks(_posts_on_gloo, 2, nccl_rules=False)[0] == (True, False)
