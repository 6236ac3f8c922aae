"""Make the error message for the case that no schedule fits into memory: how much is missing, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.planner.results.candidates import ScheduleCandidate
from ds_hetero.planner.search.memory_fit import longest_that_fits

# Share of the missing memory that a change has to save to be listed. Chosen, never measured.
LEAST_SAVING = 0.1


def does_not_fit(cost: CostModel, candidates: Sequence[ScheduleCandidate]) -> str:
    """Return the message: the schedule that is nearest to fitting, its missing memory and rank, and remedies.

    Args:
        candidates: schedules with predictions, none of which fits.
    """
    work = cost.workload

    def excess_D(candidate: ScheduleCandidate) -> Floats:
        """Return the bytes by which every rank exceeds its memory, ``[D]``; negative if it fits."""
        return np.asarray(candidate.prediction.memory_bytes) - cost.capacity_bytes_D

    nearest = min(candidates, key=lambda candidate: float(excess_D(candidate).max()))
    nearest_excess_D = excess_D(nearest)
    fullest_rank = int(nearest_excess_D.argmax())
    parts = cost.memory_parts(*cost.arrays(nearest.schedule)).of_rank(fullest_rank)
    longest_tokens = longest_that_fits(cost)
    remedies = [f"sequences of up to about {longest_tokens} tokens"] if longest_tokens else []
    missing_bytes = float(nearest_excess_D.max())
    if missing_bytes > 0:
        offloads = not cost.cluster.devices[fullest_rank].shares_host_memory
        remedies += _remedies(cost, parts, LEAST_SAVING * missing_bytes, offloads=offloads)
    else:  # every device has room: the host's memory is short, which other offloads would only fill further
        remedies.append("more host memory")
    remedies += _fewer_trained_weights(cost)
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.prediction.reason}. What would fit or help: "
        f"{', '.join((*remedies, 'more or larger devices'))}."
    )


def _fewer_trained_weights(cost: CostModel) -> list[str]:
    """Return the names of the adapters with which the training would need less memory.

    Adapters change what is trained, so the message lists them last.
    """
    work = cost.workload
    if work.quantization is not None:
        return []
    return ["QLoRA"] if work.adapter_rank else ["LoRA or QLoRA"]


def _remedies(cost: CostModel, parts: MemoryParts, min_saved_bytes: float, *, offloads: bool) -> list[str]:
    """Return settings that would save memory on a rank, named as by ``ds-hetero fit``, the largest saving first.

    The savings are estimates: all bytes of the part that a change affects.

    Args:
        parts: memory breakdown of the rank.
        min_saved_bytes: bytes that a change must save to be listed.
        offloads: True if offloading to the host frees memory of the rank.
    """
    work = cost.workload
    state_bytes = parts.weights + parts.gradients + parts.optimizer_state
    can_offload_optimizer = offloads and work.zero_stage > 0 and not work.offload_optimizer
    tiled_loss_bytes = 0.0 if work.tiled_logits else parts.logits
    saved_bytes = {
        "tiled loss": tiled_loss_bytes,
        "tiled MLP and loss": 0.0 if work.tiled_mlp else parts.layer + tiled_loss_bytes,
        "activation checkpointing": 0.0 if work.activation_checkpointing else parts.activations,
        "activation offload": parts.activations if offloads and not work.offload_activations else 0.0,
        "ZeRO stage 3": state_bytes if work.zero_stage < 3 else 0.0,
        "optimizer offload": parts.optimizer_state if can_offload_optimizer else 0.0,
        "smaller gradient buckets": parts.bucket if work.zero_stage else 0.0,
        "one sequence per micro-batch": parts.activations + parts.logits if work.micro_batch > 1 else 0.0,
    }
    largest_first = sorted(saved_bytes.items(), key=lambda item: -item[1])
    return [name for name, size in largest_first if size and size >= min_saved_bytes]
