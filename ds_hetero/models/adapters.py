"""Adapters beside frozen weights (LoRA, arXiv:2106.09685), and frozen weights in few bits (QLoRA, arXiv:2305.14314).

Adapters stand beside every product with a weight of a layer, as PEFT's ``target_modules="all-linear"`` puts them there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ds_hetero.common.limits import is_whole
from ds_hetero.common.reading import shortened
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

USUAL_RANK = 16
MAX_RANK = 65_536


class Quantization(NamedTuple):
    """Frozen weights in few bits.

    Args:
        weight_bytes: of a parameter, with its share of the constants of its block.
        moved_bytes: bytes of memory traffic that its restoration costs in every pass, at the rate of elementwise work;
            fitted to measured steps (`benchmarks.real_cards`), since kernels that unpack bits do not reach that rate.
    """

    weight_bytes: float
    moved_bytes: float


QUANTIZATIONS = {
    "nf4": Quantization(0.516, 6.0),  # 4 bits and 0.127 for two levels of constants (arXiv:2305.14314, section 3)
    "gptq": Quantization(0.53, 11.0),  # 4 bits, a scale and a zero per 128
}


class Training(NamedTuple):
    """Weights that are trained.

    Args:
        adapter_rank: of adapters beside frozen weights; 0 where all weights are trained.
        quantization: of the frozen weights, one of `QUANTIZATIONS`; None for the data type of training.
    """

    adapter_rank: int = 0
    quantization: str | None = None


_TEXT = re.compile(r"(full|lora|qlora)(?::(\d{1,6}))?")


def read_training(text: str) -> Training:
    """Read ``full``, ``lora``, ``lora:RANK``, ``qlora`` or ``qlora:RANK``.

    Raises:
        PlanError: it is none of these.
    """
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
    """Weights of the adapters of a layer: two narrow matrices beside every product, of all experts."""
    into, out = adapter_widths(model, experts=max(model.num_experts, 1))
    return rank * (into + out)


def adapter_widths(model: ModelSpec, experts: int = 1) -> tuple[int, int]:
    """Inputs and outputs of a layer's products with weights, summed: of attention and of some experts."""
    hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    upwards = 2 if model.gated_mlp else 1
    into = 3 * hidden + query + experts * (upwards * hidden + model.mlp_size)
    out = query + 2 * kv + hidden + experts * (upwards * model.mlp_size + hidden)
    return into, out
