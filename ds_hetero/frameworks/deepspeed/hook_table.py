"""All hooks around the methods of DeepSpeed's engines: `HOOKS`, one table.

The hooks of a method are listed outermost first: each of them calls the next, and the last one the engine's own method.
Where their order matters the reason stands at the row.
"""

from __future__ import annotations

from ds_hetero.frameworks.deepspeed import hooks as split
from ds_hetero.frameworks.deepspeed.elastic import ElasticEngine
from ds_hetero.frameworks.deepspeed.hooks import (
    SplitEngine,
    after,
    after_optimizer_step,
    before,
    check_step,
    recording,
    refuse_batch_sizes,
    waiting,
    within,
)
from ds_hetero.frameworks.deepspeed.installer import HookRow
from ds_hetero.frameworks.deepspeed.loading import load_any_layout, raise_on_all_ranks
from ds_hetero.frameworks.deepspeed.losses import BackwardsOfStep, LossScaling
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_any_plan, save_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.hooks import expect_passes, keep_books, run_passes
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.saving import copy_script_last
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP
from ds_hetero.runtime.step_clock import StepClock

HOOKS = (
    # Recorded before anything that may wait: another rank's diagnosis reads the record of a rank that hangs.
    HookRow("forward", recording(FORWARD), PipelinedEngine),
    HookRow("forward", waiting("running the passes of a step"), PipelinedEngine),
    HookRow("forward", run_passes, PipelinedEngine),
    # The probes of find_unit run forwards of their own, which are neither recorded nor timed.
    HookRow("forward", before(split.note_forward), SplitEngine),
    HookRow("forward", split.find_unit, SplitEngine),
    HookRow("forward", within(split.record_common_forward), SplitEngine),
    HookRow("forward", within(split.time_forward), SplitEngine),
    HookRow("forward", waiting("running a forward"), SplitEngine),
    HookRow("backward", recording(BACKWARD)),
    HookRow("backward", keep_books, PipelinedEngine),
    HookRow("backward", within(split.time_backward), SplitEngine),
    HookRow("backward", waiting("running a backward"), SplitEngine),
    # Innermost: its exchange of losses belongs to the backward that is timed, and may fail as one of its collectives.
    HookRow("backward", split.scale_loss, SplitEngine),
    HookRow("_backward_prologue", before(BackwardsOfStep.begin), SplitEngine, "backwards"),
    HookRow("_backward_epilogue", before(StepClock.note_gradients), SplitEngine, "clock"),
    HookRow("_backward_epilogue", after(BackwardsOfStep.end), SplitEngine, "backwards"),
    # Outermost: state is saved after everything that a step changes, and copies must end before anything changes it.
    HookRow("step", ElasticEngine.around_step, part="elastic"),
    HookRow("step", recording(STEP)),
    # take_times ends the step's record, so it stands around the phase that time_step writes into it.
    HookRow("step", after_optimizer_step(split.take_times)),
    HookRow("step", within(split.time_step)),
    HookRow("step", after_optimizer_step(split.record_step), SplitEngine),
    HookRow("step", waiting("running the engine's step")),
    # Refusals, then the checks: they run collectives, which all ranks have to reach with the same step.
    HookRow("step", before(expect_passes), PipelinedEngine),
    HookRow("step", before(LossScaling.expect_scaled), SplitEngine, "scaling"),
    HookRow("step", after(BackwardsOfStep.forget), SplitEngine, "backwards"),
    HookRow("step", before(check_step)),
    HookRow("step", before(split.compare_changed), SplitEngine),
    HookRow("zero_grad", after(BackwardsOfStep.forget), SplitEngine, "backwards"),
    HookRow("destroy", before(StepMonitor.report), part="monitor"),
    HookRow("destroy", before(split.report_prediction), SplitEngine),
    HookRow("set_train_batch_size", before(refuse_batch_sizes)),
    HookRow("set_train_micro_batch_size", before(refuse_batch_sizes)),
    # The time-out of a rank that died stands around the whole save, ours and DeepSpeed's.
    HookRow("save_checkpoint", recording(SAVE)),
    HookRow("save_checkpoint", waiting("saving a checkpoint")),
    HookRow("save_checkpoint", save_pipelines, PipelinedEngine),
    HookRow("save_checkpoint", split.save_checkpoint, SplitEngine),
    HookRow("_copy_recovery_script", copy_script_last, SplitEngine, "engine"),
    HookRow("module_state_dict", frozen_state, PipelinedEngine),
    HookRow("load_checkpoint", waiting("loading a checkpoint"), PipelinedEngine),
    HookRow("load_checkpoint", load_any_plan, PipelinedEngine),
    # load_checkpoint reads the manifest before any file of DeepSpeed; raise_on_all_ranks stands around what may fail on
    # one rank, since the ranks wait for each other after it.
    HookRow("_load_checkpoint", waiting("loading a checkpoint"), SplitEngine),
    HookRow("_load_checkpoint", split.load_checkpoint, SplitEngine),
    HookRow("_load_checkpoint", raise_on_all_ranks, SplitEngine, "engine"),
    HookRow("_load_checkpoint", Stage3Checkpoints.examine, SplitEngine, "stage3"),
    HookRow("_load_zero_checkpoint", load_any_layout, SplitEngine, "engine"),
    HookRow("_load_zero_checkpoint", Stage3Checkpoints.load_state, SplitEngine, "stage3"),
    HookRow("load_module_state_dict", Stage3Checkpoints.load_frozen_parameters, SplitEngine, "stage3"),
    HookRow("_get_all_ckpt_names", Stage3Checkpoints.list_model_files, SplitEngine, "stage3"),
    HookRow("_get_param_fragment_func", Stage3Checkpoints.equal_shard, SplitEngine, "stage3"),
)
"""The hooks of each method, outermost first."""
