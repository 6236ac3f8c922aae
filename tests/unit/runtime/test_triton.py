"""The Triton kernels: results in the interpreter, compilation for real GPUs, and where they are refused."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


_FLOATS = ("inner", "outer", "scale")
_ACCUMULATED = ("LSE", "DELTA", "DQ", "DK", "DV")


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", ["forward", "dq", "dkv"])
def test_compiles_for_ampere_within_shared_memory(name, many, tmp_path, monkeypatch):
    """The interpreter runs what the compiler refuses; 99 KiB is what the smallest Ampere GPU has."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    kernel = getattr(importlib.import_module("ds_hetero.runtime.attention.kernels.triton_kernels"), f"{name}_kernel")
    blocks = getattr(block_sizes(64, True), name)
    constants = {"HEAD_DIM": 64, "BLOCK_Q": blocks.queries, "BLOCK_K": blocks.keys, "BLOCK_D": 64, "SOFTCAP": True}
    constants["MANY"] = many

    def type_of(argument):
        if argument in constants:
            return "constexpr"
        if argument == "TABLE":
            return "*i32" if many else "*bf16"
        if argument.isupper():
            return "*fp32" if argument in _ACCUMULATED else "*bf16"
        return "fp32" if argument in _FLOATS else "i32"

    source = ASTSource(
        kernel,
        {argument: type_of(argument) for argument in kernel.arg_names},
        {(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, argument in enumerate(kernel.arg_names)
            if argument not in constants and (argument.isupper() or argument.startswith("stride"))
        },
    )
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    compiled = compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    assert compiled.metadata.shared <= 99 * 1024
    assert "mma.sync" in compiled.asm["ptx"], "tensor cores are not used"
