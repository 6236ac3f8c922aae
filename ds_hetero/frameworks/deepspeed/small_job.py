"""Optimizer steps of a model under DeepSpeed, for checks of an installation."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.handle import Handle


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step."""

    loss: float  # of the batch before the step
    grad_norm: float | None  # of all gradients; None where DeepSpeed does not tell it
    parameters: dict[str, Tensor]  # whole, in float32, after the step


def train_one_step(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], ds_config: DsConfig
) -> StepOutcome:
    """Train on one batch, which all ranks are given whole.

    Args:
        handle: of a registration, which is undone afterwards.
        batch: with ``input_ids`` and ``labels``.
        ds_config: with a "heterogeneity" section.

    Caller: every rank of the world.
    """
    with _engine_for(handle, model, optimizer, ds_config) as (engine, own):
        (loss,) = [_step(own, engine, shard) for shard in own.dataloader([batch], batches="same")]
        weights = {name: _whole(parameter) for name, parameter in engine.module.named_parameters()}
        norm = engine.get_global_grad_norm()
        return StepOutcome(loss, None if norm is None else float(norm), weights)


def train_one_pipelined_step(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], ds_config: DsConfig
) -> StepOutcome:
    """Like `train_one_step` for pipelines; ``batch`` is that of the step, and ``parameters`` what this rank holds.

    Caller: every rank of the world.
    """
    with _engine_for(handle, model, optimizer, ds_config) as (engine, own):
        (of_step,) = own.dataloader([batch])
        loss = engine(**of_step).loss
        engine.backward(loss)
        engine.step()
        held = {name: _whole(parameter) for name, parameter in model.named_parameters()}
        return StepOutcome(loss.item(), float(engine.get_global_grad_norm()), held)


def use_torchs_groups() -> None:
    """Let DeepSpeed's communication use the process group that torch has."""
    with _quiet():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def time_steps(
    handle: Handle,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Tensor]],
    ds_config: DsConfig,
) -> tuple[list[float], int | None]:
    """Train as `train_one_step` does; seconds of every step, and peak bytes of tensors in the last (None on CPUs).

    Caller: every rank of the world.
    """
    accelerator, seconds, peak = deepspeed.get_accelerator(), [], None
    on_device = accelerator.device_name() != "cpu"
    with _engine_for(handle, model, optimizer, ds_config) as (engine, own):
        for shard in own.dataloader(list(batches), batches="same"):
            torch.distributed.barrier()
            if on_device:
                accelerator.synchronize()
                accelerator.reset_peak_memory_stats()
            begin = time.perf_counter()
            _step(own, engine, shard)  # reads the loss, and so waits for the device
            if on_device:
                accelerator.synchronize()
                peak = int(accelerator.max_memory_allocated())
            seconds.append(time.perf_counter() - begin)
    return seconds, peak


@contextmanager
def _engine_for(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: DsConfig
) -> Iterator[tuple[Any, Handle]]:
    """An engine and its handle; afterwards the registration is undone."""
    with _quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(ds_config))
        try:
            yield engine, handle.for_engine(engine)
        finally:
            engine.destroy()
            handle.undo()


def _step(handle: Handle, engine: Any, shard: Mapping[str, Tensor]) -> float:
    loss = handle.loss(engine(**shard), shard)
    engine.backward(loss)
    engine.step()
    return loss.item()


def _whole(parameter: nn.Parameter) -> Tensor:
    held = safe_get_full_fp32_param(parameter)
    return (parameter if held is None else held).detach().float().cpu().clone()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed from printing and warning, and on CPUs from compiling an extension for a minute."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
