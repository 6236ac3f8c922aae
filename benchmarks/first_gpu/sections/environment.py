"""Section "environment": describe machine and software, and start what later sections need."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.first_gpu import mps
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.first_gpu.runner import ENV
from benchmarks.first_gpu.triton_builds import compile_config
from benchmarks.first_gpu.triton_table import configs, rehearsed_configs
from ds_hetero.common.extras import release_of, untested_releases
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.architectures import runs_on
from ds_hetero.runtime.attention.kernels import available, select
from ds_hetero.runtime.backends import backend_of
from ds_hetero.runtime.devices import collectives_library, has_native_bf16

_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "accelerate", "peft", "flash-attn", "nvidia-nccl-cu13")
# Compiler processes, one per core; the H200 had 16 (docs/evidence/one-h200.md). Other cores are left to what is timed.
_COMPILERS = max(1, min(12, (os.cpu_count() or 1) - 4))


def describe(context: Context) -> None:
    """Report versions, libraries, and abilities of the device."""
    row: Row = {"what": "software", "python": platform.python_version(), "cores": os.cpu_count()}
    row |= {package: release_of(package) for package in _PACKAGES}
    row["untested_releases"] = untested_releases()
    row["nccl_libraries"] = sorted(_nccl_libraries())
    context.report(row)
    device = context.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row = {
            "what": "device",
            "name": properties.name,
            "capability": context.capability,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": collectives_library()[1],
            "arch_list": torch.cuda.get_arch_list(),
            "in_arch_list": runs_on(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()),
        }
    else:
        row = {
            "what": "device",
            "name": platform.machine(),
            "capability": context.capability,
            "arch_list": torch.cuda.get_arch_list(),
            "in_arch_list": runs_on(context.pretended_capability, ["sm_80", "sm_90"]),
        }
    row["native_bf16"] = has_native_bf16(device)
    row["kernels"] = available(device, context.dtype, 128)
    row["chosen_kernel"] = select(device, context.dtype, 128, None, None).name
    context.report(row)


def _nccl_libraries() -> set[str]:
    """Return the folders of site-packages and of the system that have a libnccl."""
    libraries = set()
    for folder in (*sys.path, "/usr/lib/x86_64-linux-gnu", "/usr/local/lib"):
        for file in glob.glob(f"{folder}/**/nccl*/lib/libnccl.so*", recursive=False) + glob.glob(
            f"{folder}/libnccl.so*"
        ):
            libraries.add("/".join(Path(file).parts[-4:]))
    return libraries


def name_backends(context: Context) -> None:
    """Report which backend the package detects behind each name of a process group."""
    import torch.distributed as dist

    kind = context.choose("nccl", "gloo")
    device_type = context.device.type
    names: tuple[str | None, ...] = (None, kind, f"{device_type}:{kind},cpu:gloo" if kind == "nccl" else "cpu:gloo")
    for number, name in enumerate(names):
        folder = context.folder / str(number)
        folder.mkdir()
        replace(context, folder=folder).join(name=name)
        try:
            detected = backend_of()
        except HeteroError as error:
            detected = f"{type(error).__name__}: {error}"
        actual = dist.get_backend()
        context.report({"given": name, "torch_says": actual, "package_sees": detected, "right": detected == kind})
        dist.destroy_process_group()


def start_mps(context: Context) -> None:
    """Let processes run on the GPU at the same time and not by turns; the runner tries MPS's daemon, and ends it."""
    command = shutil.which(mps.COMMAND)
    if command is None and context.rehearsal:
        command = _stand_in(context.folder)
    if command is None:
        context.report({"mps": False, "why": f"{mps.COMMAND} is not there: ranks take turns on the device"})
        return
    try:
        variables = mps.start(command, context.folder)
    except mps.MpsError as error:
        context.report({"mps": False, "why": str(error)})
    else:
        context.report({"mps": True, "command": Path(command).name, ENV: variables})


def _stand_in(folder: Path) -> str:
    """Write a command that accepts the arguments of CUDA's and does nothing."""
    file = folder / mps.COMMAND
    file.write_text("#!/bin/sh\ncat >/dev/null\nexit 0\n")
    file.chmod(0o755)
    return str(file)


def compile_kernels(context: Context) -> None:
    """Compile this rank's share of the kernels that section "triton" will launch."""
    capability = context.capability
    todo = context.choose(configs(capability), rehearsed_configs())[context.rank :: context.ranks]
    for config in todo:
        row: Row = {"config": config.text}
        try:
            compile_config(config, capability, context.half)
        except Exception as error:  # Triton raises what it likes; the table names it and goes on
            row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        context.report(row)


SECTION = Section(
    name="environment",
    budget_s=15,
    decides="what can be tried at all, and whether ranks can run side by side",
    parts=(
        Part(
            name="compile Triton kernels",
            run=compile_kernels,
            ranks=_COMPILERS,
            communicates=False,
            limit_s=120,
            rehearsed_ranks=1,
            in_background=True,
        ),
        Part(name="software and device", run=describe, limit_s=20),
        Part(name="backend names", run=name_backends, limit_s=20),
        Part(name="MPS", run=start_mps, limit_s=mps.LONGEST_S + 2),
    ),
)
