"""Tables of all hooks around the methods of DeepSpeed's engines: one for each kind of engine.

The hooks of a method are listed outermost first: each calls the next, and the last one calls the engine's own method.
If their order matters, a comment says why. A part that an engine lacks has no hooks.
"""

from __future__ import annotations

from ds_hetero.frameworks.deepspeed.hook_makers import (
    HookRow,
    after,
    after_optimizer_step,
    before,
    of,
    recording,
    waiting,
    within,
)
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.frameworks.deepspeed.loading import load_any_layout, raise_on_all_ranks
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_any_plan, save_pipelines
from ds_hetero.frameworks.deepspeed.pipeline.hooks import keep_books, run_passes
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.replica_engine import ReplicaEngine
from ds_hetero.frameworks.deepspeed.saving import copy_script_last
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP


def hooks_of_replica(hooked: ReplicaEngine) -> list[HookRow]:
    """Return the hooks of an engine whose model is split over the sequence, or runs whole on every rank."""
    engine, trained = hooked.engine, hooked.trained
    rows = [HookRow("forward", before(hooked.note_forward))]
    if trained.batches is not None:
        # It runs forwards as probes, which are neither recorded nor timed: it is outside of these hooks.
        rows.append(HookRow("forward", trained.batches.around_forward))
    rows += [
        HookRow("forward", within(hooked.record_common_forward)),
        HookRow("forward", within(hooked.time_forward)),
        HookRow("forward", waiting("running a forward")),
        HookRow("backward", recording(BACKWARD)),
        HookRow("backward", within(hooked.time_backward)),
        HookRow("backward", waiting("running a backward")),
        # Innermost: its exchange of losses is part of the backward that is timed and that names lost ranks.
        HookRow("backward", hooked.scale_loss),
        HookRow("_backward_prologue", before(hooked.backwards.begin)),
        HookRow("_backward_epilogue", before(hooked.clock.note_gradients)),
        HookRow("_backward_epilogue", after(hooked.backwards.end)),
        *_begin_of_step(hooked),
        HookRow("step", after_optimizer_step(engine, hooked.record_step)),
        HookRow("step", waiting("running the engine's step")),
    ]
    if hooked.scaling is not None:
        # A refusal before the checks: checks run collectives, which all ranks have to reach in the same step.
        rows.append(HookRow("step", before(hooked.scaling.expect_scaled)))
    rows += [
        HookRow("step", after(hooked.backwards.end_step)),
        HookRow("step", before(hooked.check_step)),
        HookRow("step", before(hooked.compare_changed)),
        HookRow("zero_grad", after(hooked.backwards.end_step)),
        HookRow("destroy", before(hooked.monitor.report)),
        HookRow("destroy", before(hooked.report_prediction)),
        *_fixed_batch_sizes(hooked),
        # waiting names a rank that died during the whole save, DeepSpeed's part and ours.
        HookRow("save_checkpoint", recording(SAVE)),
        HookRow("save_checkpoint", waiting("saving a checkpoint")),
        HookRow("save_checkpoint", hooked.save_checkpoint),
        HookRow("_copy_recovery_script", of(engine, copy_script_last)),
        # load_checkpoint reads the manifest before DeepSpeed reads any file. raise_on_all_ranks is around the part that
        # may fail on one rank, since ranks wait for each other afterwards.
        HookRow("_load_checkpoint", waiting("loading a checkpoint")),
        HookRow("_load_checkpoint", hooked.load_checkpoint),
        HookRow("_load_checkpoint", of(engine, raise_on_all_ranks)),
        HookRow("_load_zero_checkpoint", of(engine, load_any_layout)),
    ]
    if hooked.experts is not None:
        rows += hooked.experts.hooks()
    return rows if hooked.stage3 is None else rows + _hooks_of_stage3(hooked.stage3)


def _hooks_of_stage3(stage3: Stage3Checkpoints) -> list[HookRow]:
    """Return the hooks of ZeRO-3's checkpoints; they are the innermost ones, next to the engine's own methods."""
    return [
        HookRow("_load_checkpoint", stage3.examine),
        HookRow("_load_zero_checkpoint", stage3.load_state),
        HookRow("load_module_state_dict", stage3.load_frozen_parameters),
        HookRow("_get_all_ckpt_names", stage3.list_model_files),
        HookRow("_get_param_fragment_func", stage3.equal_shard),
    ]


def hooks_of_pipelines(hooked: PipelinedEngine) -> list[HookRow]:
    """Return the hooks of an engine whose model is a stage of a pipeline."""
    return [
        # Outermost, before anything that may wait: when ranks hang, other ranks read these records to find out why.
        HookRow("forward", recording(FORWARD)),
        HookRow("forward", waiting("running the passes of a step")),
        HookRow("forward", of(hooked, run_passes)),
        HookRow("backward", recording(BACKWARD)),
        HookRow("backward", of(hooked, keep_books)),
        *_begin_of_step(hooked),
        HookRow("step", waiting("running the engine's step")),
        # A refusal before the checks: checks run collectives, which all ranks have to reach in the same step.
        HookRow("step", before(hooked.expect_passes)),
        HookRow("step", before(hooked.check_step)),
        HookRow("destroy", before(hooked.monitor.report)),
        *_fixed_batch_sizes(hooked),
        # waiting names a rank that died during the whole save, DeepSpeed's part and ours.
        HookRow("save_checkpoint", recording(SAVE)),
        HookRow("save_checkpoint", waiting("saving a checkpoint")),
        HookRow("save_checkpoint", of(hooked, save_pipelines)),
        HookRow("module_state_dict", of(hooked, frozen_state)),
        HookRow("load_checkpoint", waiting("loading a checkpoint")),
        HookRow("load_checkpoint", of(hooked, load_any_plan)),
    ]


def _begin_of_step(hooked: HookedEngine) -> list[HookRow]:
    """Return the hooks of ``step`` that are outside of all others: records, times, and saves of an elastic job."""
    rows = [
        HookRow("step", recording(STEP)),
        # take_times ends the step's record, so it is outside of time_step, which writes a phase into that record.
        HookRow("step", after_optimizer_step(hooked.engine, hooked.take_times)),
        HookRow("step", within(hooked.time_step)),
    ]
    if hooked.elastic is None:
        return rows
    # Outermost: it saves the state after everything that a step changes, and waits for copies before anything changes.
    return [HookRow("step", hooked.elastic.around_step), *rows]


def _fixed_batch_sizes(hooked: HookedEngine) -> list[HookRow]:
    """Return the hooks that raise an error when a script sets another batch size than the plan's."""
    return [
        HookRow("set_train_batch_size", before(hooked.refuse_batch_sizes)),
        HookRow("set_train_micro_batch_size", before(hooked.refuse_batch_sizes)),
    ]
