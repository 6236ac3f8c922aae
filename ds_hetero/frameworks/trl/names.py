"""Private names of TRL that ds_hetero uses, and the releases that have them; checked for trainers of TRL only."""

from __future__ import annotations

PACKAGE = "trl"
WORKS = ">=1.16"
WORKS_BY_TOKENS = ">=0.29"
"""Releases for trainers whose loss is a mean over tokens. These trainers need none of the names."""

SHORTER_OUTPUTS = ("FusedCausalLMOutput",)
"""Classes of outputs with one result for each next token, and so with one column less than the batch."""

COMPLETION_FUNCTIONS = ("gather", "gather_object", "set_seed", "unwrap_model_for_generation")
"""Functions in the modules of trainers that generate completions; they are replaced."""

PRIVATE_NAMES = ("trl.trainer.utils:add_fused_lm_head", *(f"trl.trainer.utils:{name}" for name in SHORTER_OUTPUTS))
ATTRIBUTES = (
    "trl.trainer.sft_trainer:SFTTrainer._metrics",
    "trl.trainer.sft_trainer:SFTTrainer._total_train_tokens",
)
"""Private attributes that objects get at run time, with the class whose source sets them; tests check these sources."""
