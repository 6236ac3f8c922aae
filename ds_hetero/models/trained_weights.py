"""Trained weights of a job: all weights, or adapters on frozen weights (LoRA, QLoRA), read from ``--train``.

Every weight matrix of a layer has an adapter, as with PEFT's ``target_modules="all-linear"``: two matrices of rank R,
``in x R`` and ``R x out``.
Sources: LoRA (arXiv:2106.09685), and QLoRA for frozen weights in few bits (arXiv:2305.14314).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ds_hetero.common.reading import is_whole, shortened
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

USUAL_RANK = 16  # rank of adapters if none is given; chosen, never measured
MAX_RANK = 65_536  # chosen, never measured: a larger number is a slip


class Quantization(NamedTuple):
    """Storage of frozen weights in few bits.

    Args:
        weight_bytes: bytes of a parameter, its part of the constants of its block included.
        moved_bytes: bytes of memory traffic per parameter and pass that take as long, at the memory's bandwidth, as
            unpacking the weight does. Fitted to measured steps (`benchmarks.real_cards`); the kernels that unpack are
            slower than the memory.
    """

    weight_bytes: float
    moved_bytes: float


QUANTIZATIONS = {
    "nf4": Quantization(0.516, 6.0),  # 4 bits, and 0.127 bits for two levels of constants (arXiv:2305.14314, section 3)
    "gptq": Quantization(0.53, 11.0),  # 4 bits, and a scale and a zero point per 128 weights
}


class Training(NamedTuple):
    """Choice of the weights that are trained."""

    adapter_rank: int = 0  # rank of adapters on frozen weights; 0: all weights are trained
    quantization: str | None = None  # key of `QUANTIZATIONS` of the frozen weights; None: the data type of training


_TRAINING = re.compile(r"(full|lora|qlora)(?::(\d{1,6}))?")


def read_training(text: str) -> Training:
    """Read ``full``, ``lora``, ``lora:RANK``, ``qlora`` or ``qlora:RANK``. Raises `PlanError`: it is none of these."""
    match = _TRAINING.fullmatch(text.strip().lower())
    if match is None or (match[1] == "full" and match[2]):
        raise PlanError(f"--train must be full, lora[:rank] or qlora[:rank], such as lora:16, got {shortened(text)}.")
    if match[1] == "full":
        return Training()
    rank = int(match[2] or USUAL_RANK)
    if not is_whole(rank, 1, MAX_RANK):
        raise PlanError(f"--train {shortened(text)}: the rank must be a whole number from 1 to {MAX_RANK:,}.")
    return Training(rank, "nf4" if match[1] == "qlora" else None)


def adapter_parameters(model: ModelSpec, rank: int, cut: int = 1) -> int:
    """Return the weights of a layer's adapters of this rank, those of all experts included.

    A matrix of 4,096 x 1,024 has an adapter of rank * (4,096 + 1,024) weights.

    Args:
        cut: devices that share every matrix by tensor parallelism. Each holds its part of one of LoRA's two matrices,
            and the other one whole: that which reads or writes the hidden states.
    """
    experts = max(model.num_experts, 1)
    input_widths, output_widths = adapter_widths(model, experts)
    widths = input_widths + output_widths
    if cut > 1:
        whole_widths = model.hidden_size * _matrices_at_hidden_states(model, experts)
        widths = whole_widths + (widths - whole_widths) / cut
    return int(rank * widths)


def expert_adapter_parameters(model: ModelSpec, rank: int) -> int:
    """Return the weights of the adapters on all experts of a layer; the mean if some layers have no experts."""
    beside_experts = int(rank * sum(adapter_widths(model, 0)))
    return adapter_parameters(model, rank) - beside_experts if model.num_experts else 0


def _matrices_at_hidden_states(model: ModelSpec, experts: int) -> int:
    """Count the weight matrices of a layer that read or write hidden states: q, k, v, the output, and those of MLPs."""
    num_mlps = experts + bool(model.shared_mlp_size)
    return 4 + (3 if model.gated_mlp else 2) * num_mlps


def adapter_widths(model: ModelSpec, experts: int = 1) -> tuple[float, float]:
    """Return two sums over the weight matrices of a layer: of their input widths, and of their output widths.

    Adapters of rank R have R weights for every unit of both sums. If some layers have no experts, the sums are means
    over all layers.

    Args:
        experts: number of experts of a layer that are counted; a dense layer has one MLP in any case.
    """
    attention_inputs, attention_outputs = _attention_widths(model)
    mlp_inputs, mlp_outputs = _mlp_widths(model, model.mlp_size)
    inputs, outputs = attention_inputs + experts * mlp_inputs, attention_outputs + experts * mlp_outputs
    if model.shared_mlp_size:
        shared_inputs, shared_outputs = _mlp_widths(model, model.shared_mlp_size)
        inputs, outputs = inputs + shared_inputs, outputs + shared_outputs
    if not model.dense_layers:
        return inputs, outputs
    dense_inputs, dense_outputs = adapter_widths(model.dense)
    dense_share = model.dense_layers / model.num_layers
    return inputs + dense_share * (dense_inputs - inputs), outputs + dense_share * (dense_outputs - outputs)


def _attention_widths(model: ModelSpec) -> tuple[int, int]:
    """Return the summed input widths, and the summed output widths, of the weight matrices of attention."""
    hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    latent = model.latent
    if latent is None:
        return 3 * hidden + query, query + 2 * kv + hidden  # q, k, v, and the output projection
    value = model.num_heads * latent.value_dim
    unrotated_keys_and_values = query - model.num_heads * latent.rope_dim + value
    # Matrices down to the latent vector, up from it to keys and values, and out.
    inputs = hidden + latent.kv_rank + value
    outputs = latent.kv_rank + latent.rope_dim + unrotated_keys_and_values + hidden
    if not latent.query_rank:  # one matrix to queries
        return inputs + hidden, outputs + query
    return inputs + hidden + latent.query_rank, outputs + latent.query_rank + query


def _mlp_widths(model: ModelSpec, mlp_size: int) -> tuple[int, int]:
    """Return the summed input widths, and the summed output widths, of the weight matrices of an MLP."""
    num_up_matrices = 2 if model.gated_mlp else 1  # gate and up, or up alone; then one matrix down
    return num_up_matrices * model.hidden_size + mlp_size, num_up_matrices * mlp_size + model.hidden_size
