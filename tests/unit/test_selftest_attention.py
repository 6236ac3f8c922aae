"""The self-test's error of attention: a NaN in a single gradient is an error, whatever the other tensors are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import SavedForward, Scores
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.replica import Replica
from ds_hetero.selftest.attention_case import TOLERANCE, AttentionCase, largest_error
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule


class _NanGradient(TorchKernel):
    """A kernel one of whose gradients is NaN. ``index``: of (dq, dk, dv)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, band: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = super().backward(dout, saved, scores, band)  # type: ignore[arg-type]
        gradients[self._index].fill_(math.nan)
        return gradients


def _error(kernel: TorchKernel) -> float:
    group = Group(ranks=(0,), tokens=(1,), heads=(4,))
    schedule = Schedule(num_heads=4, num_kv_heads=2, groups=(group,), layout="contiguous")
    replica = Replica(plan=Plan.of_replicas([schedule]), rank=0, sp_group=None, a2a_group=None)  # type: ignore[arg-type]
    case = AttentionCase(AttentionSpec(kernel), torch.float32, 8)
    return largest_error(case, replica, 41, torch.device("cpu"))


def test_a_right_kernel_is_within_the_tolerance() -> None:
    assert _error(TorchKernel()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["dq", "dk", "dv"])
def test_a_nan_in_a_single_gradient_is_an_error(index: int) -> None:
    assert math.isnan(_error(_NanGradient(index)))
