"""Parameters that ZeRO-3 has gathered on a rank, layer by layer and at the loss."""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cost.terms.trained import layer_weight_bytes, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class Gathered(NamedTuple):
    """Bytes of parameters that ZeRO-3 has gathered on a rank; `Buffers` limits how many it gathers ahead."""

    in_layers: float = 0.0  # while layers run
    at_loss: float = 0.0  # while the head and the loss run
    arriving: float = 0.0  # prefetch buffer that several parameters share, until the last of them has been used

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload) -> Gathered:
        """Compute the bytes for a model and a workload; 0 below ZeRO-3.

        DeepSpeed gathers ahead until it exceeds ``stage3_max_live_parameters``, by half a matrix on average. If all
        parameters but the embedding fit under the limit, it gathers that, too. A workload without DeepSpeed's buffers
        (``live_parameters`` 0) gathers two layers and the head, as FSDP does.
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
        experts = 1 if workload.experts is not None else max(model.num_experts, 1)
        half_a_matrix = 0.5 * element * model.mlp_size * model.hidden_size * experts
        return cls(
            in_layers=min(max(limit + half_a_matrix, layer_bytes), all_bytes),
            at_loss=min(max(limit, head_bytes), all_bytes),
            arriving=min(element * buffers.prefetch_bucket, all_bytes - head_bytes),
        )
