"""The Triton kernels: results in the interpreter, compilation for real GPUs, and where they are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import SHARED_KIB, Build, Resources, compile_build
from ds_hetero.runtime.attention.kernels import available
from ds_hetero.runtime.attention.kernels.triton_blocks import block_sizes, candidates

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
    assert resources.faults(build) == []
    assert resources.columns == [8]  # Ampere has no wider instruction
    assert 0 < resources.shared_bytes <= 99 * 1024


def test_the_loop_for_hopper_has_wide_instructions_and_no_spills():
    """Eight columns an instruction and masks in the loop kept the backward at 111 TFLOP/s of an H200."""
    build = Build(90, "dkv", 128, "bf16", many=False)
    resources = compile_build(build)
    assert resources.faults(build) == []
    assert resources.columns == [32, 128]
    assert resources.loop_spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [False, True])
def test_sums_apart_keep_heads_of_256_wide_on_hopper(softcap):
    build = Build(90, "dkv", 256, "bf16", many=True, softcap=softcap)
    assert build.blocks().sums_apart
    resources = compile_build(build)
    assert resources.faults(build) == []
    assert resources.columns == [32, 256]


@pytest.mark.slow
@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", ["forward", "dq", "dkv", "merge"])
def test_loops_for_heads_of_128_are_wide_and_do_not_spill_on_any_architecture(capability, name, edges):
    if name == "merge" and not edges:
        pytest.skip("it has no loop")
    dtype = "fp16" if capability < 80 else "bf16"
    build = Build(capability, name, 128, dtype, many=edges, edges=edges)
    assert compile_build(build).faults(build) == [], build


def test_what_a_card_cannot_hold_is_a_fault():
    build = Build(90, "dkv", 128, "bf16")
    spilling = Resources(
        registers=255,
        spill_bytes=120,
        loop_spill_bytes=16,
        edge_spill_bytes=8,
        shared_bytes=228 << 10,
        columns=[],
    )
    faults = ["spills 16 bytes in its loop", "233472 bytes of shared memory of 232448", "no tensor cores"]
    assert spilling.faults(build) == faults


def test_narrow_instructions_are_a_fault_where_wide_ones_exist():
    narrow = Resources(255, 0, 0, 0, 48 << 10, columns=[8, 64])
    fault = ["tensor-core instructions of 8 columns, not 32"]
    assert narrow.faults(Build(90, "dkv", 128, "bf16")) == fault
    assert narrow.faults(Build(100, "dkv", 256, "bf16")) == fault
    assert narrow.faults(Build(90, "dkv", 256, "bf16")) == fault
    narrow_dq = Resources(255, 0, 0, 0, 48 << 10, columns=[32, 128])
    assert narrow_dq.faults(Build(90, "dq", 128, "bf16")) == ["tensor-core instructions of 32 columns, not 64"]
    assert narrow_dq.faults(Build(90, "dq", 256, "bf16")) == []  # registers are full, see `triton_blocks`
    assert narrow.faults(Build(80, "dkv", 128, "bf16")) == []


def test_spills_outside_of_the_loop_are_no_fault_on_tensor_cores():
    once = Resources(255, 96, 0, 40, 48 << 10, columns=[64, 128])
    assert once.faults(Build(90, "forward", 128, "bf16")) == []


def test_the_first_candidates_are_launched():
    for capability in (80, 86, 90, 100, 120):
        for head_dim in (16, 64, 128, 256):
            launch, of_kernels = block_sizes(head_dim, capability, True), candidates(head_dim, capability, True)
            assert launch == tuple(sizes[0] for sizes in of_kernels)
            assert all(len(set(sizes)) == len(sizes) for sizes in of_kernels)


def test_a_card_between_two_of_the_table_takes_the_lower_ones_blocks():
    assert block_sizes(128, 87, True) == block_sizes(128, 86, True)
    assert block_sizes(128, 121, True) == block_sizes(128, 120, True) != block_sizes(128, 90, True)
    assert block_sizes(128, 75, True) == block_sizes(128, 90, False)  # no tensor cores in either


def test_small_spills_pass_only_without_tensor_cores():
    spilling = Resources(255, 84, 84, 0, 24 << 10, columns=[])
    assert spilling.faults(Build(75, "dkv", 128, "fp16")) == []
    assert "spills 84 bytes in its loop" in spilling.faults(Build(80, "dkv", 128, "bf16"))
