"""An Accelerator as it is made: the ranks that it counts, and whether its configuration asks for this engine."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    DistributedType,
    ParallelismConfig,
)

from ds_hetero.engine.ds_config import (
    has_active_section,
    size_of_configuration,
)
from ds_hetero.engine.patching import Function
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.frameworks.accelerate.process_counts import set_accelerate_state

made_after_registration: weakref.WeakSet[Accelerator] = weakref.WeakSet()


def asks_for_engine(accelerator: Accelerator) -> bool:
    """Return True if an Accelerator uses DeepSpeed with a configuration that requests this engine."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and has_active_section(plugin.deepspeed_config)


def count_processes(stock: Function, accelerator: Accelerator, *args: object, **kwargs: object) -> None:
    """Extend ``Accelerator.__init__``: add a ParallelismConfig, and count the ranks of a job without GPUs.

    On CPUs, accelerate counts only one process in a DeepSpeed job (``state.backend`` is None).
    """
    stock(accelerator, *args, **_with_parallelism(kwargs))
    made_after_registration.add(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        agree_on_configuration(accelerator.state.deepspeed_plugin.deepspeed_config)
    if asks_for_engine(accelerator) and accelerator.state.backend is None and dist.is_initialized():
        set_accelerate_state(
            backend=dist.get_backend(),
            num_processes=dist.get_world_size(),
            process_index=dist.get_rank(),
            local_process_index=dist.get_node_local_rank(fallback_rank=dist.get_rank()),
        )


def _with_parallelism(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an Accelerator, with a ParallelismConfig if neither script nor environment has one."""
    if arguments.get("parallelism_config") is not None or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return arguments
    plugin = arguments.get("deepspeed_plugin")
    if plugin is None:
        return arguments
    sp_size = size_of_configuration(plugin.deepspeed_config)
    if sp_size is None:
        return arguments
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=sp_size,
        dp_shard_size=int(os.environ["WORLD_SIZE"]) // sp_size,
        sp_handler=handler,
    )
    return {**arguments, "parallelism_config": parallelism}


def size_of_accelerate() -> int | None:
    """Return the sequence-parallel size of accelerate's configuration; None without sequence parallelism."""
    parallelism = getattr(AcceleratorState(), "parallelism_config", None) if is_initialized() else None
    if parallelism is None or parallelism.sp_size == 1:
        return None
    return int(parallelism.sp_size)
