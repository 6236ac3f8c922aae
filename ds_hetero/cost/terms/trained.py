"""Numbers of trained parameters, and bytes of weights, for full training, LoRA adapters and quantized weights.

Experts that are divided among ranks are left out, and so are adapters on them:
`ds_hetero.cost.terms.model_states` counts them where they live.
"""

from __future__ import annotations

from ds_hetero.cost.terms.expert_shares import divided_adapters_of_layer, divided_of_layer
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import QUANTIZATIONS, adapter_parameters

ADAPTER_BYTES = 4  # PEFT keeps adapters in fp32, ``autocast_adapter_dtype``


def trained_of_layer(model: ModelSpec, workload: Workload, cut: int = 1) -> float:
    """Number of trained parameters of one layer on a device: all of them, or those of its adapters.

    Args:
        cut: devices that share the layer by tensor parallelism.
    """
    rank = workload.adapter_rank
    if rank:
        return adapter_parameters(model, rank, cut) - divided_adapters_of_layer(model, workload)
    return (model.layer_parameters - divided_of_layer(model, workload)) / cut


def trained_of_ends(model: ModelSpec, workload: Workload) -> int:
    """Number of trained parameters of embedding and head together; 0 where they are frozen beside adapters."""
    is_frozen = workload.adapter_rank and not workload.trains_embedding
    return 0 if is_frozen else model.embedding_parameters


def trained_parameters(model: ModelSpec, workload: Workload) -> int:
    """Number of trained parameters of the whole model."""
    rank = workload.adapter_rank
    if not rank:
        return model.num_parameters - model.num_layers * divided_of_layer(model, workload)
    adapters = adapter_parameters(model, rank) - divided_adapters_of_layer(model, workload)
    return model.num_layers * adapters + trained_of_ends(model, workload)


def largest_trained(model: ModelSpec, workload: Workload) -> int:
    """Number of elements of the largest trained parameter: embedding, a matrix of an MLP, or one of an adapter's."""
    rank = workload.adapter_rank
    width = rank or model.hidden_size
    largest_of_layer = width * max(model.mlp_size, model.hidden_size if rank else 0)
    trains_ends = trained_of_ends(model, workload) > 0
    return max(largest_of_layer, model.vocab_size * model.hidden_size if trains_ends else 0)


def layer_weight_bytes(model: ModelSpec, workload: Workload, cut: int = 1) -> float:
    """Bytes of a layer's weights on a device, its adapters included.

    Args:
        cut: devices that share the layer by tensor parallelism.
    """
    size: float = workload.element_bytes
    if workload.quantization is not None:
        size = QUANTIZATIONS[workload.quantization].weight_bytes
    adapters = adapter_parameters(model, workload.adapter_rank, cut) if workload.adapter_rank else 0
    adapters -= divided_adapters_of_layer(model, workload)
    return (model.layer_parameters - divided_of_layer(model, workload)) / cut * size + adapters * ADAPTER_BYTES


def weight_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of all weights. Quantization applies to layers alone; embedding and head keep their data type."""
    ends = model.embedding_parameters + model.hidden_size + model.other_parameters
    return model.num_layers * layer_weight_bytes(model, workload) + ends * workload.element_bytes


def restored_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes that one pass reads and writes to dequantize a layer's weights; 0 if they are not quantized."""
    if workload.quantization is None:
        return 0.0
    return model.layer_parameters * QUANTIZATIONS[workload.quantization].moved_bytes
