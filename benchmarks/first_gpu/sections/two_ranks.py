"""Section "two_ranks": communication of two ranks on one GPU over NCCL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.first_gpu.groups_memory import MemoryOfDevice, counted_mib
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.first_gpu.small_pipeline import largest_difference, lone_stages, plan_of
from benchmarks.measure.device_timing import median_s

RIGHT = 1e-4  # largest difference in fp32: sums in another order, and TF32 is off
_CLIP = 1.0
_WAITS_FOR_EVER = {"STRICT_GROUP_LOCK_S": "0"}  # in a rehearsal as on a card: the part's limit ends it


# --- pipelines


def pipeline_unconnected(context: Context) -> None:
    """Train as before the review: no pair is connected first, and gradients are requested before forwards."""
    with _as_before():
        _train_pipeline(context, tied=False)


def pipeline(context: Context) -> None:
    """Train a pipeline of two stages whose embedding and head are not tied."""
    _train_pipeline(context, tied=False)


def tied_pipeline(context: Context) -> None:
    """Train a pipeline whose embedding is its head, so that the first and the last stage share a bucket."""
    _train_pipeline(context, tied=True)


def _train_pipeline(context: Context, tied: bool) -> None:
    """Train one step of a pipeline; report its differences from one process."""
    context.join()
    context.report({"step": "begins"})
    began_s = time.monotonic()
    row: Row = {"step": "ended", **largest_difference(plan_of(lone_stages(context.ranks)), context.device, tied)}
    row["right"] = max(row["loss_difference"], row["weight_difference"]) <= RIGHT
    context.report(row | {"step_s": time.monotonic() - began_s})


@contextmanager
def _as_before() -> Iterator[None]:
    from ds_hetero.runtime.pipeline import runner
    from ds_hetero.runtime.process_groups import Connections

    class EagerInbox(runner._Inbox):
        """An inbox that requests messages as soon as it is made."""

        def __init__(self, boundary: Any, batches: Any, width: int, dtype: torch.dtype) -> None:
            super().__init__(boundary, batches, width, dtype)
            self.post_receives(len(batches))

    with (
        mock.patch.object(Connections, "make", lambda self, pairs: None),
        mock.patch.object(runner, "_Inbox", EagerInbox),
    ):
        yield


def posted_receive(context: Context) -> None:
    """Report whether a receive that waits for its peer keeps this rank from returning memory to the driver."""
    context.join()
    late_s = context.choose(4.0, 0.5)
    element = torch.zeros(1, device=context.device)
    _message(context, element)  # connects
    dist.barrier()
    if context.rank == 1:
        time.sleep(late_s)
        _message(context, element)
        return
    torch.empty(64 * 2**20, dtype=torch.uint8, device=context.device)  # which the allocator keeps
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, element, 1)])
    began_s = time.monotonic()
    _give_memory_back(context)
    waited_s = time.monotonic() - began_s
    for work in works:
        work.wait()
    context.report({"late_s": late_s, "waited_s": waited_s, "blocks": waited_s > late_s / 2})


def _message(context: Context, element: torch.Tensor) -> None:
    """Send a message from rank 1 to rank 0."""
    operation = dist.P2POp(dist.isend, element, 0) if context.rank == 1 else dist.P2POp(dist.irecv, element, 1)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    context.synchronize()


def _give_memory_back(context: Context) -> None:
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        return
    from tests.strict_group import own_device

    own_device().need_idle()


# --- attention and ZeRO


def attention(context: Context) -> None:
    """Compare an uneven all-to-all and a ring with float64.

    In the training type, on lengths that are no multiple of a tile.
    """
    from ds_hetero.runtime.attention.attention import AttentionSpec
    from ds_hetero.runtime.attention.kernels import select
    from ds_hetero.runtime.process_groups import ProcessGroups
    from ds_hetero.runtime.replica import make_replica
    from ds_hetero.selftest.attention_case import TOLERANCE, AttentionCase, largest_error
    from ds_hetero.selftest.uneven_schedules import uneven_schedules
    from ds_hetero.values.plans import Plan

    context.join()
    groups, length = ProcessGroups(), context.choose(4099, 79)
    dtype = context.half
    kernel = select(context.device, dtype, 64, None, None)
    for name, schedule in uneven_schedules(context.ranks).items():
        replica = make_replica(Plan.of_replicas([schedule]), groups)
        began_s = time.monotonic()
        error = largest_error(AttentionCase(AttentionSpec(kernel), dtype, 64), replica, length, context.device)
        row: Row = {"schedule": name, "kernel": kernel.name, "tokens": length, "error": error}
        context.report(row | {"right": error <= TOLERANCE[dtype], "step_s": time.monotonic() - began_s})


def zero_3(context: Context) -> None:
    """Compare a weighted ZeRO-3 step behind DeepSpeed with one process, in float32, with the installed releases."""
    from benchmarks.first_gpu.lifted import lift_checks

    lifted = lift_checks()
    import ds_hetero
    from ds_hetero.frameworks.deepspeed.small_job import train_one_step
    from ds_hetero.frameworks.transformers.model.small_llama import VOCAB_SIZE, small_llama
    from ds_hetero.values.baselines import ulysses

    context.join()
    length, heads = 48 * context.ranks, 2 * context.ranks
    ids = torch.randint(0, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    alone = small_llama(heads, heads, length).to(context.device)
    loss = alone(**{name: entry.to(context.device) for name, entry in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), _CLIP)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _CLIP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "heterogeneity": {
            "schedule": ulysses(context.ranks, heads, heads).to_dict(),
            "zero_partition": [3.0, *[1.0] * (context.ranks - 1)],
        },
    }
    model = small_llama(heads, heads, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    began_s = time.monotonic()
    step = train_one_step(ds_hetero.register(), model, optimizer, batch, config)
    row: Row = {"loss_difference": abs(step.loss - loss.item()), "step_s": time.monotonic() - began_s}
    expected = {name: (p - p.grad).detach().float().cpu() for name, p in alone.named_parameters() if p.grad is not None}
    row["weight_difference"] = max(float((step.parameters[name] - expected[name]).abs().max()) for name in expected)
    row["right"] = max(row["loss_difference"], row["weight_difference"]) <= RIGHT
    context.report(row | {"lifted": lifted})


# --- process groups


def memory_of_groups(context: Context) -> None:
    """Report the bytes that each communicator takes when it is made, used, and connected pair by pair."""
    context.join()
    dist.barrier()
    if context.rank == 0:
        card = context.choose(torch.cuda.get_device_name, lambda: "H100-SXM-80GB")()
        context.report({"step": "as the cost model counts", "counted_mib": counted_mib(card)})
    memory = MemoryOfDevice(context)
    large = torch.zeros(2**24, dtype=torch.uint8, device=context.device)
    memory.after(0, "a tensor, which does not count", lambda: large.add_(1))
    for number in (1, 2, 3):
        group = memory.after(number, "made", dist.new_group)
        memory.after(number, "first all_reduce", partial(dist.all_reduce, large, group=group))
        for sender in range(context.ranks):
            to_next = partial(_message_on, context, group, large, sender)
            memory.after(number, f"first message from rank {sender}", to_next)
        memory.after(number, "first all_to_all", partial(_all_to_all, large, group))


def _message_on(context: Context, group: Any, tensor: torch.Tensor, sender: int) -> None:
    receiver = (sender + 1) % context.ranks
    if context.rank == sender:
        operations = [dist.P2POp(dist.isend, tensor, receiver, group)]
    elif context.rank == receiver:
        operations = [dist.P2POp(dist.irecv, tensor, sender, group)]
    else:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _all_to_all(tensor: torch.Tensor, group: Any) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)


def unequal_collectives(context: Context) -> None:
    """Report rates of gathers and reduces: equal parts in one call and as a list, unequal parts as a list."""
    from ds_hetero.runtime.backends import gathers_unequal_parts

    context.join()
    dist.barrier()
    ranks = context.ranks
    for mebibytes in context.choose((16, 256), (1,)):
        total = mebibytes * 2**20 // 2 // (4 * ranks) * 4 * ranks
        equal = [total // ranks] * ranks
        unequal = [total - total // 4 // (ranks - 1) * (ranks - 1), *[total // 4 // (ranks - 1)] * (ranks - 1)]
        times = {
            "one call": _gather(context, equal, is_list=False),
            "list of equal parts": _gather(context, equal, is_list=True),
        }
        if gathers_unequal_parts():
            times["list of unequal parts"] = _gather(context, unequal, is_list=True)
        else:
            times["broadcasts of unequal parts"] = _broadcast(context, unequal)
        _report_times(context, "gather", mebibytes, times)
        times = {
            "one call": _reduce(context, equal, is_list=False),
            "list of equal parts": _reduce(context, equal, is_list=True),
            "list of unequal parts": _reduce(context, unequal, is_list=True),
        }
        _report_times(context, "reduce", mebibytes, times)


def _report_times(context: Context, kind: str, mebibytes: int, times: dict[str, float]) -> None:
    if context.rank:
        return
    one_call_s = times["one call"]
    for how, seconds in times.items():
        row: Row = {"collective": kind, "how": how, "mebibytes": mebibytes, "ms": 1e3 * seconds}
        context.report(row | {"gb_per_s": mebibytes * 2**20 / seconds / 1e9, "of_one_call": seconds / one_call_s})


def _buffer(context: Context, sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    flat = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=context.device)
    return flat, list(flat.split(sizes))


def _gather(context: Context, sizes: list[int], is_list: bool) -> float:
    flat, parts = _buffer(context, sizes)
    local_part = parts[context.rank].clone()

    def call() -> None:
        if is_list:
            dist.all_gather(parts, local_part)
        else:
            dist.all_gather_into_tensor(flat, local_part)

    return _timed_together(context, call)


def _broadcast(context: Context, sizes: list[int]) -> float:
    _, parts = _buffer(context, sizes)

    def call() -> None:
        works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]
        for work in works:
            work.wait()

    return _timed_together(context, call)


def _reduce(context: Context, sizes: list[int], is_list: bool) -> float:
    flat, parts = _buffer(context, sizes)
    local_part = parts[context.rank].clone()

    def call() -> None:
        if is_list:
            dist.reduce_scatter(local_part, parts)
        else:
            dist.reduce_scatter_tensor(local_part, flat)

    return _timed_together(context, call)


def _timed_together(context: Context, call: Callable[[], None]) -> float:
    dist.barrier()
    return median_s(context.device, call, *context.choose((5, 2), (1, 1)))


# --- the self-test, and a rank that dies


def selftest(context: Context) -> None:
    """Run ``ds-hetero selftest --quick --timeout-s 10`` on these ranks; report a row for each of its lines at once."""
    from benchmarks.first_gpu.lifted import lift_checks
    from ds_hetero.selftest.lines import Line
    from ds_hetero.selftest.report import redacted
    from ds_hetero.selftest.run import Options, run

    def report(line: Line) -> None:
        # A line of all ranks is known to each of them. One that ends the test is known to one rank alone.
        if context.rank == 0 or line.status == "fail":
            context.report({"name": line.name, "status": line.status, "detail": redacted(line.detail)})

    lift_checks()
    options = Options(
        quick=True,
        measure=False,
        limit_s=context.choose(10.0, 60.0),  # a call that hangs has to end before the part does
        out=None,
        as_json=None,
        with_host_names=False,
        on_line=report,
    )
    if not run(options):
        raise RuntimeError("the self-test has failed")


def lost_rank(context: Context) -> None:
    """Kill rank 1 while the others read a number that it would send; NCCL never gives it to them.

    The entry of the part has the time at which each rank ended.
    """
    from ds_hetero.runtime.collectives import messages_group

    context.join()
    messages_group()  # starts the watch over the other ranks
    number = torch.ones(1, device=context.device)
    for _ in range(3):
        dist.all_reduce(number)
        number.fill_(number.item() / context.ranks)
    context.report({"step": "all ranks have met"})
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(number)
    number.item()
    context.report({"step": "no rank was missed"})


SECTION = Section(
    name="two_ranks",
    budget_s=120,
    decides="whether pipelines run over NCCL, what groups cost, and whether a lost rank is seen",
    parts=(
        Part(name="pipeline", run=pipeline, ranks=2, limit_s=25, strict=True),
        Part(name="tied pipeline", run=tied_pipeline, ranks=2, limit_s=25, strict=True),
        Part(
            name="pipeline as before",
            run=pipeline_unconnected,
            without_mps=True,
            ranks=2,
            limit_s=20,
            rehearsed_limit_s=5,
            outcomes=("done", "timed out", "left out"),
            strict=True,
            rehearsed_env=_WAITS_FOR_EVER,
        ),
        Part(name="posted receive", run=posted_receive, ranks=2, limit_s=20, strict=True),
        Part(name="attention", run=attention, ranks=2, limit_s=25, strict=True),
        Part(name="ZeRO-3", run=zero_3, ranks=2, limit_s=40),
        Part(
            name="memory of groups",
            run=memory_of_groups,
            ranks=2,
            limit_s=25,
            unrehearsed="memory of the device: that of the process stands for it",
        ),
        Part(
            name="unequal collectives",
            run=unequal_collectives,
            ranks=2,
            limit_s=25,
            unrehearsed="gathers of unequal parts: gloo has none",
        ),
        Part(
            name="lost rank",
            run=lost_rank,
            without_mps=True,
            ranks=2,
            limit_s=35,
            grace_s=30,
            outcomes=("failed", "left out"),
            strict=True,
            rehearsed_env=_WAITS_FOR_EVER,
        ),
        Part(name="self-test", run=selftest, without_mps=True, ranks=2, limit_s=60, rehearsed_limit_s=120),
    ),
)
