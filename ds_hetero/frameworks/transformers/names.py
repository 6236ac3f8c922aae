"""Private names of transformers that ds_hetero uses, and the releases of transformers that have them."""

from __future__ import annotations

PACKAGE = "transformers"
WORKS = ">=5.6"

MASK_PARTS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks",
    "sliding_window_overlay",
    "packed_sequence_mask_function",  # packing is read from the positions of the whole sequence instead
)
"""Functions of which transformers composes masks."""

_TRAINER = (
    "__init__",
    "_get_dataloader",
    "_get_num_items_in_batch",
    "_get_output_dir",
    "_get_train_sampler",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_prepare_inputs",
    "_run_epoch",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_track_num_input_tokens",
    "compute_loss",
    "evaluate",
    "evaluation_loop",
    "get_batch_samples",
    "get_sp_size",
    "get_total_train_batch_size",
    "predict",
    "save_model",
    "set_initial_training_values",
    "train",
    "training_step",
)

PRIVATE_NAMES = (
    "transformers:AttentionInterface._global_mapping",
    "transformers:AttentionMaskInterface._global_mapping",
    "transformers:PreTrainedModel._from_config",
    "transformers:PreTrainedModel._init_weights",
    "transformers:PretrainedConfig._attn_implementation",
    "transformers.configuration_utils:PretrainedConfig._experts_implementation",
    "transformers.trainer:deepspeed_load_checkpoint",
    "transformers.trainer:skip_first_batches",
    *(f"transformers.masking_utils:{name}" for name in MASK_PARTS),
    *(f"transformers:Trainer.{name}" for name in _TRAINER),
)
"""``module:attribute`` or ``module:Class.attribute``; `ds_hetero.registration` checks that they exist."""

ATTRIBUTES = (
    "transformers.configuration_utils:PretrainedConfig._attn_implementation_internal",
    "transformers.configuration_utils:PretrainedConfig._experts_implementation_internal",
    "transformers.modeling_utils:PreTrainedModel._gradient_checkpointing_func",
    "transformers.modeling_utils:PreTrainedModel._is_hf_initialized",
    *(
        f"transformers:Trainer.{name}"
        for name in (
            *("_globalstep_last_logged", "_initial_global_step"),
            *("_total_loss_scalar", "_tr_loss"),
        )
    ),
)
"""Private attributes that objects get at run time, with the class whose source sets them; tests check these sources."""

IN_SOME_RELEASES = ("transformers:Trainer._loss_shifts_labels",)
"""Private names that are used where a release has them."""

ARGUMENTS_OF = (
    "transformers.generation.utils:GenerationMixin.prepare_inputs_for_generation",
    "transformers.masking_utils:create_causal_mask",
    "transformers.masking_utils:create_sliding_window_causal_mask",
    "transformers.models.llama.modeling_llama:LlamaForCausalLM.forward",
    "transformers.models.llama.modeling_llama:LlamaModel.forward",
)
"""Functions whose arguments are read by name where models are called: ``past_key_values`` was renamed in 5.24."""
