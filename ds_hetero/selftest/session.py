"""One run of the self-test, as its checks see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_hetero.runtime.devices import has_native_bf16
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
    groups: ProcessGroups = field(default_factory=ProcessGroups)  # made by the checks, as training makes them

    @property
    def trained_dtype(self) -> torch.dtype:
        """The 16-bit type that models are trained in on this device; on CPUs too, where it is slow."""
        return torch.bfloat16 if has_native_bf16(self.device) else torch.float16

    @property
    def is_on_gpu(self) -> bool:
        """Whether there is speed enough for the lengths of training."""
        return self.device.type == "cuda"


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
