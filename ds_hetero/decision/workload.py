"""Workload of one replica, as cost models see it. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cost import Workload
from ds_hetero.decision.facts import JobFacts, TrainingFacts
from ds_hetero.errors import PlanError
from ds_hetero.values.section import SECTION

FP32_BYTES, MIXED_PRECISION_BYTES = 4, 2


def workload_of(facts: JobFacts, num_replicas: int, *, on_host: bool) -> Workload:
    """Build the workload of one replica.

    What neither the model nor the configuration states, such as an optimizer other than Adam, is assumed to be usual.

    Args:
        facts: of the job; the section's ``seq_len`` and ``zero_partition`` are used.
        num_replicas: copies of the model that share a global batch.
        on_host: devices are CPUs, so that nothing can be offloaded to the host.

    Raises:
        PlanError: neither the section nor the model says how long sequences are.
    """
    model, training, weights = facts.model, facts.training, facts.section.zero_partition
    stage, trained = training.zero_stage, model.trained_share
    element_bytes = model.element_bytes if training.mixed_precision is None else MIXED_PRECISION_BYTES
    micro_batch, micro_batches = _batch(training, num_replicas)
    master_bytes = 0 if stage == 0 and element_bytes == FP32_BYTES else FP32_BYTES
    return Workload(
        seq_len=_seq_len(facts),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=model.causal,
        zero_stage=stage,
        zero_weights=tuple(weights) if isinstance(weights, list) and num_replicas == 1 else None,
        activation_checkpointing=model.checkpointing,
        tiled_logits=facts.section.tile_tokens is not None,  # else models return the logits of all tokens of a shard
        tiled_mlp=facts.section.tile_tokens is not None,
        tile_tokens=facts.section.tile_tokens,
        element_bytes=element_bytes,
        gradient_bytes=(FP32_BYTES if training.accumulates_in_fp32 else element_bytes) * trained,
        optimizer_bytes=(master_bytes + 2 * FP32_BYTES) * trained,
        offload_activations=model.checkpointing and model.offloads_checkpoints and not on_host,
        offload_optimizer=stage > 0 and not on_host and training.offloads_optimizer,
        offload_parameters=stage == 3 and not on_host and training.offloads_parameters,
        buffers=replace(training.buffers, optimizer_bytes=2 * FP32_BYTES if on_host else 0),  # fused on GPUs alone
        data_parallel=num_replicas,
    )


def _seq_len(facts: JobFacts) -> int:
    seq_len = facts.section.seq_len or facts.model.max_seq_len
    if seq_len is None:
        raise PlanError(
            f'"{SECTION}.seq_len" is missing, and {facts.model.name} has no max_position_embeddings. '
            'Give the tokens of a sequence that are to be planned for, such as "seq_len": 32768.'
        )
    return seq_len


def _batch(training: TrainingFacts, num_replicas: int) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step, the missing one from the others as DeepSpeed does."""
    steps, total = training.accumulation_steps or 0, (training.train_batch_size or 0) // num_replicas
    micro = training.micro_batch_size or total // (steps or 1) or 1
    return micro, steps or max(total // micro, 1)
