"""The model that the benchmark trains, its data, and the numbers by which two trainings are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, LENGTH = 64, 64
LR, CLIP, SAMPLES = 1e-4, 1.0, 40


def make_model(*, is_lora: bool = False, width: int = 48, length: int = LENGTH, layers: int = 2) -> Any:
    """Return a Llama of a few layers with a dropout of 0; its weights are the same in every process.

    Args:
        is_lora: train only LoRA adapters of queries and values.
        length: tokens of the longest sequence.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=12,
            num_key_value_heads=6,
            max_position_embeddings=max(128, length),
            attn_implementation="sdpa",
        )
    )
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def make_loader(length: int = LENGTH, batch_size: int = 1, *, is_even: bool = False) -> Any:
    """Return a loader of sequences of different lengths, shuffled in every epoch by its own generator.

    Args:
        length: tokens of the longest sequence.
        is_even: make all sequences equally long, so that steps take equally long.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = [length if is_even else length // 2 + 7 * i % (length // 2) for i in range(SAMPLES)]
    rows = [torch.randint(0, VOCAB, (of_row,), generator=generator) for of_row in lengths]
    data = [{"input_ids": row, "labels": row} for row in rows]
    return torch.utils.data.DataLoader(
        data,
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(7),  # type: ignore[arg-type]
        collate_fn=None if batch_size == 1 else padded,
    )


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows of different lengths as one batch; attention and loss ignore the padding."""
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
    }


def make_scheduler(optimizer: Any) -> Any:
    """Return a scheduler that warms up over 30 steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))


def trained(model: Any) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def norm_of(parameters: list[Tensor]) -> float:
    """Return the Euclidean norm of all parameters, summed in float64."""
    return math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in parameters))
