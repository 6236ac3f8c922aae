"""Types of DeepSpeed's objects, as far as ds_hetero uses them; DeepSpeed itself has no type information."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.job.monitor import EventWriter

Content = Mapping[str, Any]
"""Content of a file of a checkpoint, or of a part of it."""

State = dict[str, Any]
"""A dictionary that is built here: the state of an optimizer or a rank for a checkpoint, or a configuration."""

Arguments = Mapping[str, Any]
"""Arguments of `deepspeed.initialize`, by name."""


class BatchSizes(Protocol):
    """Batch sizes that an engine reports: part of `deepspeed.runtime.config.DeepSpeedConfig`."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int


class ThroughputTimer(Protocol):
    """Part of `deepspeed.utils.timer.ThroughputTimer`."""

    batch_size: int


class CheckpointEngine(Protocol):
    """Part of `deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine`."""

    def is_decoupled(self) -> bool:
        """Return whether ``save`` may return before the file is written."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""


class Engine(Protocol):
    """Part of `deepspeed.DeepSpeedEngine`. `hook_table` lists the methods that are wrapped."""

    _config: BatchSizes
    checkpoint_engine: CheckpointEngine
    dp_world_size: int
    global_samples: int
    global_steps: int
    inside_no_sync_ctxt: bool
    local_rank: int
    module: nn.Module
    micro_steps: int
    lr_scheduler: Any  # DeepSpeed's or the user's, or None
    monitor: EventWriter
    optimizer: Any  # DeepSpeed's for the ZeRO stage, or the user's
    param_names: dict[nn.Parameter, str]
    seq_parallel_group: ProcessGroup
    tput_timer: ThroughputTimer

    bfloat16_enabled: Callable[[], bool]  # whether the model is trained in bf16
    fp16_enabled: Callable[[], bool]  # whether the model is trained in fp16, with losses scaled
    gradient_accumulation_steps: Callable[[], int]  # micro-batches of a step, by which ``backward`` divides the loss
    is_gradient_accumulation_boundary: Callable[[], bool]  # whether the optimizer steps on the present gradients
    load_universal_checkpoint: Callable[[], bool]  # whether universal checkpoints are loaded
    steps_per_print: Callable[[], float | None]  # steps between two lines of the log
    was_step_applied: Callable[[], bool]  # whether the last optimizer step was taken, and not skipped
    zero_load_from_fp32_weights: Callable[[], bool]  # whether saved master weights are loaded; else the model's weights
    zero_optimization_partition_weights: Callable[[], bool]  # whether parameters are partitioned: ZeRO stage 3
    gradient_clipping: Callable[[], float]
    zero_optimization_stage: Callable[[], int]  # 0 to 3
    _copy_recovery_script: Callable[[str], None]  # takes the folder to copy it to
    _get_all_ckpt_names: Callable[[str, Any], list[str]]  # takes a folder and a tag
    _get_all_zero_checkpoint_names: Callable[[str, Any, bool], list[str]]  # takes a folder, a tag, and whether in bf16
    _get_ckpt_name: Callable[..., str]
    _get_rank_zero_ckpt_name: Callable[..., str]
    _get_zero_param_shapes: Callable[[], list[Content]]


class ZeroShard(Protocol):
    """This rank's shard of a ZeRO-3 parameter, ``ds_tensor``: a tensor with these attributes."""

    data: Tensor
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    ds_numel: int
    final_location: object
    status: object

    detach: Callable[[], Tensor]
    to: Callable[[torch.dtype], Tensor]


class ZeroParameter(Protocol):
    """A parameter of ZeRO-3."""

    data: Tensor
    grad: Tensor
    requires_grad: bool
    ds_id: int
    ds_numel: int
    ds_numel_aligned: int
    ds_process_group: ProcessGroup
    ds_shape: torch.Size
    ds_status: object
    ds_tensor: ZeroShard
    all_gather_coalesced: Any
    partition_numel: Any

    all_gather: Callable[[], object]  # gathers the whole parameter
    partition: Callable[[], None]  # frees everything but this rank's shard
    ds_summary: Callable[[], object]  # describes the parameter, for errors
