"""One run of the self-test, as its checks see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
