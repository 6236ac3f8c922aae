"""Outputs of TRL's models."""

from __future__ import annotations

from typing import Any

PRIVATE_NAMES = ("trl.trainer.utils:add_fused_lm_head", "trl.trainer.utils:FusedCausalLMOutput")


def is_one_shorter(outputs: Any) -> bool:
    """Whether results of tokens have one column less than the batch: what each token says of the next one, in TRL."""
    return type(outputs).__name__ == "FusedCausalLMOutput"
