"""Session: rank, device, nodes, process groups and watch of calls, which every check of the self-test uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.selftest.call_watch import CallWatch


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run of the self-test on one rank; it is made once the default process group exists."""

    rank: int
    size: int
    device: torch.device
    watch: CallWatch  # sets every call a deadline
    nodes: tuple[tuple[int, ...], ...]  # ranks of every node
    quick: bool  # try fewer cases and shorter sequences
    trained_dtype: torch.dtype  # 16-bit type of training, the same on all ranks
    groups: ProcessGroups = field(default_factory=ProcessGroups)  # made by the checks, as training makes them

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a GPU; only then do checks use sequences as long as in training."""
        return self.device.type == "cuda"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of the type, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
