"""Comparison of the environment of all ranks: variables and versions that must be equal.

Every host has an environment of its own, and launchers pass on a part of it. A variable that sets how collectives run,
on one rank alone, makes ranks wait for each other; one that sets how numbers are rounded makes them train apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from ds_hetero.common.extras import release_of
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.engine.differing_lines import differing_lines
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.devices import collectives_library, default_device

COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "DS_HETERO_")
"""Variables that begin so are compared, except those in `HOST_VARIABLES`."""

COMPARED = (
    "DS_ACCELERATOR",  # which backend the process group has
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL adds collectives of its own
    "CUDA_LAUNCH_BLOCKING",  # a kernel that waits for its end can wait for a collective of another rank
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",  # the next three: how products are rounded
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)
"""Further variables that are compared."""

HOST_VARIABLES = (
    "NCCL_CONF_FILE",  # paths and names that belong to a host
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_HOSTID",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_DEBUG",  # printing
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_RANK",
    "DS_HETERO_TRACEBACK",
    "DS_HETERO_ELASTIC_AGENT",
    "DS_HETERO_ELASTIC_AGENT_PID",
    "DS_HETERO_ELASTIC_NODE",
    "DS_HETERO_ELASTIC_SHM",
    "DS_HETERO_ELASTIC_SILENCE_S",
    "DS_HETERO_ELASTIC_TOKEN",
)
"""Variables of those families that describe one host, or only what is printed."""

_PACKAGES = ("ds-hetero", "deepspeed", "transformers")
_LIBRARIES = ("NCCL", "RCCL")


def own_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as texts by a name for people, without unset ones.

    Builds of one torch for different CUDA releases count as equal where their NCCL is the same: NCCL is what they talk
    with.

    Args:
        variables: of the environment; this process's if left out.
    """
    variables = os.environ if variables is None else variables
    names = sorted(name for name in variables if name.startswith(COMPARED_PREFIXES) or name in COMPARED)
    compared = {f"environment variable {name}": variables[name] for name in names if name not in HOST_VARIABLES}
    return {**_versions(), **compared}


def _versions() -> dict[str, str]:
    """Return the versions of packages, and of the library of collectives on GPUs."""
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions |= {name: release_of(name) or "not installed" for name in _PACKAGES}
    if default_device().type == "cuda":
        library, version = collectives_library()
        versions[library] = version
    return {f"version of {name}": text for name, text in versions.items()}


def expect_same_environment(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks whose `own_environment` differs where it must not. Raises `ConfigError`: names, ranks, values."""
    _expect_one_library(environments)
    names = sorted(set().union(*environments))
    lines = differing_lines(environments, {name: name for name in names}, absent="not set")
    if lines:
        raise ConfigError("all ranks must run in the same environment, but these differ:\n" + "\n".join(lines))


def _expect_one_library(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse NVIDIA's GPUs together with AMD's. Raises `ConfigError`: no library carries messages between them."""
    libraries = []  # by rank
    for environment in environments:
        present = [name for name in _LIBRARIES if f"version of {name}" in environment]
        libraries.append(present[0] if present else "none")
    if {"NCCL", "RCCL"} <= set(libraries):
        by_library = ranks_by_value(enumerate(libraries))
        nvidia, amd = ranks_text(by_library["NCCL"]), ranks_text(by_library["RCCL"])
        raise ConfigError(
            f"{nvidia} on NVIDIA GPUs, which talk by NCCL, and {amd} on AMD GPUs, which talk by RCCL. The two do not "
            "understand each other, and a build of torch has one of them, so that no setting lets these ranks train "
            "together. Start a job for each."
        )
