"""Parameters that ZeRO-3 has gathered on a rank, layer by layer and at the loss."""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cost.terms.trained import layer_weight_bytes, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class Gathered(NamedTuple):
    """Bytes of parameters that ZeRO-3 has gathered on a rank, of which `Buffers` says how many it gathers ahead."""

    in_layers: float = 0.0
    at_loss: float = 0.0
    arriving: float = 0.0  # buffers in which several arrived, until the last of these is used

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload) -> Gathered:
        """DeepSpeed gathers ahead until it has its limit, and then half a matrix more in the mean, or the embedding.

        Without DeepSpeed's buffers two layers and the head are gathered, as FSDP does.
        """
        if workload.zero_stage != 3:
            return cls()
        element, buffers = workload.element_bytes, workload.buffers
        all_bytes = weight_bytes(model, workload)
        layer_bytes = layer_weight_bytes(model, workload)
        head_bytes = element * model.vocab_size * model.hidden_size
        if not buffers.live_parameters:
            two_layers_and_head = min(2 * layer_bytes + head_bytes, all_bytes)
            return cls(in_layers=two_layers_and_head, at_loss=two_layers_and_head)
        limit = float(element * buffers.live_parameters)
        if all_bytes - head_bytes < limit:
            limit = all_bytes
        half_a_matrix = 0.5 * element * model.mlp_size * model.hidden_size * max(model.num_experts, 1)
        return cls(
            in_layers=min(max(limit + half_a_matrix, layer_bytes), all_bytes),
            at_loss=min(max(limit, head_bytes), all_bytes),
            arriving=min(element * buffers.prefetch_bucket, all_bytes - head_bytes),
        )
