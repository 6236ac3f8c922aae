"""Parameters that are trained, and bytes of all weights: adapters and quantized weights included."""

from __future__ import annotations

from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import QUANTIZATIONS, adapter_parameters

ADAPTER_BYTES = 4  # PEFT keeps adapters in fp32, ``autocast_adapter_dtype``


def trained_of_layer(model: ModelSpec, workload: Workload) -> int:
    """Parameters of a layer that are trained."""
    rank = workload.adapter_rank
    return adapter_parameters(model, rank) if rank else model.layer_parameters


def trained_of_ends(model: ModelSpec, workload: Workload) -> int:
    """Parameters of embedding and head that are trained."""
    is_frozen = workload.adapter_rank and not workload.trains_embedding
    return 0 if is_frozen else model.embedding_parameters


def trained_parameters(model: ModelSpec, workload: Workload) -> int:
    """Parameters that are trained."""
    if not workload.adapter_rank:
        return model.num_parameters
    return model.num_layers * trained_of_layer(model, workload) + trained_of_ends(model, workload)


def layer_weight_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of a layer's weights, its adapters included."""
    size: float = workload.element_bytes
    if workload.quantization is not None:
        size = QUANTIZATIONS[workload.quantization].weight_bytes
    adapters = adapter_parameters(model, workload.adapter_rank) if workload.adapter_rank else 0
    return model.layer_parameters * size + adapters * ADAPTER_BYTES


def weight_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of all weights; where layers are quantized, embedding and head are not."""
    ends = model.embedding_parameters + model.hidden_size
    return model.num_layers * layer_weight_bytes(model, workload) + ends * workload.element_bytes


def restored_bytes(model: ModelSpec, workload: Workload) -> float:
    """Memory traffic of a pass that restores a layer's quantized weights; 0 where there are none."""
    if workload.quantization is None:
        return 0.0
    return model.layer_parameters * QUANTIZATIONS[workload.quantization].moved_bytes
