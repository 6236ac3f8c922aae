"""The Triton kernels: results in the interpreter, compilation for real GPUs, and where they are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import SHARED_KIB, Build, Resources, compile_build
from ds_hetero.runtime.attention.kernels import available
from ds_hetero.runtime.attention.kernels.triton_native import block_sizes

pytest.importorskip("triton")


def test_triton_equals_the_reference_in_the_interpreter():
    """Triton decides at its first import whether it interprets, and other tests have imported it: a fresh process."""
    file = Path(__file__).with_name("triton_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_cpu_only_in_the_interpreter(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET" in available(cpu, torch.float32, 64)["triton"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert available(cpu, torch.float32, 64)["triton"] is None
    assert "bfloat16" in available(cpu, torch.bfloat16, 64)["triton"]
    assert "256" in available(cpu, torch.float32, 512)["triton"]


@pytest.mark.parametrize(
    ("name", "many"),
    [
        pytest.param(name, many, marks=[] if many == (name != "forward") else pytest.mark.slow)
        for name in ("forward", "dq", "dkv")
        for many in (False, True)
    ],
)
def test_compiles_for_ampere_within_registers_and_shared_memory(name, many):
    """The interpreter runs what the compiler refuses; 99 KiB is what the smallest Ampere GPU has."""
    build = Build(86, name, 64, "bf16", many, softcap=True)
    resources = compile_build(build)
    assert resources.faults(build) == [] and resources.tensor_cores
    assert 0 < resources.shared_bytes <= 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", ["forward", "dq", "dkv", "merge"])
def test_heads_of_128_do_not_spill_on_any_architecture(capability, name):
    dtype = "fp16" if capability < 80 else "bf16"
    build = Build(capability, name, 128, dtype)
    assert compile_build(build).faults(build) == [], build


def test_what_a_card_cannot_hold_is_a_fault():
    build = Build(90, "dkv", 128, "bf16")
    spilling = Resources(registers=255, spill_bytes=120, shared_bytes=228 << 10, tensor_cores=False)
    assert spilling.faults(build) == ["spills 120 bytes", "233472 bytes of shared memory of 232448", "no tensor cores"]


def test_a_card_between_two_of_the_table_takes_the_lower_ones_blocks():
    assert block_sizes(128, 87, True) == block_sizes(128, 86, True)
    assert block_sizes(128, 121, True) == block_sizes(128, 120, True) != block_sizes(128, 90, True)
    assert block_sizes(128, 75, True) == block_sizes(128, 90, False)  # no tensor cores in either


def test_small_spills_pass_only_without_tensor_cores():
    spilling = Resources(registers=255, spill_bytes=84, shared_bytes=24 << 10, tensor_cores=False)
    assert spilling.faults(Build(75, "dkv", 128, "fp16")) == []
    assert "spills 84 bytes" in spilling.faults(Build(80, "dkv", 128, "bf16"))
