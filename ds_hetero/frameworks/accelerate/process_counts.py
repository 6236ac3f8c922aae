"""Processes that accelerate counts: one for each replica, where stock counts one for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    DummyScheduler,
)

from ds_hetero.engine.ds_config import (
    has_active_section,
)
from ds_hetero.engine.patching import Function


def call_with_all_ranks(stock: Function, *args: object, **kwargs: object) -> Any:
    """Call ``stock`` while accelerate counts all ranks as processes, also inside `one_process_per_replica`."""
    with counting_processes(dist.get_world_size()):
        return stock(*args, **kwargs)


@contextlib.contextmanager
def one_process_per_replica() -> Iterator[None]:
    """Inside the context, let accelerate count each replica as one process, without sequence parallelism."""
    state = AcceleratorState()
    parallelism = state.parallelism_config
    index = state.process_index
    set_accelerate_state(parallelism_config=None, process_index=index // parallelism.sp_size)
    try:
        with counting_processes(state.num_processes // parallelism.sp_size):
            yield
    finally:
        set_accelerate_state(parallelism_config=parallelism, process_index=index)


@contextlib.contextmanager
def counting_processes(num_processes: int) -> Iterator[None]:
    """Inside the context, let accelerate report ``num_processes`` as the number of processes."""
    former = AcceleratorState().num_processes
    set_accelerate_state(num_processes=num_processes)
    try:
        yield
    finally:
        set_accelerate_state(num_processes=former)


def step_scheduler(stock: Function, scheduler: Any, *args: object, **kwargs: object) -> None:
    """Replace ``AcceleratedScheduler.step``, which steps the scheduler once per process: step it once per replica."""
    state = AcceleratorState()
    is_deepspeed = state.distributed_type == DistributedType.DEEPSPEED
    if not is_deepspeed or not has_active_section(state.deepspeed_plugin.deepspeed_config):
        stock(scheduler, *args, **kwargs)
        return
    sp_size = state.parallelism_config.sp_size if state.parallelism_config is not None else 1
    with counting_processes(state.num_processes // sp_size):
        stock(scheduler, *args, **kwargs)


@contextlib.contextmanager
def steps_of_replicas(objects: tuple[Any, ...], sp_size: int) -> Iterator[None]:
    """Inside the context, let accelerate divide the total steps of a DummyScheduler by the number of replicas.

    ``_prepare_deepspeed`` divides them by the number of processes, which is ``sp_size`` times that of replicas.
    """
    schedulers = [obj for obj in objects if isinstance(obj, DummyScheduler) and obj.total_num_steps is not None]
    for scheduler in schedulers:
        scheduler.total_num_steps *= sp_size
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.total_num_steps //= sp_size


def set_accelerate_state(**values: Any) -> None:
    """Set attributes of `accelerate.state.PartialState` and `accelerate.state.AcceleratorState`, which must agree."""
    for name, value in values.items():
        setattr(PartialState(), name, value)
    AcceleratorState()  # every instance is the same state, and a new one takes over what PartialState has
