"""Private names of DeepSpeed that ds_hetero builds on, and the releases that have them."""

from __future__ import annotations

PACKAGE = "deepspeed"
WORKS = ">=0.18.4,!=0.19.6"  # 0.19.6: a loss of ZeRO-3 was NaN in one of two runs of a test, the cause is not known
"""Releases that can be used; a release that was not tried is compared with those that were: `ds_hetero.engine.surface`.
Where a release computes something wrongly, what leads to it is refused: `ds_hetero.frameworks.deepspeed.keys`."""

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
"""Methods in which a rank waits for others outside of attention: for gradients, parameters, norms and flags."""

HANDLES = ("AllGatherCoalescedHandle", "AllGatherHandle")
"""Classes whose ``wait`` waits for parameters of ZeRO-3."""

ZERO_3_IDENTITIES = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")
"""Functions of autograd that ZeRO-3 applies to the outputs and inputs of modules; they return their inputs."""

_ENGINE = (
    "_backward_epilogue",
    "_backward_prologue",
    "_copy_recovery_script",
    "_do_optimizer_sanity_check",
    "_get_all_ckpt_names",
    "_get_all_zero_checkpoint_names",
    "_get_buffer_names",
    "_get_ckpt_name",
    "_get_param_fragment_func",
    "_get_rank_zero_ckpt_name",
    "_get_shared_params",
    "_get_zero_param_shapes",
    "_load_checkpoint",
    "_load_zero_checkpoint",
    "_save_checkpoint",
    "_save_zero_checkpoint",
    "_take_model_step",
    "backward",
    "bfloat16_enabled",
    "buffered_allreduce_fallback",
    "clip_fp32_gradients",
    "load_checkpoint",
    "load_module_state_dict",
    "load_universal_checkpoint",
    "module_state_dict",
    "save_16bit_model",
    "save_checkpoint",
    "set_train_batch_size",
    "set_train_micro_batch_size",
    "was_step_applied",
    "zero_load_from_fp32_weights",
    "zero_optimization_partition_weights",
)
_STAGES_1_AND_2 = (
    "_fill_param_grad_accum_attribute",
    "_get_offload_gradient_dict",
    "_has_inf_or_nan",
    "_lazy_init_hp_params_optimizer_state",
    "_link_all_hp_params",
    "_load_global_state",
    "_load_universal_checkpoint",
    "_optimizer_step",
    "flatten_dense_tensors_aligned",
    "get_data_parallel_partitions",
    "get_grad_position",
    "get_param_id",
    "get_gradient_for_reduction",
    "get_partition_info",
    "independent_gradient_partition_epilogue",
    "initialize_gradient_partition",
    "initialize_gradient_partitioning_data_structures",
    "load_hp_checkpoint_state_from_checkpoint_dir",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "scaled_global_norm",
    "setup_buckets",
    "refresh_fp32_params",
    "update_lp_params",
)
_STAGE_3 = (
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    "_clear_fp32_optimizer_param_groups",
    "_create_fp16_sub_groups",
    "_fp32_state_allgather",
    "_get_fp32_grad_state_partition",
    "_get_norm_groups",
    "_optimizer_step",
    "_pre_step",
    "_rigid_state_dict",
    "_set_fp32_optimizer_param_groups",
    "_swappable_optimizer_subgroup",
    "get_fp32_grad_for_param",
    "independent_gradient_partition_epilogue",
    "initialize_ds_offload",
    "load_hp_checkpoint_state",
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
    "partition_grads",
    "set_fp32_grad_for_param",
    "set_full_hp_param",
    "set_local_grad_for_param",
    "set_local_hp_param",
    "step",
    "update_fp32_grad_for_param_vectorized",
)
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"

PRIVATE_NAMES = (
    "deepspeed:initialize",
    "deepspeed.runtime.engine:BFLOAT16",
    "deepspeed.runtime.engine:DeepSpeedZeroOptimizer",
    "deepspeed.runtime.engine:ZERO_OPTIMIZATION",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.initialize_optimizer_states",
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.initialize_optimizer_states",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp:get_sequence_parallel_world_size",
    "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadOptimizer_Stage3",
    "deepspeed.runtime.zero.config:get_zero_config",
    "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups",
    "deepspeed.runtime.zero.stage_1_and_2:split_half_float_double",
    "deepspeed.utils:link_hp_params",
    "deepspeed.utils.groups:_get_sequence_parallel_group",
    "deepspeed.utils.groups:mesh_device",
    "deepspeed.utils.groups:mpu",
    f"{_ULYSSES}:TiledFusedLogitsLoss.forward",
    f"{_ULYSSES}:UlyssesSPAttentionHF.register_with_transformers",
    f"{_ULYSSES}:UlyssesSPDataLoaderAdapter.__init__",
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator._invalidate_trace",
    "deepspeed.runtime.zero.parameter_offload:iter_params",
    f"{_PARTITIONS}:Init._all_gather",
    f"{_PARTITIONS}:Init._partition_param",
    f"{_PARTITIONS}:assert_ints_same_as_other_ranks",
    f"{_PARTITIONS}:get_allgather_dtype",
    *(f"{_PARTITIONS}:{name}.wait" for name in HANDLES),
    *(f"deepspeed.comm.torch:TorchBackend.{name}" for name in COLLECTIVES),
    *(f"deepspeed.runtime.engine:DeepSpeedEngine.{name}" for name in _ENGINE),
    *(f"deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.{name}" for name in _STAGES_1_AND_2),
    *(f"deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.{name}" for name in _STAGE_3),
)
"""All private names, as ``module:attribute`` or ``module:Class.attribute``; `ds_hetero.register` checks them."""

HAND_OVER = "_offload_grad_partition_at_boundary"
"""Method of ZeRO-3 from 0.19.5 on that hands an offloaded optimizer one gradient."""

OWN_GROUPS = "_grad_norm_counts_every_rank"
"""Method of ZeRO-3 from 0.19.8 on: norms where parameters have groups of their own. Older releases were not tried."""

STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
IN_SOME_RELEASES = (
    "deepspeed.runtime.base_optimizer:ZeROOptimizer._epilogue_ran_this_backward",  # not in 0.18.4, as the next
    "deepspeed.runtime.base_optimizer:ZeROOptimizer.clear_backward_seen_flag",  # called where the former is true
    f"{STAGE_3}.{HAND_OVER}",
    f"{STAGE_3}.{OWN_GROUPS}",
    f"{STAGE_3}._offload_boundary_param_ids",  # not before 0.19.5, as the next
    f"{STAGE_3}._swap_out_offload_fp32_gradients",
)
"""Private names that are used where a release has them."""

ATTRIBUTES = (
    "deepspeed.runtime.engine:DeepSpeedEngine._config",
    *(f"deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.{name}" for name in ZERO_3_IDENTITIES),
    *(
        f"deepspeed.runtime.zero.{optimizer}.is_gradient_accumulation_boundary"
        for optimizer in ("stage_1_and_2:DeepSpeedZeroOptimizer", "stage3:DeepSpeedZeroOptimizer_Stage3")
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__param_id_to_grad_partition",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.grad_partitions_flat_buffer",
    "deepspeed.utils.mixed_precision_linkage:link_hp_params._hp_mapping",
)
"""Private attributes that objects get at run time, each with the class or function that sets it; tests check them."""
