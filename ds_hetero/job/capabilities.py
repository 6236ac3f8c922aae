"""Capabilities of every rank: device, kernel that will run, data types that are native, builds of torch and NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_hetero.decision.facts import JobFacts
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.devices import default_device, has_native_bf16
from ds_hetero.runtime.peers.calls import ranks_by_value, ranks_text
from ds_hetero.values.kernel_names import KernelName, KernelWish
from ds_hetero.values.section import SECTION

USUAL_HEAD_DIM = 128  # of a model that does not say


def device_name() -> str:
    """Of this rank's device, as its maker calls it; ``"CPU"`` of a CPU."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def requested_kernel(wish: KernelWish, rank: int) -> KernelName | None:
    """Return the kernel that the section names for this rank; None for the best that works here.

    Args:
        wish: the "attention" key of the section.
        rank: this one.

    Raises:
        ConfigError: the list has no entry for this rank, or several keys of the object fit its device.
    """
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
    """Refuse entries that fit no rank, which are misspelt, or too many.

    Args:
        wish: the "attention" key of the section.
        names: of the devices, by rank.

    Raises:
        ConfigError: a key is no part of any device's name, or a list is longer than there are ranks.
    """
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
    """This rank's capabilities, in one line for people.

    Args:
        facts: of the job, of which kernel, data type, head size and soft cap count.
        rank: this one.

    Raises:
        ConfigError: no attention kernel works here for them.
    """
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
    """A line for every kind of ranks, where they are not all alike; none where they are.

    Args:
        by_rank: `own_capabilities` of every rank.
    """
    kinds = ranks_by_value(enumerate(by_rank))
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in kinds.items()] if len(kinds) > 1 else []


def _architecture(device: torch.device) -> str:
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
