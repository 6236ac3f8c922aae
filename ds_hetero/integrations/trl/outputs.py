"""What TRL's models return."""

from __future__ import annotations

from typing import Any

__all__ = ["PRIVATE_NAMES", "is_one_shorter"]

PRIVATE_NAMES = ("trl.trainer.utils:add_fused_lm_head", "trl.trainer.utils:FusedCausalLMOutput")


def is_one_shorter(outputs: Any) -> bool:
    """Whether results of tokens have one column less than the batch: what each token says of the next one, in TRL."""
    return type(outputs).__name__ == "FusedCausalLMOutput"
