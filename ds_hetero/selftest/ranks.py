"""Describe every rank (device, versions, native types, kernels), and refuse ranks that cannot train together."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.text import ranks_by_value
from ds_hetero.common.units import GIB
from ds_hetero.engine.same_environment import expect_same_environment, own_environment
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.architectures import expect_built_for
from ds_hetero.runtime.attention.kernels import available
from ds_hetero.runtime.devices import collectives_library, default_device, default_dtype, has_native_bf16

_HEAD_DIM = 128
_DRIVER = Path("/proc/driver/nvidia/version")


def describe_rank(with_host_name: bool) -> JsonDict:
    """Return the description of this rank as JSON. If its device cannot be used, "error" is the only key.

    Args:
        with_host_name: include the name of the host. The hash "host" tells hosts apart in any case, and is not
            reported.
    """
    try:
        device = default_device()
        expect_built_for(device)
        return _describe(device, with_host_name)
    except (ConfigError, RuntimeError, AssertionError) as error:  # the last two are torch's, of a broken installation
        return {"error": f"{type(error).__name__}: {error}"}


def _describe(device: torch.device, with_host_name: bool) -> JsonDict:
    """Return the description of a rank whose device can be used."""
    host = socket.gethostname()
    description: JsonDict = {
        "host": hashlib.sha256(f"{host}{_boot_id()}".encode()).hexdigest(),
        "type": device.type,
        **(_describe_gpu(device) if device.type == "cuda" else _describe_cpu()),
        "torch": torch.__version__,
        "native_types": _native_types(device),
        "kernels": available(device, default_dtype(device), _HEAD_DIM),
        "environment": own_environment(),
    }
    return {**description, "host_name": host} if with_host_name else description


def _describe_gpu(device: torch.device) -> JsonDict:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.hip or torch.version.cuda,
        "nccl": collectives_library()[1],
    }


def _describe_cpu() -> JsonDict:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"device": f"CPU ({platform.machine()})", "memory_gib": round(memory_bytes / GIB, 1)}


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, from the kernel module; None without such a module."""
    try:
        match = re.search(r"Kernel Module\D*?\s(?:for \S+\s+)?(\d+(?:\.\d+)+)", _DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _boot_id() -> str:
    """Return the kernel's boot id, which differs between hosts even where containers have the same host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _native_types(device: torch.device) -> list[str]:
    """Return the types that the device computes in without emulation."""
    if device.type == "cpu":
        return ["float32", "bfloat16"]
    return ["float32", "float16", *(["bfloat16"] if has_native_bf16(device) else [])]


def check_ranks(ranks: Sequence[JsonObject]) -> None:
    """Raise `ConfigError` if the ranks cannot train together.

    Args:
        ranks: descriptions by `describe_rank`, in order of rank.
    """
    errors = [
        f"rank {rank}: {description['error']}" for rank, description in enumerate(ranks) if "error" in description
    ]
    if errors:
        raise ConfigError("\n".join(errors))
    cpu_ranks = [str(rank) for rank, description in enumerate(ranks) if description["type"] == "cpu"]
    if 0 < len(cpu_ranks) < len(ranks):
        raise ConfigError(
            f"rank {', '.join(cpu_ranks)} computes on a CPU and the others on GPUs; they have no process group in "
            "common. Does torch see a GPU there (torch.cuda.is_available()), and does the launcher start one process "
            "per GPU?"
        )
    expect_same_environment([description["environment"] for description in ranks])


def trained_dtype_of(ranks: Sequence[JsonObject]) -> torch.dtype:
    """Return the 16-bit type of training: bfloat16 if all ranks have it (CPUs do, slowly), otherwise float16."""
    return torch.bfloat16 if all("bfloat16" in description["native_types"] for description in ranks) else torch.float16


def nodes_of_ranks(ranks: Sequence[JsonObject]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node; nodes are in the order of their lowest ranks."""
    nodes: dict[str, list[int]] = ranks_by_value((rank, description["host"]) for rank, description in enumerate(ranks))
    return tuple(map(tuple, nodes.values()))
