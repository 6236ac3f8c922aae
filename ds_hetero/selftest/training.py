"""Train one optimizer step of a small Llama under an uneven schedule, and compare it with the same step in one process.

The step is tried in float32, where a small error shows, and as jobs train: in the 16-bit type of training, with ZeRO
partitions in proportion to weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch

import ds_hetero
from ds_hetero.common.extras import TRAINING_PACKAGES, require
from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import HeteroError
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.one_process import (
    CLIP,
    batch_of,
    compare_steps,
    optimizer_of,
    precision,
    train_alone,
    warnings_only,
)
from ds_hetero.selftest.session import Session, dtype_name
from ds_hetero.selftest.uneven_schedules import NUM_HEADS, NUM_KV_HEADS, length_for, uneven_schedules

_TIMES = 4.0  # limits of a call that a step may take: DeepSpeed is imported, and the first batch is checked


class _Setting(NamedTuple):
    """What a training step is tried with: ZeRO stage, dtype, and keys of the section, such as "zero_partition"."""

    name: str  # of the line
    stage: int  # of ZeRO
    dtype: torch.dtype
    section: JsonDict  # keys of the "heterogeneity" section besides "schedule"


def check_training(session: Session) -> Iterator[Line]:
    """Yield one line per setting: a ZeRO stage, a type, and even partitions or partitions by weights."""
    try:
        require(*TRAINING_PACKAGES, purpose="training")
    except HeteroError as error:
        yield Line("training step", "skip", str(error))
        return
    from ds_hetero.frameworks.deepspeed.small_job import train_one_step
    from ds_hetero.frameworks.transformers.model.small_llama import VOCAB_SIZE, small_llama

    length = length_for(session.size)
    model = small_llama(NUM_HEADS, NUM_KV_HEADS, length)
    batch = batch_of(length, VOCAB_SIZE)
    with session.watch.call("one process trains", times=_TIMES):
        expected_by_dtype = {}
        for dtype in (torch.float32, session.trained_dtype):
            expected_by_dtype[dtype] = train_alone(model, batch, session.device, dtype)
    for setting in _settings(session):
        config = _ds_config(setting, session.size)
        with session.watch.call(setting.name, times=_TIMES), warnings_only():
            try:
                model_copy = copy.deepcopy(model).train()
                optimizer = optimizer_of(model_copy.parameters())
                step = train_one_step(ds_hetero.register(), model_copy, optimizer, batch, config)
                norm = {} if step.grad_norm is None else {"the gradient norm": torch.tensor(step.grad_norm)}
                step_tensors = {"the loss": torch.tensor(step.loss), **norm, **step.parameters}
                is_right, detail = compare_steps(step_tensors, expected_by_dtype[setting.dtype], setting.dtype)
            except HeteroError as error:  # raised on all ranks
                is_right, detail = False, f"{type(error).__name__}: {error}"
        yield Line(setting.name, "pass" if is_right else "fail", detail)


def _settings(session: Session) -> Iterator[_Setting]:
    """Yield every ZeRO stage in both types (with ``--quick`` stage 3 alone), then stage 3 inside nodes."""
    half_dtype, size = session.trained_dtype, session.size
    weights: JsonDict = {"zero_partition": [1 + rank % 3 for rank in range(size)]} if size > 1 else {}
    for stage in (3,) if session.quick else (0, 1, 2, 3):
        yield _Setting(f"training step, ZeRO-{stage}", stage, torch.float32, {})
        by_weights = weights if stage else {}
        suffix = " by weights" if by_weights else ""
        yield _Setting(f"training step, ZeRO-{stage}{suffix}, {dtype_name(half_dtype)}", stage, half_dtype, by_weights)
    if size > 1:
        nodes = [-(-size // 2), size // 2]
        section: JsonDict = {**weights, "zero_within": nodes}
        yield _Setting(f"training step, ZeRO-3 inside nodes, {dtype_name(half_dtype)}", 3, half_dtype, section)


def _ds_config(setting: _Setting, size: int) -> JsonDict:
    """Return the DeepSpeed configuration of a setting, with the last and least even schedule for ``size`` ranks."""
    schedule = list(uneven_schedules(size).values())[-1]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": setting.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **precision(setting.dtype),
        "heterogeneity": {"schedule": schedule.to_dict(), **setting.section},
    }
