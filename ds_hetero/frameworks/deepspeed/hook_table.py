"""All hooks around the methods of DeepSpeed's engines: `HOOKS`, one table."""

from __future__ import annotations

from ds_hetero.frameworks.deepspeed.checkpoints.loading import load_any_layout, raise_on_all_ranks
from ds_hetero.frameworks.deepspeed.checkpoints.saving import copy_script_last
from ds_hetero.frameworks.deepspeed.elastic import save_after_step
from ds_hetero.frameworks.deepspeed.hooks import split_hooks as split
from ds_hetero.frameworks.deepspeed.hooks.hooks import (
    HookRow,
    recording,
    refuse_batch_sizes,
    report_times,
    time_step,
    waiting,
)
from ds_hetero.frameworks.deepspeed.hooks.split_hooks import SplitEngine
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_any_plan, save_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.hooked_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.pipeline.hooks import expect_passes, keep_books, run_passes
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP

HOOKS = (
    HookRow("forward", recording(FORWARD), PipelinedEngine),
    HookRow("forward", waiting("running the passes of a step"), PipelinedEngine),
    HookRow("forward", run_passes, PipelinedEngine),
    HookRow("forward", split.find_unit, SplitEngine),
    HookRow("forward", split.record_common_forward, SplitEngine),
    HookRow("forward", split.time_forward, SplitEngine),
    HookRow("forward", waiting("running a forward"), SplitEngine),
    HookRow("backward", recording(BACKWARD)),
    HookRow("backward", keep_books, PipelinedEngine),
    HookRow("backward", split.time_backward, SplitEngine),
    HookRow("backward", waiting("running a backward"), SplitEngine),
    HookRow("backward", split.scale_loss, SplitEngine),
    HookRow("_backward_prologue", split.begin_backward, SplitEngine),
    HookRow("_backward_epilogue", split.end_backward, SplitEngine),
    HookRow("step", save_after_step, SplitEngine),
    HookRow("step", recording(STEP)),
    HookRow("step", time_step),
    HookRow("step", split.record_step, SplitEngine),
    HookRow("step", waiting("running the engine's step")),
    HookRow("step", expect_passes, PipelinedEngine),
    HookRow("step", split.expect_scaled_loss, SplitEngine),
    HookRow("step", split.forget_backwards, SplitEngine),
    HookRow("zero_grad", split.forget_backwards, SplitEngine),
    HookRow("destroy", report_times),
    HookRow("destroy", split.report_prediction, SplitEngine),
    HookRow("set_train_batch_size", refuse_batch_sizes),
    HookRow("set_train_micro_batch_size", refuse_batch_sizes),
    HookRow("save_checkpoint", recording(SAVE)),
    HookRow("save_checkpoint", waiting("saving a checkpoint")),
    HookRow("save_checkpoint", save_pipelines, PipelinedEngine),
    HookRow("save_checkpoint", split.save_checkpoint, SplitEngine),
    HookRow("_copy_recovery_script", split.of_engine_alone(copy_script_last), SplitEngine),
    HookRow("module_state_dict", frozen_state, PipelinedEngine),
    HookRow("load_checkpoint", waiting("loading a checkpoint"), PipelinedEngine),
    HookRow("load_checkpoint", load_any_plan, PipelinedEngine),
    HookRow("_load_checkpoint", waiting("loading a checkpoint"), SplitEngine),
    HookRow("_load_checkpoint", split.load_checkpoint, SplitEngine),
    HookRow("_load_checkpoint", split.of_engine_alone(raise_on_all_ranks), SplitEngine),
    HookRow("_load_checkpoint", split.of_stage3_alone(Stage3Checkpoints.examine), SplitEngine),
    HookRow("_load_zero_checkpoint", split.of_engine_alone(load_any_layout), SplitEngine),
    HookRow("_load_zero_checkpoint", split.of_stage3_alone(Stage3Checkpoints.load_state), SplitEngine),
    HookRow("load_module_state_dict", split.of_stage3_alone(Stage3Checkpoints.load_frozen_parameters), SplitEngine),
    HookRow("_get_all_ckpt_names", split.of_stage3_alone(Stage3Checkpoints.list_model_files), SplitEngine),
    HookRow("_get_param_fragment_func", split.of_stage3_alone(Stage3Checkpoints.equal_shard), SplitEngine),
)
"""Of one method outermost first."""
