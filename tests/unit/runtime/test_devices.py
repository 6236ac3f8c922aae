"""Which device a rank computes on, what is refused of it, and what is said of it, with stand-ins for hardware."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.errors import ConfigError
from ds_hetero.job import start
from ds_hetero.job.start import capability_lines, describe_capabilities, expect_known_devices, requested_kernel
from ds_hetero.runtime.devices import default_device, default_dtype, has_native_bf16
from ds_hetero.values.section import KernelWish, read_section


@pytest.mark.parametrize("kind", ["xpu", "npu", "hpu", "mps"])
def test_an_accelerator_without_kernels_is_refused_by_name_and_not_taken_for_a_cpu(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type=kind))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(ConfigError, match=rf"accelerator is {kind.upper()}; .* Set DS_ACCELERATOR=cpu"):
        default_device()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert default_device().type == "cpu"


def test_a_build_for_gpus_uses_the_cpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names the accelerator that it was built for, unless it is asked for one that is there."""

    def current_accelerator(check_available: bool = False) -> SimpleNamespace | None:
        return None if check_available else SimpleNamespace(type="cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert default_device().type == "cpu"


@pytest.mark.parametrize(("capability", "native"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bfloat16_is_native_from_ampere_on(
    capability: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert has_native_bf16(device) is native
    assert default_dtype(device) is (torch.bfloat16 if native else torch.float16)


def _facts(dtype: str, **section: Any) -> JobFacts:
    read = read_section({"schedule": "ring", **section})
    assert read is not None
    return JobFacts(
        section=read,
        model=ModelFacts(name="m", num_heads=4, num_kv_heads=2, dtype=dtype, head_dim=64),
        training=TrainingFacts(),
    )


def test_ranks_that_are_unlike_are_told_with_what_each_can() -> None:
    own = describe_capabilities(_facts("float32"), 0)
    assert own == f"CPU, attention by torch, bfloat16 native, torch {torch.__version__}"
    assert capability_lines([own, own]) == []
    assert capability_lines([own, "T4", own]) == [f"ranks 0, 2: {own}", "rank 1: T4"]
    assert "attention by triton" not in describe_capabilities(_facts("float32", attention="torch"), 0)


def test_a_kernel_is_named_by_rank_or_by_a_part_of_the_devices_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested_kernel("torch", 3) == "torch"
    assert [requested_kernel(["torch", None], rank) for rank in range(2)] == ["torch", None]
    monkeypatch.setattr(start, "device_name", lambda: "Tesla V100-SXM2-16GB")
    assert requested_kernel({"v100": "torch", "A100": "flash_attn"}, 0) == "torch"
    assert requested_kernel({"A100": "flash_attn"}, 0) is None
    expect_known_devices({"V100": "torch"}, ["Tesla V100-SXM2-16GB", "CPU"])


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["torch"], r'"heterogeneity.attention" names kernels for 1 ranks, and this is rank 1\. Give it one entry'),
        ({"V100": "torch", "Tesla": "triton"}, r"'V100' and 'Tesla' are both parts of the name of rank 1's device"),
    ],
)
def test_a_kernel_that_is_named_twice_or_not_at_all_is_refused(
    monkeypatch: pytest.MonkeyPatch, wish: KernelWish, said: str
) -> None:
    monkeypatch.setattr(start, "device_name", lambda: "Tesla V100-SXM2-16GB")
    with pytest.raises(ConfigError, match=said):
        requested_kernel(wish, 1)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["torch"] * 3, r'"heterogeneity.attention" has 3 entries; there are 2 ranks\.'),
        ({"V10": "torch", "H100": "flash_attn"}, r'"H100" is not part of any device.s name\. They are Tesla V100, CPU'),
    ],
)
def test_kernels_for_devices_that_are_not_there_are_refused(wish: KernelWish, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        expect_known_devices(wish, ["Tesla V100", "CPU"])


def test_a_kernel_that_does_not_work_here_is_refused_at_the_start_whatever_the_schedule() -> None:
    with pytest.raises(
        ConfigError, match=r'heterogeneity\.attention = "flash_attn" does not work here: flash-attn runs'
    ):
        start.agree_on_facts(start.World(0, 1), lambda: _facts("bfloat16", attention="flash_attn"))
