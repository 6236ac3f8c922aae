"""Train a model for a few optimizer steps with DeepSpeed, to check an installation."""

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

    loss: float  # of the batch, before the step
    grad_norm: float | None  # of all gradients; None if DeepSpeed does not compute it
    parameters: dict[str, Tensor]  # whole parameters in float32 after the step, by name


def train_one_step(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], ds_config: DsConfig
) -> StepOutcome:
    """Train on one batch.

    Args:
        handle: of a registration, which is undone afterwards.
        batch: the whole batch, with ``input_ids`` and ``labels``; the same on all ranks.
        ds_config: a configuration with a "heterogeneity" section.

    Caller: every rank of the world.
    """
    with _engine_for(handle, model, optimizer, ds_config) as (engine, engine_handle):
        (shard,) = engine_handle.dataloader([batch], batches="same")
        loss = _step(engine_handle, engine, shard)
        parameters = {name: _full_tensor(parameter) for name, parameter in engine.module.named_parameters()}
        norm = engine.get_global_grad_norm()
        return StepOutcome(loss, None if norm is None else float(norm), parameters)


def train_one_pipelined_step(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], ds_config: DsConfig
) -> StepOutcome:
    """Train a model in pipelines on one global batch; see `train_one_step` for the arguments.

    ``parameters`` of the result has only the parameters of this rank's stage.

    Caller: every rank of the world.
    """
    with _engine_for(handle, model, optimizer, ds_config) as (engine, engine_handle):
        (batch_on_device,) = engine_handle.dataloader([batch])
        loss = engine(**batch_on_device).loss
        engine.backward(loss)
        engine.step()
        parameters = {name: _full_tensor(parameter) for name, parameter in model.named_parameters()}
        return StepOutcome(loss.item(), float(engine.get_global_grad_norm()), parameters)


def use_torch_process_group() -> None:
    """Let DeepSpeed's communication use torch's default process group."""
    with _quiet():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def time_steps(
    handle: Handle,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Tensor]],
    ds_config: DsConfig,
) -> tuple[list[float], int | None]:
    """Train as `train_one_step` does, for a step on each batch.

    Returns:
        Seconds of every step, and the peak memory of tensors in the last step in bytes (None on CPUs).

    Caller: every rank of the world.
    """
    accelerator, seconds, peak = deepspeed.get_accelerator(), [], None
    on_device = accelerator.device_name() != "cpu"
    with _engine_for(handle, model, optimizer, ds_config) as (engine, engine_handle):
        for shard in engine_handle.dataloader(list(batches), batches="same"):
            torch.distributed.barrier()
            if on_device:
                accelerator.synchronize()
                accelerator.reset_peak_memory_stats()
            begin = time.perf_counter()
            _step(engine_handle, engine, shard)  # reads the loss, and so waits for the device
            if on_device:
                accelerator.synchronize()
                peak = int(accelerator.max_memory_allocated())
            seconds.append(time.perf_counter() - begin)
    return seconds, peak


@contextmanager
def _engine_for(
    handle: Handle, model: nn.Module, optimizer: torch.optim.Optimizer, ds_config: DsConfig
) -> Iterator[tuple[Any, Handle]]:
    """Build an engine and return it with its handle; at the end destroy it and undo the registration."""
    with _quiet():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(ds_config))
        try:
            yield engine, handle.for_engine(engine)
        finally:
            engine.destroy()
            handle.undo()


def _step(handle: Handle, engine: Any, shard: Mapping[str, Tensor]) -> float:
    """Train on a shard; return the loss of the whole batch."""
    loss = handle.loss(engine(**shard), shard)
    engine.backward(loss)
    engine.step()
    return loss.item()


def _full_tensor(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a whole parameter in float32, on the CPU."""
    full_tensor = safe_get_full_fp32_param(parameter)
    return (parameter if full_tensor is None else full_tensor).detach().float().cpu().clone()


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the context, keep DeepSpeed from printing, from warning, and on CPUs from compiling an extension."""
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
