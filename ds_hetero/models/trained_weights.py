"""Weights that are trained: all of them, or adapters beside frozen ones (LoRA, QLoRA).

Adapters stand beside every matmul with a weight of a layer, as PEFT's ``target_modules="all-linear"`` puts them there.
Sources: LoRA (arXiv:2106.09685), and QLoRA for frozen weights in few bits (arXiv:2305.14314).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ds_hetero.common.reading import is_whole, shortened
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

USUAL_RANK = 16  # of LoRA where none is given; chosen, never measured
MAX_RANK = 65_536  # chosen, never measured: a larger number is a slip


class Quantization(NamedTuple):
    """Frozen weights in few bits.

    Args:
        weight_bytes: bytes of a parameter, with its share of the constants of its block.
        moved_bytes: bytes of memory traffic that unpacking a parameter costs in every pass, at the rate of elementwise
            work; fitted to measured steps (`benchmarks.real_cards`), since unpacking kernels do not reach that rate.
    """

    weight_bytes: float
    moved_bytes: float


QUANTIZATIONS = {
    "nf4": Quantization(0.516, 6.0),  # 4 bits and 0.127 for two levels of constants (arXiv:2305.14314, section 3)
    "gptq": Quantization(0.53, 11.0),  # 4 bits, a scale and a zero per 128
}


class Training(NamedTuple):
    """Weights that are trained."""

    adapter_rank: int = 0  # of adapters beside frozen weights; 0 where all weights are trained
    quantization: str | None = None  # of the frozen weights, one of `QUANTIZATIONS`; None for the data type of training


_TEXT = re.compile(r"(full|lora|qlora)(?::(\d{1,6}))?")


def read_training(text: str) -> Training:
    """Read ``full``, ``lora``, ``lora:RANK``, ``qlora`` or ``qlora:RANK``. Raises `PlanError`: it is none of these."""
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None or (match[1] == "full" and match[2]):
        raise PlanError(f"--train must be full, lora[:rank] or qlora[:rank], such as lora:16, got {shortened(text)}.")
    if match[1] == "full":
        return Training()
    rank = int(match[2] or USUAL_RANK)
    if not is_whole(rank, 1, MAX_RANK):
        raise PlanError(f"--train {shortened(text)}: the rank must be a whole number from 1 to {MAX_RANK:,}.")
    return Training(rank, "nf4" if match[1] == "qlora" else None)


def adapter_parameters(model: ModelSpec, rank: int) -> int:
    """Weights of a layer's adapters: two narrow matrices beside every matmul, of all experts."""
    into, out = adapter_widths(model, experts=max(model.num_experts, 1))
    return rank * (into + out)


def adapter_widths(model: ModelSpec, experts: int = 1) -> tuple[int, int]:
    """Return the summed widths of the inputs, and of the outputs, of a layer's matmuls with weights.

    Args:
        experts: MLPs that count, 1 of a dense layer.
    """
    hidden, mlp = model.hidden_size, model.mlp_size
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    up_matrices = 2 if model.gated_mlp else 1
    attention_inputs = 3 * hidden + query  # of q, k, v; of the output projection
    attention_outputs = query + 2 * kv + hidden
    mlp_inputs = up_matrices * hidden + mlp
    mlp_outputs = up_matrices * mlp + hidden
    return attention_inputs + experts * mlp_inputs, attention_outputs + experts * mlp_outputs
