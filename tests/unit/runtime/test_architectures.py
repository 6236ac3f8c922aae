"""Which GPUs a build of torch has code for."""

from __future__ import annotations

import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.architectures import expect_built_for, runs_on

USUAL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # as of torch's usual wheels for CUDA 13


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), USUAL, False),  # V100
        ((6, 1), USUAL, False),  # P40
        ((8, 9), USUAL, True),  # RTX 4090, by sm_86's code
        ((8, 7), ["sm_89"], False),  # an earlier minor version
        ((10, 3), USUAL, True),
        ((10, 0), ["sm_90", "compute_90"], True),  # made by the driver
        ((10, 0), ["sm_90a"], False),  # for Hopper alone
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),  # not known
    ],
)
def test_code_runs_on_its_architecture_and_on_later_ones_where_cuda_says_so(capability, built, runs):
    assert runs_on(capability, built) is runs


def test_a_gpu_without_code_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: USUAL)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    with pytest.raises(ConfigError, match=r"no code for Tesla V100-SXM2-16GB \(sm_70\).* built for sm_75, sm_80"):
        expect_built_for(torch.device("cuda", 0))
    expect_built_for(torch.device("cpu"))
