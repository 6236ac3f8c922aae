"""Memory that a device loses to process groups, step by step."""

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
    """What the cost model counts for a communicator of two ranks, with collectives and messages between them.

    It counts the channels of two such cards in a node; two ranks on one card may have fewer.

    Args:
        card: name, as torch gives it; None is returned where `counted_bytes` does not know.
    """
    counted = counted_bytes(card, 2)
    return None if counted is None else counted / 2**20


class MemoryOfDevice:
    """Bytes in use on the device by all its processes, tensors left aside; of this process's, on CPUs.

    Args:
        world: of all ranks, connected before the first reading.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last = self._read()

    def after(self, group: int, step: str, do: Callable[[], Any]) -> Any:
        """Do a step of a group, by its number, on all ranks, and report how much more a rank then has."""
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
