"""What every rank can: its device, the kernel that will run, data types that are native, builds of torch and NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_hetero.job.facts import JobFacts
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.devices import default_device, has_native_bf16
from ds_hetero.runtime.peers.calls import ranks_by_value, ranks_text

__all__ = ["USUAL_HEAD_DIM", "capability_lines", "own_capabilities"]

USUAL_HEAD_DIM = 128  # of a model that does not say


def own_capabilities(facts: JobFacts) -> str:
    """What this rank can, in one line for people.

    Args:
        facts: of the job, of which kernel, data type, head size and soft cap count.

    Raises:
        ConfigError: no attention kernel works here for them.
    """
    device, dtype, model = default_device(), getattr(torch, facts.computed_dtype), facts.model
    parts = ["CPU"]
    if device.type == "cuda":
        parts = [f"{torch.cuda.get_device_name(device)} ({_architecture(device)})"]
    if model.is_split:
        head_dim = model.head_dim or USUAL_HEAD_DIM
        kernel = select(torch.device(device.type), dtype, head_dim, model.softcap, facts.section.attention)
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
