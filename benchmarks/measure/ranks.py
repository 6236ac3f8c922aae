"""Run functions on ranks for measurements: gloo, one kernel thread each, on emulated nodes or on loopback.

Ranks are forked from a server that has imported torch, DeepSpeed and transformers, so that they start in a second.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.emulation.network import Node

LOOPBACK = Node(None, "127.0.0.1")
Report = Callable[[float, str], None]
"""Called by rank 0: how much of its task is done, in units of the task's choice, and what it does now."""

_TIMEOUT_S = 300  # of one collective
_PR_SET_PDEATHSIG = 1
_server = multiprocessing.get_context("forkserver")


def run(
    fn: Callable[..., Any], nodes: Sequence[Node], *args: Any, on_report: Report = lambda done, now: None
) -> list[Any]:
    """Run ``fn(rank, report, *args)`` on one rank per entry of ``nodes``; return the results in rank order.

    Args:
        fn: a module-level function; the default process group exists when it is called.
        nodes: of the ranks.
        args: passed to every rank; they and the result must pickle.
        on_report: called with rank 0's arguments of ``report``.

    Raises:
        RuntimeError: a rank raised or died; with its traceback.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    _server.set_forkserver_preload(["benchmarks.measure.preload"])
    with tempfile.TemporaryDirectory(prefix="ds_hetero_ranks_") as folder:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank, node in enumerate(nodes):
                receiver, sender = _server.Pipe(duplex=False)
                process = _server.Process(
                    target=_main, args=(fn, rank, len(nodes), node, folder, sender, args), daemon=True
                )
                process.start()
                sender.close()
                ranks.append((process, receiver))
            return _collect([receiver for _, receiver in ranks], on_report)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _collect(receivers: Sequence[Connection], on_report: Report) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        for ready in wait([r for rank, r in enumerate(receivers) if rank not in results]):
            rank = receivers.index(ready)
            try:
                kind, value = receivers[rank].recv()
            except EOFError:
                kind, value = "failed", "it died without an exception"
            if kind == "report":
                on_report(*value)
            elif kind == "result":
                results[rank] = value
            else:
                raise RuntimeError(f"rank {rank} of {len(receivers)} failed:\n{value}")
    return [results[rank] for rank in range(len(receivers))]


def _main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    node: Node,
    folder: str,
    sender: Connection,
    args: Sequence[Any],
) -> None:
    """Run one rank."""
    try:
        ctypes.CDLL(None).prctl(
            _PR_SET_PDEATHSIG, signal.SIGKILL
        )  # the server ends with the parent, we with the server
        node.enter()  # before torch opens its first socket
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of deprecations in DeepSpeed and transformers, once per rank
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        result = fn(rank, lambda done, now: sender.send(("report", (done, now))), *args)
        dist.barrier()
        sender.send(("result", result))
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way out takes seconds after DeepSpeed
