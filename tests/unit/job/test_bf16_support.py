"""bfloat16 on devices without hardware for it is refused at the start of a job, on every rank, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.engine.ds_config import read_training_facts
from ds_hetero.errors import ConfigError
from ds_hetero.job import start
from ds_hetero.job.bf16_support import device_without_bf16, source_of_bf16
from ds_hetero.values.section import read_section

T = TypeVar("T")
GPU = torch.device("cuda", 0)


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has a T4, for which torch was built."""
    monkeypatch.setattr(start, "default_device", lambda: GPU)
    monkeypatch.setattr(start, "describe_capabilities", lambda facts, rank: "a T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")


class _BesideAmpere(start.World):
    """A world whose first rank has a GPU with bfloat16 and whose others are as this one."""

    def on_all_ranks(self, compute: Callable[[], T]) -> list[T]:
        found: Any = compute()
        facts, _, _, *capabilities = found
        ampere: Any = (facts, None, "NVIDIA A100", *capabilities)
        return [ampere, *(compute() for _ in range(self.size - 1))]


def _facts(training: TrainingFacts, dtype: str = "float32") -> JobFacts:
    section = read_section({"schedule": "ring"})
    assert section is not None
    return JobFacts(
        section=section,
        model=ModelFacts(name="m", num_heads=4, num_kv_heads=2, dtype=dtype, head_dim=64),
        training=training,
    )


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "bf16": ({"bf16": {"enabled": True}}, "float32", '"bf16" in ds_config.json'),
    "former name": ({"bfloat16": {"enabled": True}}, "float32", '"bf16" in ds_config.json'),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}},
        "float32",
        '"torch_autocast" in ds_config.json',
    ),
    "the model's own": ({}, "bfloat16", "the type of the model's parameters"),
}


@pytest.mark.usefixtures("t4")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rank", [0, 2])
def test_bf16_is_refused_on_every_rank_by_ranks_devices_and_what_asks_for_it(name: str, rank: int) -> None:
    config, dtype, source = CONFIGS[name]
    facts = _facts(read_training_facts(config), dtype)
    said = rf'{re.escape(source)}\), .*: ranks 1, 2: Tesla T4\. .*Train in fp16 \("fp16": .* leave these'
    with pytest.raises(ConfigError, match=said):
        start.agree_on_facts(_BesideAmpere(rank, 3), lambda: facts)


@pytest.mark.usefixtures("t4")
def test_pipelines_are_not_told_to_train_in_fp16_which_they_refuse() -> None:
    facts = _facts(read_training_facts({"bf16": {"enabled": True}}))
    with pytest.raises(ConfigError, match=r'Pipelines do not train in fp16: train in fp32 \(without "bf16"'):
        start.agree_on_facts(_BesideAmpere(0, 2), lambda: facts, in_pipelines=True)


@pytest.mark.usefixtures("t4")
def test_a_model_without_our_attention_is_refused_as_well() -> None:
    facts = _facts(read_training_facts({"bf16": {"enabled": True}}))
    with pytest.raises(ConfigError, match=r"ranks? 1: Tesla T4"):
        start.agree_on_facts(_BesideAmpere(0, 2), lambda: facts, has_kernel=False)


@pytest.mark.usefixtures("t4")
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"fp16": {"enabled": True}}, "bfloat16"),  # DeepSpeed turns the parameters to fp16
        ({"fp16": {"enabled": True}}, "float32"),
        ({"torch_autocast": {"enabled": True}}, "float32"),  # torch's autocast is in float16 on GPUs
        ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, "float32"),
        ({}, "float16"),
        ({}, "float32"),
    ],
)
def test_what_does_not_need_bf16_trains_there(config: dict[str, Any], dtype: str) -> None:
    facts = _facts(read_training_facts(config), dtype)
    assert source_of_bf16(facts) is None
    agreed = start.agree_on_facts(_BesideAmpere(1, 2), lambda: facts)
    assert agreed == replace(facts, attention_rates=agreed.attention_rates)


def test_a_cpu_and_an_ampere_gpu_compute_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _facts(read_training_facts({"bf16": {"enabled": True}}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert device_without_bf16(facts, torch.device("cpu")) is device_without_bf16(facts, GPU) is None
