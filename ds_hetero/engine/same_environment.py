"""Compare environment variables and versions of packages between all ranks.

Hosts have different environments, of which launchers pass on only a part. If a variable that sets how collectives run
is set on one rank only, ranks wait for each other forever. If a variable that sets how numbers are rounded is set on
one rank only, ranks compute different results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ds_hetero.common.announce import announce
from ds_hetero.common.extras import release_of
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.engine.differing_lines import differing_lines
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.devices import collectives_library, default_device

COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "DS_HETERO_")
"""Variables with these prefixes are compared, except those in `HOST_VARIABLES`."""

COMPARED = (
    "DS_ACCELERATOR",  # chooses the backend of the process group
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL adds collectives
    "CUDA_LAUNCH_BLOCKING",  # makes the host wait for kernels, and so maybe for a collective of another rank
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",  # this and the next two: how matmuls are rounded
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

_TRUE = ("1", "Y", "YES", "T", "TRUE")  # as torch reads a switch, in any case (c10d/Utils.hpp, getCvarBool)
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # the second is an older name
_NUM_RECORDS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is an older name

_PACKAGES = ("ds-hetero", "deepspeed", "transformers")
_LIBRARIES = ("NCCL", "RCCL")


def own_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks: texts by readable names. Unset variables are left out.

    Builds of the same torch for different CUDA releases count as equal if they have the same NCCL, which carries their
    messages.

    Args:
        variables: environment variables; this process's if left out.
    """
    variables = os.environ if variables is None else variables
    names = sorted(name for name in variables if name.startswith(COMPARED_PREFIXES) or name in COMPARED)
    compared = {f"environment variable {name}": variables[name] for name in names if name not in HOST_VARIABLES}
    return {**_versions(), **compared}


def announce_hidden_waits(variables: Mapping[str, str] | None = None) -> None:
    """Say on rank 0 which variables of torch keep this engine from telling ranks that wait from ranks that compute.

    Args:
        variables: of the environment; this process's if left out.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if default_device().type != "cuda" or not is_first:
        return
    for text in hidden_waits(os.environ if variables is None else variables):
        announce(text)


def hidden_waits(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each set variable that keeps ds_hetero from finding ranks that hang; see docs/dead-ranks.md."""
    texts = []
    for name in _BLOCKING_WAIT:
        if variables.get(name, "").upper() in _TRUE:
            texts.append(
                f"{name}={variables[name]} lets every collective block the host until it is over, and torch's counters "
                "stand still meanwhile: ranks seem to wait all the time, and which of them waits in vain is not known. "
                "Such ranks are ended by the timeout of the process group alone. Leave the variable out."
            )
    for name in _NUM_RECORDS:
        if variables.get(name, "").strip() == "0":
            texts.append(
                f"{name}=0 lets torch keep no record of collectives: ranks that wait in vain are ended by torch's "
                "watchdog alone, at the timeout of the process group. Leave the variable out."
            )
    return texts


def _versions() -> dict[str, str]:
    """Return the versions of packages, and on GPUs of the library for collectives, by readable names."""
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions |= {name: release_of(name) or "not installed" for name in _PACKAGES}
    if default_device().type == "cuda":
        library, version = collectives_library()
        versions[library] = version
    return {f"version of {name}": text for name, text in versions.items()}


def expect_same_environment(environments: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same `own_environment`. Raises `ConfigError`: lists differing names and values."""
    _expect_one_library(environments)
    names = sorted(set().union(*environments))
    lines = differing_lines(environments, {name: name for name in names}, absent="not set")
    if lines:
        raise ConfigError("all ranks must run in the same environment, but these differ:\n" + "\n".join(lines))


def _expect_one_library(environments: Sequence[Mapping[str, str]]) -> None:
    """Raise `ConfigError` if some GPUs are NVIDIA's and some AMD's: NCCL and RCCL cannot exchange messages."""
    libraries = []  # by rank
    for environment in environments:
        present = [name for name in _LIBRARIES if f"version of {name}" in environment]
        libraries.append(present[0] if present else "none")
    if {"NCCL", "RCCL"} <= set(libraries):
        by_library = ranks_by_value(enumerate(libraries))
        nvidia, amd = ranks_text(by_library["NCCL"]), ranks_text(by_library["RCCL"])
        raise ConfigError(
            f"{nvidia} on NVIDIA GPUs, which talk by NCCL, and {amd} on AMD GPUs, which talk by RCCL. The libraries "
            "cannot exchange messages, and a build of torch has only one of them, so these ranks cannot train "
            "together. Start a job for each kind of GPU."
        )
