"""Types for the parts of DeepSpeed's objects that ds_hetero uses; they have no type information of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.job.monitor import EventWriter

Content = Mapping[str, Any]
"""Content of a file of a checkpoint, or of a part of it."""

State = dict[str, Any]
"""State of an optimizer or of a rank, as a checkpoint has it; a configuration that is made."""

Arguments = Mapping[str, Any]
"""Arguments of `deepspeed.initialize`, by name."""


class BatchSizes(Protocol):
    """Of `deepspeed.runtime.config.DeepSpeedConfig`: the batch that the engine reports."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int


class ThroughputTimer(Protocol):
    """Of `deepspeed.utils.timer.ThroughputTimer`."""

    batch_size: int


class CheckpointEngine(Protocol):
    """Of `deepspeed.runtime.checkpoint_engine.CheckpointEngine`."""

    def is_decoupled(self) -> bool:
        """Whether files are written after ``save`` has returned."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""


class Engine(Protocol):
    """Of `deepspeed.DeepSpeedEngine`; its wrapped methods are listed in `engine.HOOKS`."""

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
    optimizer: Any  # of a class for each ZeRO stage, or the user's
    param_names: Mapping[nn.Parameter, str]
    seq_parallel_group: ProcessGroup
    tput_timer: ThroughputTimer

    def bfloat16_enabled(self) -> bool:
        """Whether the model is trained in bf16."""

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step, by which ``backward`` divides the loss."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the optimizer steps on the gradients of the present backward."""

    def load_universal_checkpoint(self) -> bool:
        """Whether checkpoints to load are universal ones."""

    def steps_per_print(self) -> float | None:
        """Steps between two lines of the log."""

    def zero_load_from_fp32_weights(self) -> bool:
        """Whether loading takes the saved master weights, else those of the model."""

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are partitioned: ZeRO stage 3."""

    def zero_optimization_stage(self) -> int:
        """0 to 3."""

    def _copy_recovery_script(self, save_path: str) -> None: ...

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: Any) -> list[str]: ...

    def _get_all_zero_checkpoint_names(self, load_dir: str, tag: Any, bf16_mode: bool) -> list[str]: ...

    def _get_ckpt_name(self, checkpoints_path: str, tag: Any, pp_placeholder: str) -> str: ...

    def _get_rank_zero_ckpt_name(
        self, checkpoints_path: str, tag: Any, mp_rank: int, dp_rank: int, bf16_mode: bool
    ) -> str: ...

    def _get_zero_param_shapes(self) -> list[Content]: ...


class ZeroShard(Protocol):
    """``ds_tensor`` of a parameter of ZeRO-3: this rank's shard, a tensor with these attributes."""

    data: Tensor
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    ds_numel: int
    final_location: object
    status: object

    def detach(self) -> Tensor:
        """The tensor."""

    def to(self, dtype: torch.dtype) -> Tensor:
        """The tensor in another type."""


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

    def all_gather(self) -> object:
        """Make it whole."""

    def partition(self) -> None:
        """Keep this rank's shard alone."""

    def ds_summary(self) -> object:
        """Describe it, for errors."""
