"""Memory of one device of a pipeline stage in every phase of a step, as the runtime allocates it.

A layer needs as much as in a job without pipelines (`ds_hetero.cost.terms.layer_memory`), and so do its weights, its
adapters and quantized weights included (`ds_hetero.cost.terms.trained`). Only trained parameters have gradients and
optimizer state. Under 1F1B the gradients of a micro-batch appear while its activations are freed, and
`AsymmetricGradientSync` sends them during the last backward of a step. These are the phases:

    full     The largest number of micro-batches is in flight. If a step has more micro-batches than are in flight,
             gradients of earlier ones exist, too.
    drained  Only if all micro-batches are in flight at once: the backward of the first one is over, and its gradients
             exist.
    last     The last backward of a step begins, and the first bucket is allocated.
    sent     The last backward has ended, and all buckets are being sent; this happens if links are slower than the
             backward.
    step     The optimizer steps: sums of the gradients that the device owns, and the optimizer's temporaries.

Each of the first three is divided into the phases of a backward (`ds_hetero.cost.terms.phases.backward_phases`). The
gather of parameters after the step is not listed, since it needs less than the last backward.

The phases are tested against the peaks of ``python -m benchmarks.pipelines --cases memory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import StageMemory
from ds_hetero.cost.terms.layer_memory import LayerMemory
from ds_hetero.cost.terms.memory_parts import Bytes, MemoryParts, peak_bytes
from ds_hetero.cost.terms.phases import backward_phases
from ds_hetero.cost.workload import Workload

GRADIENT_SUM_BYTES = 4  # bytes of an element of a gradient sum: gradients of micro-batches add up in fp32


class DeviceParameters(NamedTuple):
    """Weights on a device."""

    weight_bytes: float  # of all weights that the device holds, frozen ones included
    trained: float  # number of trained parameters that the device holds
    owned: float  # number of trained parameters whose optimizer state the device owns


@dataclass(frozen=True, kw_only=True)
class CalibratedStageMemory(StageMemory):
    """Memory of a device of a stage, as the runtime allocates it."""

    workload: Workload  # bytes of elements, recomputation, and the optimizer's temporaries
    layer: LayerMemory  # memory of one layer, on the device of its part that needs the most
    logits: float  # bytes of the loss, if the stage has the head
    of_layer: DeviceParameters  # weights of one layer
    of_end: DeviceParameters  # weights of the embedding; the head has as many
    largest: float  # elements of the largest trained parameter
    holders: int  # ranks that hold a parameter and add up its gradients
    communicators: tuple[float, float, float]  # bytes of NCCL beyond the reserve, with 0, 1 and 2 neighbouring stages

    def communicator_bytes(self, first: bool, last: bool) -> float:
        """Return the bytes of NCCL's communicators beyond the reserve, see `StageMemory.communicator_bytes`."""
        return self.communicators[2 - first - last]

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer's model states: weights, gradient sums, and owned optimizer state."""
        layer = self.of_layer
        gradient_bytes = GRADIENT_SUM_BYTES * layer.trained
        return layer.weight_bytes + gradient_bytes + self.workload.optimizer_bytes * layer.owned

    @property
    def saved_bytes(self) -> float:
        """Bytes of activations that a layer keeps for one micro-batch in flight."""
        return float(self.layer.input_bytes if self.workload.activation_checkpointing else self.layer.saved_bytes)

    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """Return the peak memory over all phases, see `StageMemory.peak_bytes`."""
        return peak_bytes(self.phases(layers, first, last, in_flight, micro_batches))

    def phases(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> dict[str, MemoryParts]:
        """Return the parts of memory in every phase. The arguments are those of `peak_bytes`."""
        work, layer, num_ends = self.workload, self.layer, first + last
        trained = layers * self.of_layer.trained + num_ends * self.of_end.trained
        owned = layers * self.of_layer.owned + num_ends * self.of_end.owned
        gradient_bytes, sent_bytes = GRADIENT_SUM_BYTES * trained, work.element_bytes * trained
        bucket_bytes = np.minimum(work.buffers.sync_bytes(work.element_bytes), sent_bytes)
        output_bytes = 0 if last else layer.input_bytes  # of a micro-batch in flight, until its backward is done
        saved_bytes = layers * self.saved_bytes  # of a micro-batch in flight
        resting = MemoryParts(
            weights=layers * self.of_layer.weight_bytes + num_ends * self.of_end.weight_bytes,
            optimizer_state=work.optimizer_bytes * owned,
            exchange_buffers=2 * layer.input_bytes * (2 - num_ends),  # an input and an output of each neighbour
            communicators=self.communicator_bytes(first, last),
        )

        def backward(name: str, num_in_flight: Bytes, gradients: Bytes, bucket: Bytes = 0.0) -> dict[str, MemoryParts]:
            """Return the phases of a backward while ``num_in_flight`` micro-batches are in flight."""
            on_device = layer.input_bytes if work.offload_activations else num_in_flight * saved_bytes
            activations = on_device + num_in_flight * output_bytes
            always = resting._replace(activations=activations, gradients=gradients, bucket=bucket)
            phases = backward_phases(always, layer, self.logits * last, checkpointed=work.activation_checkpointing)
            return {f"{name}, {phase}": parts for phase, parts in phases.items()}

        if micro_batches is None or np.all(micro_batches > in_flight):
            phases = backward("full", in_flight, gradient_bytes)
        else:
            most = np.minimum(in_flight, micro_batches)
            phases = backward("full", most, 0.0)
            phases |= backward("drained", most - 1, np.sign(most - 1) * gradient_bytes)
        last_backward = backward("last", 1, gradient_bytes if micro_batches != 1 else 0.0, bucket_bytes)
        del last_backward["last, loss"]  # the loss is over before the bucket is allocated
        phases |= last_backward
        if self.holders > 1:
            owned_sum_bytes = GRADIENT_SUM_BYTES / work.element_bytes * bucket_bytes / self.holders
            phases["sent"] = resting._replace(bucket=2 * sent_bytes, step=owned_sum_bytes)
        temporary_bytes = work.buffers.optimizer_bytes * self.largest
        phases["step"] = resting._replace(step=GRADIENT_SUM_BYTES * owned + temporary_bytes)
        return phases
