"""Reads ds_config.json: what it says, as values. Imports no framework.

`ds_hetero.frameworks.deepspeed.batch_sizes` reads batch sizes as DeepSpeed does, since it writes them back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_hetero.common.reading import is_weight
from ds_hetero.cost.workload import Buffers
from ds_hetero.decision.decide import expect_planners
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.values.section import SECTION, HeterogeneitySection, expect_section_name, read_section

DsConfig = Mapping[str, Any]
"""Content of ds_config.json."""

_FP32 = ("fp32", "float32")


def enabled(ds_config: DsConfig | None) -> bool:
    """Whether a DeepSpeed configuration asks for this engine. Looks no further: checking is for all ranks together."""
    if ds_config is None or SECTION not in ds_config:
        return False
    return not isinstance(_value(ds_config, SECTION), Mapping) or _value(ds_config, SECTION, "enabled") is not False


def says_batches(ds_config: DsConfig | None) -> bool:
    """Whether a DeepSpeed configuration enables this engine and gives a batch size for every rank."""
    return enabled(ds_config) and _value(ds_config, SECTION, "batch") is not None


def section_of(ds_config: DsConfig) -> HeterogeneitySection | None:
    """Return the "heterogeneity" section; None where there is none, or it is off. Raises `ConfigError`."""
    expect_section_name(ds_config)
    section = read_section(ds_config[SECTION]) if SECTION in ds_config else None
    if section is not None:
        expect_planners(section)
    return section


def read_training_facts(ds_config: DsConfig) -> TrainingFacts:
    """Read everything that this engine needs to know of a DeepSpeed configuration."""
    bf16, former_bf16, fp16 = (_value(ds_config, name, "enabled") is True for name in ("bf16", "bfloat16", "fp16"))
    return TrainingFacts(
        zero_stage=_number(ds_config, "zero_optimization", "stage") or 0,
        train_batch_size=_number(ds_config, "train_batch_size"),
        micro_batch_size=_number(ds_config, "train_micro_batch_size_per_gpu"),
        accumulation_steps=_number(ds_config, "gradient_accumulation_steps"),
        mixed_precision="bfloat16" if bf16 or former_bf16 else "float16" if fp16 else None,
        autocast=_autocast(ds_config),
        accumulates_in_fp32=_value(ds_config, "data_types", "grad_accum_dtype") in _FP32,
        offloads_optimizer=_offloads(ds_config, "offload_optimizer"),
        offloads_parameters=_offloads(ds_config, "offload_param"),
        sp_size=_value(ds_config, "sequence_parallel_size"),
        optimizer=str(_value(ds_config, "optimizer", "type") or ""),
        buffers=_buffers(ds_config),
    )


def _autocast(ds_config: DsConfig) -> str | None:
    """The type of "torch_autocast" where it is on and written, such as ``"bfloat16"``; torch's own default is float16.

    DeepSpeed takes ``bf16`` and ``torch.bfloat16`` too (``DtypeEnum`` in deepspeed/runtime/config.py).
    """
    written = _value(ds_config, "torch_autocast", "dtype")
    if _value(ds_config, "torch_autocast", "enabled") is not True or written is None:
        return None
    name = str(written).removeprefix("torch.")
    return "bfloat16" if name == "bf16" else name


def _buffers(ds_config: DsConfig) -> Buffers:
    """Sizes in elements, also where they are written as 5e8; DeepSpeed's default for anything else, such as "auto"."""
    keys = {
        "reduce_bucket": "reduce_bucket_size",
        "prefetch_bucket": "stage3_prefetch_bucket_size",
        "live_parameters": "stage3_max_live_parameters",
        "sub_group": "sub_group_size",
    }
    values = {name: _value(ds_config, "zero_optimization", key) for name, key in keys.items()}
    return Buffers(**{name: int(value) for name, value in values.items() if is_weight(value)})


def _value(ds_config: Any, *path: str) -> Any:
    """Return the value at a path of nested objects; None where a part of it is missing."""
    value = ds_config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(ds_config: DsConfig, *path: str) -> int | None:
    """Return the whole number at a path; None for anything else, such as "auto"."""
    value = _value(ds_config, *path)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _offloads(ds_config: DsConfig, key: str) -> bool:
    device = _value(ds_config, "zero_optimization", key, "device")
    return device not in (None, "none")


def size_of_configuration(ds_config: DsConfig | None) -> int | None:
    """Return ranks that share a batch: ``sequence_parallel_size``, an inline schedule's, or all; None if none is said.

    Where replicas take different batches, or are cut into stages, they are one worker on all ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ds_config is None or not enabled(ds_config) or says_batches(ds_config) or world_size == 1:
        return None
    size: object = read_training_facts(ds_config).sp_size
    section = ds_config[SECTION]
    schedule = section.get("schedule") if isinstance(section, Mapping) else None
    if size is None and isinstance(schedule, Mapping) and isinstance(schedule.get("groups"), list):
        size = sum(len(group["ranks"]) for group in schedule["groups"] if isinstance(group, Mapping))
    size = world_size if size is None else size
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 1 and world_size % size == 0
    return size if is_size else None  # type: ignore[return-value]
