"""Read ds_config.json into values that the rest of ds_hetero uses. Imports no framework.

Batch sizes are read once more in `ds_hetero.frameworks.deepspeed.batch_sizes`, which also writes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from ds_hetero.common.reading import is_weight
from ds_hetero.cost.workload import Buffers
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.decision.resolve import expect_planners
from ds_hetero.values.section import SECTION, HeterogeneitySection, expect_section_name, read_section

DsConfig = Mapping[str, Any]
"""Content of ds_config.json."""

_FP32 = ("fp32", "float32")


def has_active_section(ds_config: DsConfig | None) -> bool:
    """Return whether a DeepSpeed configuration has a section that is not switched off.

    The section's content is not checked here: all ranks do that together, later.
    """
    if ds_config is None or SECTION not in ds_config:
        return False
    return not isinstance(_value(ds_config, SECTION), Mapping) or _value(ds_config, SECTION, "enabled") is not False


def sets_batch_by_rank(ds_config: DsConfig | None) -> bool:
    """Return whether a DeepSpeed configuration has a section that sets ``"batch"``, the samples of every rank."""
    return has_active_section(ds_config) and _value(ds_config, SECTION, "batch") is not None


def section_of(ds_config: DsConfig) -> HeterogeneitySection | None:
    """Return the "heterogeneity" section; None if there is none, or it is off. Raises `ConfigError`: it is invalid."""
    expect_section_name(ds_config)
    section = read_section(ds_config[SECTION]) if SECTION in ds_config else None
    if section is not None:
        expect_planners(section)
    return section


def read_training_facts(ds_config: DsConfig) -> TrainingFacts:
    """Read the settings of DeepSpeed that ds_hetero depends on."""
    bf16, bf16_by_former_name, fp16 = (
        _value(ds_config, name, "enabled") is True for name in ("bf16", "bfloat16", "fp16")
    )
    return TrainingFacts(
        zero_stage=_number(ds_config, "zero_optimization", "stage") or 0,
        train_batch_size=_number(ds_config, "train_batch_size"),
        micro_batch_size=_number(ds_config, "train_micro_batch_size_per_gpu"),
        accumulation_steps=_number(ds_config, "gradient_accumulation_steps"),
        mixed_precision=_mixed_precision(bf16 or bf16_by_former_name, fp16),
        autocast=_autocast(ds_config),
        accumulates_in_fp32=_value(ds_config, "data_types", "grad_accum_dtype") in _FP32,
        offloads_optimizer=_offloads(ds_config, "offload_optimizer"),
        offloads_parameters=_offloads(ds_config, "offload_param"),
        sp_size=_value(ds_config, "sequence_parallel_size"),
        optimizer=str(_value(ds_config, "optimizer", "type") or ""),
        buffers=_buffers(ds_config),
    )


def _mixed_precision(bf16: bool, fp16: bool) -> Literal["bfloat16", "float16"] | None:
    """Return the name of the 16-bit dtype; bf16 wins if both are enabled."""
    if bf16:
        return "bfloat16"
    return "float16" if fp16 else None


def _autocast(ds_config: DsConfig) -> str | None:
    """Return the dtype of "torch_autocast", such as ``"bfloat16"``; None if it is off, or has no dtype.

    DeepSpeed also takes ``bf16`` and ``torch.bfloat16`` (``DtypeEnum`` in deepspeed/runtime/config.py).
    """
    dtype = _value(ds_config, "torch_autocast", "dtype")
    if _value(ds_config, "torch_autocast", "enabled") is not True or dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return "bfloat16" if name == "bf16" else name


def _buffers(ds_config: DsConfig) -> Buffers:
    """Return the sizes of DeepSpeed's buffers in elements.

    Sizes may be written as 5e8. For anything else, such as "auto", DeepSpeed's default is taken.
    """
    keys = {
        "reduce_bucket": "reduce_bucket_size",
        "prefetch_bucket": "stage3_prefetch_bucket_size",
        "live_parameters": "stage3_max_live_parameters",
        "sub_group": "sub_group_size",
    }
    values = {name: _value(ds_config, "zero_optimization", key) for name, key in keys.items()}
    return Buffers(**{name: int(value) for name, value in values.items() if is_weight(value)})


def _value(ds_config: Any, *path: str) -> Any:
    """Return the value at a path of nested objects; None if a part of the path is missing."""
    value = ds_config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(ds_config: DsConfig, *path: str) -> int | None:
    """Return the whole number at a path; None for anything else, such as "auto"."""
    value = _value(ds_config, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _offloads(ds_config: DsConfig, key: str) -> bool:
    """Return whether ``"offload_optimizer"`` or ``"offload_param"`` of ZeRO is on."""
    device = _value(ds_config, "zero_optimization", key, "device")
    return device not in (None, "none")


def size_of_configuration(ds_config: DsConfig | None) -> int | None:
    """Return how many ranks share a batch, as accelerate is to count workers; None if it needs no such number.

    The number is ``sequence_parallel_size``, or the ranks of a schedule inside the section, or all ranks of the job. It
    is None without a section, with ``"batch"``, on one rank, and if it does not divide the number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ds_config is None or not has_active_section(ds_config) or sets_batch_by_rank(ds_config) or world_size == 1:
        return None
    size: object = read_training_facts(ds_config).sp_size
    section = ds_config[SECTION]
    schedule = section.get("schedule") if isinstance(section, Mapping) else None
    if size is None and isinstance(schedule, Mapping) and isinstance(schedule.get("groups"), list):
        size = sum(len(group["ranks"]) for group in schedule["groups"] if isinstance(group, Mapping))
    size = world_size if size is None else size
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 1 and world_size % size == 0
    return size if is_size else None  # type: ignore[return-value]
