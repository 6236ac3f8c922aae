"""Refuse bfloat16 on devices without hardware for it.

NVIDIA's GPUs older than Ampere (V100, T4, RTX 20) lack hardware for bfloat16. torch computes it there in float32, whose
peak is an eighth of that in float16 (datasheets, in `ds_hetero.cluster.catalogue`), and attention runs with an even
slower kernel. The other ranks would wait for such a device in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.decision.facts import JobFacts
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.devices import has_native_bf16

_BF16 = "bfloat16"


def dtype_of(facts: JobFacts) -> str:
    """Return the data type in which layers are computed, such as ``"bfloat16"``."""
    return facts.training.mixed_precision or facts.model.dtype


def device_without_bf16(facts: JobFacts, device: torch.device) -> str | None:
    """Return the name of this rank's device if the job needs bfloat16 and the device lacks it; else None."""
    if source_of_bf16(facts) is None or has_native_bf16(device):
        return None
    return torch.cuda.get_device_name(device)


def source_of_bf16(facts: JobFacts) -> str | None:
    """Return the setting that asks for bfloat16, by the user's name for it; None if the job does not need bfloat16."""
    if facts.training.mixed_precision is not None:
        return '"bf16" in ds_config.json' if facts.training.mixed_precision == _BF16 else None
    if facts.training.autocast == _BF16:
        return '"torch_autocast" in ds_config.json'
    return "the type of the model's parameters" if facts.model.dtype == _BF16 else None


def expect_native_bf16(facts: JobFacts, lacking: Sequence[str | None], *, in_pipelines: bool) -> None:
    """Refuse bfloat16 on devices that have no hardware for it. Raises `ConfigError`: ranks, devices, what to change.

    Args:
        lacking: result of `device_without_bf16` on every rank.
        in_pipelines: whether the model is divided into stages of pipelines, which do not train in float16.
    """
    ranks_by_device = ranks_by_value((rank, name) for rank, name in enumerate(lacking) if name is not None)
    if not ranks_by_device:
        return
    listed = "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in ranks_by_device.items())
    if in_pipelines:
        change = (
            'Pipelines do not train in fp16: train in fp32 (without "bf16", the model loaded in float32), or in fp16 '
            'without pipelines ("parallel": "sequence")'
        )
    else:
        change = 'Train in fp16 ("fp16": {"enabled": true} in the place of "bf16"), or in fp32'
    raise ConfigError(
        f"this job computes in bfloat16 ({source_of_bf16(facts)}), and these devices have no hardware for it: "
        f"{listed}. They would compute it in float32, several times slower than float16. {change}; or leave these "
        "devices out of the job."
    )
