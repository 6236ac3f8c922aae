"""Memory of a device of a pipeline's stage, as the runtime uses it, phase by phase.

Layers need what they need in a job without pipelines (`ds_hetero.cost.terms.layer_memory`). Under 1F1B gradients of a
micro-batch come while its activations go, and `AsymmetricGradientSync` takes them away during the last backward of a
step. These are the phases:

    full     most micro-batches are in flight, and gradients of others have come if there are more of them
    drained  there were no more: of those in flight the first has gone backward, and gradients of it have come
    last     the last backward of a step begins, and with it the first bucket, made whole
    sent     it has ended, and all buckets are on their way at once, as where links are slower than the backward
    step     the optimizer's: sums of what the device owns, and what the optimizer makes beside them

Each of the first three consists of the parts of a backward in `ds_hetero.cost.terms.phases.backward_phases`. The gather
after the step needs less than the last backward, whose gradients it comes in place of.

Tests hold the phases to the peaks of ``python -m benchmarks.pipelines --cases memory``.
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

GRADIENT_SUM_BYTES = 4  # micro-batches' gradients add up in fp32


class DeviceParameters(NamedTuple):
    """Parameters on a device, and those of which it owns the optimizer state."""

    parameters: float
    owned: float


@dataclass(frozen=True, kw_only=True)
class CalibratedStageMemory(StageMemory):
    """Memory of a stage as the runtime uses it."""

    workload: Workload  # bytes, recomputation and the optimizer's temporaries
    layer: LayerMemory  # of a layer, on the device of its part with the most
    logits: float  # where the stage has the head
    of_layer: DeviceParameters  # of the model, by layer
    of_end: DeviceParameters  # of the model, in the embedding, and as many in the head
    largest: float  # elements of the largest parameter
    holders: int  # of a parameter, who add up its gradients
    communicators: tuple[float, float, float]  # of NCCL beyond the reserve, by the number of neighbouring stages

    def communicator_bytes(self, first: bool, last: bool) -> float:
        """See `StageMemory.communicator_bytes`."""
        return self.communicators[2 - first - last]

    @property
    def layer_bytes(self) -> float:
        """Model states of a layer."""
        held, work = self.of_layer, self.workload
        return (work.element_bytes + GRADIENT_SUM_BYTES) * held.parameters + work.optimizer_bytes * held.owned

    @property
    def kept_bytes(self) -> float:
        """Activations of a layer of one micro-batch in flight."""
        return float(self.layer.input_bytes if self.workload.activation_checkpointing else self.layer.saved_bytes)

    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """See `StageMemory.peak_bytes`."""
        return peak_bytes(self.phases(layers, first, last, in_flight, micro_batches))

    def phases(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> dict[str, MemoryParts]:
        """Return the parts in every phase. The arguments are those of `peak_bytes`."""
        work, layer, ends = self.workload, self.layer, first + last
        parameters = layers * self.of_layer.parameters + ends * self.of_end.parameters
        owned = layers * self.of_layer.owned + ends * self.of_end.owned
        gradients, wire = GRADIENT_SUM_BYTES * parameters, work.element_bytes * parameters
        bucket = np.minimum(work.buffers.sync_bytes(work.element_bytes), wire)
        output = 0 if last else layer.input_bytes  # of a micro-batch in flight, until its backward is done
        kept = layers * self.kept_bytes
        resting = MemoryParts(
            weights=wire,
            optimizer_state=work.optimizer_bytes * owned,
            exchange_buffers=2 * layer.input_bytes * (2 - ends),  # an input and an output of each neighbour
            communicators=self.communicator_bytes(first, last),
        )

        def backward(name: str, number: Bytes, gradients: Bytes, bucket: Bytes = 0.0) -> dict[str, MemoryParts]:
            on_device = layer.input_bytes if work.offload_activations else number * kept
            always = resting._replace(activations=on_device + number * output, gradients=gradients, bucket=bucket)
            phases = backward_phases(always, layer, self.logits * last, checkpointed=work.activation_checkpointing)
            return {f"{name}, {phase}": parts for phase, parts in phases.items()}

        if micro_batches is None or np.all(micro_batches > in_flight):
            phases = backward("full", in_flight, gradients)
        else:
            number = np.minimum(in_flight, micro_batches)
            phases = backward("full", number, 0.0) | backward("drained", number - 1, np.sign(number - 1) * gradients)
        last_one = backward("last", 1, gradients if micro_batches != 1 else 0.0, bucket)
        del last_one["last, loss"]  # which is over before the bucket is made
        phases |= last_one
        if self.holders > 1:
            of_bucket = GRADIENT_SUM_BYTES / work.element_bytes * bucket / self.holders
            phases["sent"] = resting._replace(bucket=2 * wire, step=of_bucket)
        temporary = work.buffers.optimizer_bytes * self.largest
        phases["step"] = resting._replace(step=GRADIENT_SUM_BYTES * owned + temporary)
        return phases
