"""What is installed, and which kernels work on this machine's devices: a part of ``ds-hetero doctor``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement

from ds_hetero.common.extras import TRAINING
from ds_hetero.runtime.attention.kernels import available

__all__ = ["HEAD_DIM", "installed_packages", "kernels_by_device"]

HEAD_DIM = 128  # of today's models
_OPTIONAL = ("triton", "flash-attn")


def installed_packages() -> list[dict[str, Any]]:
    """Installed versions against the ranges that this release was tested with."""
    rows: list[dict[str, Any]] = []
    for text in requires("ds-hetero") or ():
        requirement = Requirement(text)
        optional = requirement.name in _OPTIONAL
        if requirement.marker is not None and not optional and requirement.name not in TRAINING:
            continue
        try:
            installed: str | None = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        problem = "not installed" if installed is None else None
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            problem = f"needs {requirement.specifier}"
        if requirement.name not in {row["name"] for row in rows}:
            rows.append({"name": requirement.name, "version": installed, "optional": optional, "problem": problem})
    return rows


def kernels_by_device() -> list[dict[str, Any]]:
    """Every device with the kernels that work on it, by dtype; a reason for those that do not."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    rows = []
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        kernels = {
            str(dtype).removeprefix("torch."): available(device, dtype, HEAD_DIM)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        rows.append({"device": str(device), "name": name, "kernels": kernels})
    return rows
