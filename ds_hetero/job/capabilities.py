"""Capabilities of every rank: device, kernel that will run, data types that are native, builds of torch and NCCL.

The environment that ranks must share: versions of the frameworks, and variables that change results or hang.

Every host has an environment of its own, and launchers pass on a part of it. A variable that sets how collectives run,
on one rank alone, makes ranks wait for each other; one that sets how numbers are rounded makes them train apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from ds_hetero.common.extras import release_of
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.decision.facts import JobFacts
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.devices import default_device, has_native_bf16
from ds_hetero.values.section import SECTION, KernelName, KernelWish

USUAL_HEAD_DIM = 128  # of a model that does not say


def device_name() -> str:
    """Of this rank's device, as its maker calls it; ``"CPU"`` of a CPU."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def requested_kernel(wish: KernelWish, rank: int) -> KernelName | None:
    """The section's kernel for this rank; None for the best here. Raises `ConfigError`: no entry, or several."""
    if isinstance(wish, list):
        if rank >= len(wish):
            raise ConfigError(
                f'"{SECTION}.attention" names kernels for {len(wish)} ranks, and this is rank {rank}. Give it one '
                "entry per rank."
            )
        return wish[rank]
    if not isinstance(wish, dict):
        return wish
    fitting = [part for part in wish if _is_part_of(part, device_name())]
    if len(fitting) > 1:
        raise ConfigError(
            f'"{SECTION}.attention": {" and ".join(map(repr, fitting))} are both parts of the name of rank {rank}\'s '
            f"device, {device_name()}. Make the keys longer, so that one fits."
        )
    return wish[fitting[0]] if fitting else None


def expect_known_devices(wish: KernelWish, names: Sequence[str]) -> None:
    """Refuse entries that fit no rank, or too many. Raises `ConfigError`: names them."""
    if isinstance(wish, list) and len(wish) != len(names):
        raise ConfigError(f'"{SECTION}.attention" has {len(wish)} entries; there are {len(names)} ranks.')
    for part in wish if isinstance(wish, dict) else ():
        if not any(_is_part_of(part, name) for name in names):
            raise ConfigError(
                f'"{SECTION}.attention": "{part}" is no part of any device\'s name. They are '
                f"{', '.join(dict.fromkeys(names))}."
            )


def _is_part_of(part: str, name: str) -> bool:
    return part.lower() in name.lower()


def own_capabilities(facts: JobFacts, rank: int) -> str:
    """This rank's capabilities for the job, in one line for people. Raises `ConfigError`: no kernel works here."""
    device, dtype, model = default_device(), getattr(torch, facts.computed_dtype), facts.model
    parts = [device_name()]
    if device.type == "cuda":
        parts = [f"{device_name()} ({_architecture(device)})"]
    if model.is_split:
        head_dim = model.head_dim or USUAL_HEAD_DIM
        requested = requested_kernel(facts.section.attention, rank)
        kernel = select(torch.device(device.type), dtype, head_dim, model.softcap, requested)
        parts.append(f"attention by {kernel.name}")
    parts.append("bfloat16 native" if has_native_bf16(device) else "bfloat16 not native")
    parts.append(f"torch {torch.__version__}")
    if device.type == "cuda":
        library = "RCCL" if torch.version.hip else "NCCL"
        parts.append(f"{library} {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    return ", ".join(parts)


def capability_lines(by_rank: Sequence[str]) -> list[str]:
    """A line for every kind of ranks, by their `own_capabilities`; none where all are alike."""
    kinds = ranks_by_value(enumerate(by_rank))
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in kinds.items()] if len(kinds) > 1 else []


def _architecture(device: torch.device) -> str:
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "DS_HETERO_")
"""Variables that begin so are compared, except those in `MAY_DIFFER`."""

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

MAY_DIFFER = (
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

_MOST_SHOWN = 5  # differing keys in one message
_LONGEST_SHOWN = 60  # characters of a value in a message
_PACKAGES = ("ds-hetero", "deepspeed", "transformers")


def own_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings that must be equal on all ranks, as texts by a name for people; what is not set is left out.

    Builds of one torch for different CUDA releases count as equal where their NCCL is the same: NCCL is what they talk
    with.

    Args:
        variables: of the environment; this process's if left out.
    """
    variables = os.environ if variables is None else variables
    names = sorted(name for name in variables if name.startswith(COMPARED_PREFIXES) or name in COMPARED)
    compared = {f"environment variable {name}": variables[name] for name in names if name not in MAY_DIFFER}
    return {**_versions(), **compared}


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions |= {name: release_of(name) or "not installed" for name in _PACKAGES}
    if default_device().type == "cuda":
        library = "RCCL" if torch.version.hip else "NCCL"
        versions[library] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {f"version of {name}": text for name, text in versions.items()}


def expect_same_environment(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks whose `own_environment` differs where it must not. Raises `ConfigError`: names, ranks, values."""
    names = sorted({name for environment in environments for name in environment})
    if lines := differing_lines(environments, {name: name for name in names}, absent="not set"):
        raise ConfigError("all ranks must run in the same environment, but these differ:\n" + "\n".join(lines))


def differing_lines(views: Sequence[Mapping[str, str]], labels: Mapping[str, str], *, absent: str) -> list[str]:
    """One line for each key whose values differ between ranks, with the ranks of every value; at most six.

    Args:
        views: of every rank, texts by key.
        labels: how each key that is compared is written.
        absent: stands for a key that a rank does not have.
    """
    values = {key: [view.get(key, absent) for view in views] for key in labels}
    lines = [f"  {labels[key]}: {_by_rank(of_ranks)}" for key, of_ranks in values.items() if len(set(of_ranks)) > 1]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    return lines


def _by_rank(values: Sequence[str]) -> str:
    """``1.0 on rank 0, 2; missing on rank 1``: every value with its ranks."""
    by_value = ranks_by_value(enumerate(values))
    return "; ".join(f"{_short(value)} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."
