"""Check that the installed torch has code for this rank's GPU.

A build of torch has machine code for some architectures, and perhaps intermediate code (PTX) from which the driver
compiles code for newer ones. On any other GPU the first kernel fails ("no kernel image is available for execution on
the device"), in the middle of a start, on that rank alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ds_hetero.errors import ConfigError


def expect_built_for(device: torch.device) -> None:
    """Refuse a GPU for which this torch has no code. Raises `ConfigError`: names the GPU and the architectures."""
    if device.type != "cuda" or torch.version.hip:
        return
    capability, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if runs_on(capability, built):
        return
    major, minor = capability
    raise ConfigError(
        f"torch {torch.__version__} has no code for {torch.cuda.get_device_name(device)} (sm_{major}{minor}): it was "
        f"built for {', '.join(built)}. Install a build of the same release for an earlier or later CUDA, which has "
        "other architectures; or leave this GPU out of the job."
    )


def runs_on(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether code for ``built`` runs on a GPU of this capability.

    Machine code runs on its own minor version and on later ones of the same major version, intermediate code on all
    later versions (CUDA Programming Guide, "Application Compatibility"). Code for an architecture that ends in a letter
    (sm_90a) runs on that one only.

    Args:
        built: from `torch.cuda.get_arch_list`, such as ``["sm_80", "sm_90", "compute_90"]``; empty if unknown.
    """
    if not built:
        return True
    for name in built:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if parts is None:
            continue
        kind, major, minor, is_specific = parts[1], int(parts[2]), int(parts[3]), bool(parts[4])
        if capability == (major, minor):
            return True
        if is_specific:
            continue
        is_later_minor = capability[0] == major and capability[1] > minor
        if is_later_minor or (kind == "compute" and capability > (major, minor)):
            return True
    return False
