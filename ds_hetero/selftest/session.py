"""One run of the self-test, as its checks see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.selftest.call_watch import CallWatch


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of the self-test on one rank, once the default process group exists."""

    rank: int
    size: int
    device: torch.device
    watch: CallWatch  # sets every call a deadline
    nodes: tuple[tuple[int, ...], ...]  # by node, its ranks
    quick: bool
    trained_dtype: torch.dtype  # the 16-bit type that models are trained in on these devices, the same on all ranks
    groups: ProcessGroups = field(default_factory=ProcessGroups)  # made by the checks, as training makes them

    @property
    def is_on_gpu(self) -> bool:
        """Whether there is speed enough for the lengths of training."""
        return self.device.type == "cuda"


def dtype_name(dtype: torch.dtype) -> str:
    """Name of the type, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
