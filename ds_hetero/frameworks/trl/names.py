"""Private names of TRL that ds_hetero builds on, and the releases that have them; checked where a trainer is TRL's."""

from __future__ import annotations

PACKAGE = "trl"
WORKS = ">=1.16,<2"
WORKS_BY_TOKENS = ">=0.29,<2"
"""Releases whose trainers that take a mean over tokens work, which need none of the names."""

SHORTER_OUTPUTS = ("FusedCausalLMOutput",)
"""Outputs whose results of tokens say of each token what it says of the next one: a column less than the batch."""

OF_COMPLETIONS = ("gather", "gather_object", "set_seed", "unwrap_model_for_generation")
"""Names in the modules of trainers that generate."""

PRIVATE_NAMES = ("trl.trainer.utils:add_fused_lm_head", *(f"trl.trainer.utils:{name}" for name in SHORTER_OUTPUTS))
ATTRIBUTES = (
    "trl.trainer.grpo_trainer:GRPOTrainer._is_vlm",
    "trl.trainer.rloo_trainer:RLOOTrainer._is_vlm",
    "trl.trainer.sft_trainer:SFTTrainer._metrics",
    "trl.trainer.sft_trainer:SFTTrainer._total_train_tokens",
)
"""Private attributes that objects get while the program runs, and the source that sets them; checked in the tests."""
