"""Measure the device memory that process groups take, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.first_gpu.parts import Context, Row
from ds_hetero.selftest.communicator_memory import counted_bytes


def counted_mib(card: str) -> float | None:
    """Return the MiB of the cost model for a communicator of two ranks, with collectives and messages.

    The model counts the channels of two such GPUs in a node; two ranks on one GPU may have fewer.

    Args:
        card: name of the GPU, as torch gives it; None is returned if `counted_bytes` does not know it.
    """
    counted = counted_bytes(card, 2)
    return None if counted is None else counted / 2**20


class MemoryOfDevice:
    """Bytes in use on the device by all its processes, without tensors; on CPUs those of this process.

    Args:
        world: group of all ranks, connected before the first reading.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last = self._read()

    def after(self, group: int, step: str, do: Callable[[], Any]) -> Any:
        """Run a numbered step of a group on all ranks, and report the increase of each rank's memory."""
        result = do()
        self._context.synchronize()
        dist.barrier()
        self._context.synchronize()
        now = self._read()
        row: Row = {"group": group, "step": step, "mib_per_rank": (now - self._last) / self._context.ranks / 2**20}
        dist.barrier()
        self._last = now
        if self._context.rank == 0:
            self._context.report(row)
        return result

    def _read(self) -> float:
        if self._context.device.type != "cuda":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * float(os.sysconf("SC_PAGE_SIZE")) * self._context.ranks
        free, total = torch.cuda.mem_get_info(self._context.device)
        return float(total - free - torch.cuda.memory_reserved(self._context.device) * self._context.ranks)
