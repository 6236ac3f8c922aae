"""What every check is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_hetero.selftest.watch import Watch

__all__ = ["Session"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of the self-test on one rank, once the default process group exists.

    Args:
        rank: of this process.
        size: ranks of the job.
        device: of this rank.
        watch: sets every call a deadline.
        nodes: by node, its ranks.
        quick: leave out what repeats.
    """

    rank: int
    size: int
    device: torch.device
    watch: Watch
    nodes: tuple[tuple[int, ...], ...]
    quick: bool
