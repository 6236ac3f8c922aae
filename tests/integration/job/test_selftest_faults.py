"""What the self-test's checks see: a fault is planted under each, on one rank, and its line fails, and no other does.

Each test runs one check on two ranks, without the rest of the command. Budget: 40 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hetero.selftest.lines import Line, merge
from tests.support import ROOT, run_deepspeed

Patch = pytest.MonkeyPatch


def _lines_of(rank: int, checks: Sequence[str], fault: str = "") -> list[Line]:
    """Lines of this rank of some checks, where rank 1 has the fault."""
    from ds_hetero.selftest import run
    from ds_hetero.selftest.call_watch import CallWatch
    from ds_hetero.selftest.session import Session
    from ds_hetero.selftest.store_connection import connect_to_store

    limit_s = 3.0 if fault in SHORT else 60.0
    connection, aside = connect_to_store(60.0)
    device = torch.device("cpu")
    watch = CallWatch(aside, device, limit_s, lambda failure, standing: print(failure, standing))
    run._make_process_group(connection, device, 60.0)
    session = Session(
        rank=rank,
        size=connection.size,
        device=device,
        watch=watch,
        nodes=(tuple(range(connection.size)),),
        quick=True,
        trained_dtype=torch.bfloat16,
    )
    with Patch.context() as patch:
        if fault and (rank == 1 or fault in OF_ALL_RANKS):
            FAULTS[fault](patch)
        lines = [line for check in checks for line in run.CHECKS[check](session)]
    watch.close()
    dist.barrier()
    return lines


def _scaled(patch: Patch, owner: Any, name: str, is_hit: Callable[..., bool] = lambda *call: True) -> None:
    """What a function returns, a tensor or the first of several, becomes a quarter larger where ``is_hit``."""
    right = getattr(owner, name)

    def wrong(*call: Any, **further: Any) -> Any:
        result = right(*call, **further)
        if is_hit(*call):
            first = result if isinstance(result, torch.Tensor) else result[0]
            first.mul_(1.25)
        return result

    patch.setattr(owner, name, wrong)


def _kernel_in_16_bits(patch: Patch) -> None:
    from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel

    _scaled(patch, TorchKernel, "forward", lambda kernel, q, *block: q.dtype is torch.bfloat16)


def _kernel_of_long_blocks(patch: Patch) -> None:
    from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel

    _scaled(patch, TorchKernel, "forward", lambda kernel, q, k, *block: max(k.shape) > 512)


def _lost_keys(patch: Patch) -> None:
    from ds_hetero.runtime.attention.channel import _Pending

    right = _Pending.wait

    def wait(pending: Any) -> None:
        tensors = pending._tensors
        right(pending)
        for tensor in tensors:
            tensor.zero_()

    patch.setattr(_Pending, "wait", wait)


def _lost_sum(patch: Patch) -> None:
    """Of several contributors to a gradient the last one is not added."""
    from ds_hetero.gradient_sync.bucket_transfer import BucketTransfer

    right = BucketTransfer.reduced

    def reduced(transfer: Any) -> Any:
        rows = right(transfer).clone()
        if len(rows) > 1:
            rows[-1] = 0
        return rows

    patch.setattr(BucketTransfer, "reduced", reduced)


def _unweighted_reduce(patch: Patch) -> None:
    from ds_hetero.frameworks.deepspeed.zero import stage3, weighted_gathering

    for module in (stage3, weighted_gathering):  # the self-test calls the one where it is, training the other
        _scaled(patch, module, "reduce_to_owners")


def _lost_node(patch: Patch) -> None:
    """What other nodes have added up does not come home."""
    from ds_hetero.frameworks.deepspeed.zero import nodes

    patch.setattr(nodes, "copy_into", lambda targets, arrived: None)


def _stale_activations(patch: Patch) -> None:
    from ds_hetero.runtime.pipeline.stage_transfers import Receiving

    _scaled(patch, Receiving, "wait")


def _uneven_gather(patch: Patch) -> None:
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering

    right = Gathering.wait

    def wait(gathering: Any) -> Any:
        whole = right(gathering)
        sizes = gathering._cuts[0].sizes
        return whole if len(set(sizes)) == 1 else [flat.roll(1) for flat in whole]

    patch.setattr(Gathering, "wait", wait)


def _large_messages(patch: Patch) -> None:
    """A communicator loses the end of what is large."""
    right = dist.batch_isend_irecv

    def batch(operations: Any) -> Any:
        works = right(operations)
        for work in works:
            work.wait()
        for operation in operations:
            if operation.op is dist.irecv and operation.tensor.numel() > 1000:
                operation.tensor[-1000:] = 0
        return []

    patch.setattr(dist, "batch_isend_irecv", batch)


def _silent_survivors(patch: Patch) -> None:
    from ds_hetero.selftest import killed_rank

    patch.setattr(killed_rank, "_COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])


def _survivors_without_a_name(patch: Patch) -> None:
    from ds_hetero.selftest import killed_rank

    code = (
        "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL); raise OSError('reset')"
    )
    patch.setattr(killed_rank, "_COMMAND", [sys.executable, "-c", code])


FAULTS: dict[str, Callable[[Patch], None]] = {
    "a kernel in 16 bits": _kernel_in_16_bits,
    "a kernel of long blocks": _kernel_of_long_blocks,
    "lost keys": _lost_keys,
    "a lost sum": _lost_sum,
    "a wrong reduce": _unweighted_reduce,
    "a lost node": _lost_node,
    "stale activations": _stale_activations,
    "a wrong gather": _uneven_gather,
    "large messages": _large_messages,
    "survivors that stay": _silent_survivors,
    "survivors without a name": _survivors_without_a_name,
}
OF_ALL_RANKS = ("a lost sum", "survivors that stay", "survivors without a name")  # whoever owns it
SHORT = ("survivors that stay",)


@pytest.mark.parametrize(
    ("check", "fault", "failing", "said"),
    [
        ("kernels", "a kernel of long blocks", {"kernel torch"}, "601 tokens: off by"),
        (
            "exchange and ring",
            "a kernel in 16 bits",
            {"ragged exchange, bfloat16", "ring, bfloat16"},
            "of the largest value, allowed 3e-02",
        ),
        ("documents", "lost keys", {"documents with routes"}, "of the largest value, allowed"),
        ("gradient sync", "a lost sum", {"gradient sync"}, "other sums than of both replicas in rows, columns, flat"),
        (
            "training",
            "a wrong reduce",
            {"training step, ZeRO-3 by weights, bfloat16", "training step, ZeRO-3 inside nodes, bfloat16"},
            "is off by",
        ),
        ("training", "a lost node", {"training step, ZeRO-3 inside nodes, bfloat16"}, "is off by"),
        ("pipelines", "stale activations", {"pipeline step", "pipeline step, tied embedding"}, "is off by"),
        ("pipelines", "a lost sum", {"pipeline step, tied embedding"}, "is off by"),
        ("uneven partitions", "a wrong gather", {"uneven gather of ZeRO-3"}, "in uneven parts"),
        ("uneven partitions", "a wrong reduce", {"uneven reduce of ZeRO-3"}, "in uneven and even parts"),
        (
            "communicators",
            "large messages",
            {"megabytes over communicators"},
            "communicator 0, ranks 0, 1 (all ranks): on rank 1",
        ),
        ("a killed rank", "survivors that stay", {"killed rank"}, "rank 0 did not end after rank 1 was killed"),
        (
            "a killed rank",
            "survivors without a name",
            {"killed rank"},
            "rank 0 ended with 1, and does not name it: reset",
        ),
    ],
)
def test_a_planted_fault_fails_its_line_and_no_other(check: str, fault: str, failing: set[str], said: str) -> None:
    lines = merge(run_deepspeed(_lines_of, 2, [check], fault))
    failed = [line for line in lines if line.status == "fail"]
    assert {line.name for line in failed} == failing, lines
    assert all(said in line.detail for line in failed), failed


def test_a_process_that_is_to_be_killed_ends_with_the_rank_that_has_started_it() -> None:
    """A self-test that ends early, by a signal or by its watch, leaves no process on the device."""
    from ds_hetero.selftest import killed_rank

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment = {**os.environ, **variables, "LOCAL_RANK": "1", "DS_ACCELERATOR": "cpu", killed_rank._STORE: "planted"}
    process = subprocess.Popen(killed_rank._COMMAND, stdin=subprocess.PIPE, env=environment, cwd=ROOT)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # it imports, and then waits for rank 0
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60.0) == 1
    finally:
        process.kill()
        process.wait()


def test_one_process_says_what_it_cannot_try() -> None:
    checks = ("exchange and ring", "documents", "gradient sync", "pipelines", "uneven partitions", "communicators")
    (lines,) = run_deepspeed(_lines_of, 1, [*checks, "a killed rank"])
    assert len(lines) == len(checks) + 1
    assert {line.status for line in lines} == {"skip"} and all(line.detail for line in lines)
