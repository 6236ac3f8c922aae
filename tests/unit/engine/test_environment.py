"""The environment that all ranks must share: which variables and versions are compared, and what a difference says."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from ds_hetero.common import extras
from ds_hetero.engine import same_environment
from ds_hetero.engine.same_environment import (
    COMPARED,
    HOST_VARIABLES,
    announce_hidden_waits,
    expect_same_environment,
    hidden_waits,
    own_environment,
)
from ds_hetero.errors import ConfigError


def test_variables_that_change_results_or_hang_are_compared_and_those_of_a_host_are_not() -> None:
    variables = dict.fromkeys((*COMPARED, *HOST_VARIABLES, "NCCL_ALGO", "TORCH_NCCL_BLOCKING_WAIT", "HOME"), "1")
    seen = own_environment({**variables, "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0", "DS_HETERO_X": "1"})
    names = {name.rpartition(" ")[2] for name in seen if name.startswith("environment variable")}
    assert names == {*COMPARED, "NCCL_ALGO", "TORCH_NCCL_BLOCKING_WAIT", "DS_HETERO_X"}
    assert {"version of torch", "version of deepspeed", "version of transformers", "version of ds-hetero"} <= set(seen)


def test_builds_of_one_torch_for_two_cuda_releases_are_equal_where_their_nccl_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_gpu(build: str, nccl: tuple[int, int, int]) -> dict[str, str]:
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        monkeypatch.setattr(torch, "__version__", build)
        return own_environment({})

    old, new = on_gpu("2.9.1+cu126", (2, 27, 5)), on_gpu("2.9.1+cu130", (2, 27, 5))
    assert old["version of NCCL"] == "2.27.5"
    expect_same_environment([old, new])
    with pytest.raises(ConfigError, match=r"version of NCCL: 2\.27\.5 on rank 0; 2\.28\.9 on rank 1"):
        expect_same_environment([old, on_gpu("2.9.1+cu130", (2, 28, 9))])
    with pytest.raises(ConfigError, match=r"version of torch: 2\.9\.1 on rank 0, 2; 2\.10\.0 on rank 1"):
        expect_same_environment([old, on_gpu("2.10.0+cu126", (2, 27, 5)), new])


def test_a_difference_names_variable_ranks_and_values() -> None:
    plain = own_environment({})
    with pytest.raises(ConfigError) as caught:
        expect_same_environment([plain, own_environment({"NCCL_PROTO": "LL"}), plain])
    assert "  environment variable NCCL_PROTO: not set on rank 0, 2; LL on rank 1" in str(caught.value).splitlines()


@pytest.mark.parametrize("value", ["1", "true", "Y"])
def test_blocking_waits_are_told_by_name(value: str) -> None:
    (text,) = hidden_waits({"TORCH_NCCL_BLOCKING_WAIT": value, "TORCH_FR_BUFFER_SIZE": "2000"})
    assert text.startswith(f"TORCH_NCCL_BLOCKING_WAIT={value} lets every collective block the host")


def test_a_flight_recorder_without_records_is_told_by_name() -> None:
    (text,) = hidden_waits({"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
    assert text.startswith("TORCH_NCCL_TRACE_BUFFER_SIZE=0 lets torch keep no record")
    assert hidden_waits({"TORCH_NCCL_BLOCKING_WAIT": "no"}) == hidden_waits({}) == []


def test_hidden_waits_are_told_once_by_rank_0_on_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, device = 0, "cuda"
    monkeypatch.setattr(same_environment, "default_device", lambda: torch.device(device))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    variables = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    announce_hidden_waits(variables)
    assert "TORCH_NCCL_BLOCKING_WAIT=1" in capsys.readouterr().err
    rank = 1
    announce_hidden_waits(variables)
    rank, device = 0, "cpu"
    announce_hidden_waits(variables)
    assert not capsys.readouterr().err


def test_a_release_beyond_the_tested_ranges_is_named_with_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.untested_releases() == {}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.99.0" if name == "transformers" else real(name))
    assert set(extras.untested_releases()) == {"transformers"}
    assert extras.untested_releases()["transformers"].startswith("5.99.0 (tested: ")


def test_nvidia_beside_amd_is_refused_and_why_it_can_never_work() -> None:
    nvidia, amd = {"version of NCCL": "2.30.7"}, {"version of RCCL": "2.27.0"}
    with pytest.raises(ConfigError, match=r"ranks 0, 2 on NVIDIA GPUs.*rank 1 on AMD GPUs.*Start a job for each"):
        expect_same_environment([nvidia, amd, nvidia])
