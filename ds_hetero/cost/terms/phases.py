"""Memory of one rank in every phase of a step (`MemoryParts`), for sequence parallelism under DeepSpeed's engine.

    forward    the forward ends: all activations; with ZeRO-3 gathered parameters and the buffer in which they arrived
    loss       the backward begins: all activations, the logits, and with a tiled loss the head's gradient so far
    head       the head's gradient is computed from the logits' gradients and added to that of earlier tiles
    norm       the backward of the final norm: all activations, and fp32 copies of the tokens
    mlp        the backward of a layer begins: all that the layer has saved, and gradients of its widest part
    sent       gradients of the MLP's weights exist, and ZeRO-3 copies a full bucket, sorted by owner
    attention  the backward of attention: the MLP's activations are freed, KV blocks visit, all-to-alls are packed
    embedding  the backward ends with the gradient of the embedding
    step       the optimizer steps: gradients of the rank's own partition, their fp32 copies, temporaries

Gradients replace activations during the backward. How many of both exist together depends on the ZeRO stage:

    0, 1   A layer's gradients are allocated as its activations are freed. Either all activations and the head's
           gradient, or one layer's activations and all gradients but the embedding's: the larger sum counts.
    2      A rank allocates the buffer of all its gradients with the first of them, that of the last element that it
           owns. The activations of all layers up to there are still in memory.
    3      One buffer for all gradients exists from the start.

With gradient accumulation the gradients of earlier micro-batches exist from the start. Pipeline stages have their own
phases (`ds_hetero.cost.stages.stage_memory`). HexiSeq's Eq. 3 (arXiv:2605.07569) counts activations of one layer; here
all layers count.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.communicators import Communicators
from ds_hetero.cost.terms.expert_shares import share_of_experts_D
from ds_hetero.cost.terms.gathered import Gathered
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.host_memory import stays_on_device
from ds_hetero.cost.terms.layer_memory import (
    WIDE,
    LayerMemory,
    LayerShare,
    head_bytes,
    layer_memory,
    logit_bytes,
    norm_backward_bytes,
    normed_bytes,
)
from ds_hetero.cost.terms.memory_parts import Bytes, MemoryParts, Phases
from ds_hetero.cost.terms.model_states import DividedExperts, owned_share_D, state_bytes
from ds_hetero.cost.terms.trained import (
    trained_of_ends,
    trained_of_layer,
    trained_parameters,
)
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


def backward_phases(always: MemoryParts, layer: LayerMemory, logits: Bytes, *, checkpointed: bool) -> Phases:
    """Return the memory in the phases ``loss``, ``mlp`` and ``attention`` of a backward.

    Args:
        always: memory that all three phases share, with the activations that exist when the backward begins.
        layer: memory of the layer whose backward runs.
        logits: bytes of the loss; 0 on a rank without the head.
        checkpointed: whether only inputs of layers are saved, so that the layer's forward runs again.
    """
    recomputed = layer.recomputed_bytes if checkpointed else 0.0
    recomputed_without_mlp = layer.recomputed_bytes - layer.mlp_saved_bytes if checkpointed else 0.0
    activations_without_mlp = always.activations if checkpointed else always.activations - layer.mlp_saved_bytes
    return {
        "loss": always._replace(logits=logits),
        "mlp": always._replace(layer=recomputed + layer.mlp_grad_bytes),
        "attention": always._replace(
            activations=activations_without_mlp,
            layer=recomputed_without_mlp,
            ring_buffers=layer.ring_buffers,
            exchange_buffers=always.exchange_buffers + layer.exchange_buffers,
        ),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingMemory:
    """The part of a job's memory that does not depend on tokens and heads; computed once for all schedules."""

    model: ModelSpec
    workload: Workload
    states: Mapping[str, Floats]  # model states, as `state_bytes` returns them
    gathered: Gathered  # parameters gathered by ZeRO-3
    bucket: float  # gradients that are being reduced
    bucket_copy: float  # ZeRO-3's copy of a bucket, sorted by owner
    sent_layers: int  # layers whose backward is over when the first bucket is full
    head: float  # gradient of the head; the embedding's is as large
    freed_D: Floats  # share of activations that are freed before a rank's first gradient: `_freed_at_first_gradient`
    step_D: Floats  # bytes that the optimizer's step allocates: `_step_bytes`
    communicators: Communicators
    experts: DividedExperts  # states of experts that are divided among ranks
    experts_share_D: Floats  # share of a layer's experts that every rank holds; zeros if they are not divided

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, cluster: Cluster) -> StandingMemory:
        """Compute the memory that does not depend on tokens and heads, for a model and a workload on a cluster."""
        element, stage = workload.element_bytes, workload.zero_stage
        trained = float(element * trained_parameters(model, workload))
        bucket = float(workload.buffers.reduce_bucket * element if stage else 0)
        if workload.adapter_rank:  # DeepSpeed allocates no more than all gradients need
            bucket = min(bucket, trained)
        trains_head = trained_of_ends(model, workload) > 0
        head = float(element * model.vocab_size * model.hidden_size if trains_head else 0)
        # The head's gradient is the first in the bucket, unless it is too large and sent alone.
        bucket_of_layers = bucket - (head if head <= bucket else 0)
        freed_D = _freed_at_first_gradient(workload, cluster.num_ranks)
        if workload.micro_batches > 1:  # gradients of earlier micro-batches exist from the start
            freed_D = np.zeros_like(freed_D)
        return cls(
            model=model,
            workload=workload,
            states=state_bytes(model, workload, cluster),
            gathered=Gathered.of(model, workload),
            bucket=bucket,
            bucket_copy=min(bucket, trained) if stage == 3 else 0.0,
            sent_layers=int(bucket_of_layers // (element * trained_of_layer(model, workload))),
            head=head,
            freed_D=freed_D,
            step_D=_step_bytes(model, workload, cluster),
            communicators=Communicators.of(cluster, workload),
            experts=DividedExperts.of(model, workload, cluster),
            experts_share_D=share_of_experts_D(model, workload, cluster),
        )


def memory_phases(standing: StandingMemory, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
    """Return the memory of every rank under sequence parallelism, by phase; leading dimensions are kept."""
    model, workload = standing.model, standing.workload
    checkpointed = workload.activation_checkpointing
    not_offloaded = stays_on_device(grouping.cluster, model, workload, tokens_D)
    share = LayerShare.of_sequence(model, workload, grouping, tokens_D, heads_D)
    if workload.experts is not None:
        share = share._replace(experts=standing.experts_share_D, expert_tokens=share.tokens.sum(axis=-1, keepdims=True))
    layer = layer_memory(model, workload, share)
    activations, layer_activations = layer.all_layers_saved_bytes, layer.saved_bytes
    if checkpointed:
        if workload.offload_activations:
            activations = layer.input_bytes + layer.kept_bytes + not_offloaded.activations
        else:
            activations = model.num_layers * layer.input_bytes + model.attention_layers * layer.kept_bytes
        layer_activations = layer.input_bytes + layer.kept_bytes
    resting = MemoryParts(
        weights=standing.states["weights"] + not_offloaded.weights,
        optimizer_state=standing.states["optimizer_state"] + not_offloaded.optimizer_state,
        communicators=standing.communicators.bytes_beyond_reserve_D(grouping),
    )
    working = resting._replace(
        gradients=_gradients_in_backward(standing, activations, layer_activations),
        gathered=standing.gathered.in_layers,
        activations=activations,
        bucket=standing.bucket,
    )
    loss = _LossBytes(
        logits=logit_bytes(model, workload, tokens_D),
        head_gradient_inputs=head_bytes(model, workload, tokens_D),
        norm=layer.mlp_saved_bytes if checkpointed else normed_bytes(model, workload, tokens_D),
        norm_backward=workload.micro_batch * tokens_D * norm_backward_bytes(model, workload),
    )
    phases = dict(backward_phases(working, layer, loss.logits, checkpointed=checkpointed))
    if standing.bucket_copy and standing.sent_layers < model.num_layers:
        recomputed = layer.recomputed_bytes if checkpointed else 0.0
        phases["sent"] = working._replace(
            activations=np.maximum(activations - standing.sent_layers * layer_activations, 0.0),
            layer=recomputed + layer.input_bytes + 2 * layer.weight_grad_bytes,
            bucket=standing.bucket + standing.bucket_copy,
        )
    return {**phases, **_phases_outside_layers(standing, resting, working, loss)}


def _gradients_in_backward(standing: StandingMemory, activations: Bytes, layer_activations: Bytes) -> Bytes:
    """Return the bytes of gradients to count beside all activations, so that the sum is the backward's peak of both.

    In ZeRO 0 and 1 gradients take the place of activations. With 10 bytes of activations, 1 a layer, and 8 bytes of
    gradients, of which head and embedding have 2 each, two points of the backward compete:

        the backward begins     10 of activations + 2 of the head's gradient = 12
        its last layer           1 of activations + 6 of gradients, all but the embedding's = 7

    The peak is 12. The caller adds all 10 bytes of activations, so the result is 2.

    Args:
        activations: bytes of activations of all layers.
        layer_activations: bytes of activations of one layer.
    """
    workload, gradients = standing.workload, standing.states["gradients"]
    of_experts = standing.experts.gradients_D  # they grow from layer to layer, as in ZeRO 0, whatever the stage
    if workload.micro_batches > 1:
        return np.maximum(gradients - standing.freed_D * activations, 0.0) + of_experts
    if workload.zero_stage >= 2:
        freed_D = standing.freed_D
        at_first_gradient = np.maximum(gradients - freed_D * (activations - of_experts), 0.0)
        at_end = gradients + of_experts - activations + layer_activations
        return np.maximum(at_first_gradient, at_end) if workload.experts else at_first_gradient
    embedding = 0 if standing.model.tied_embeddings else standing.head  # its gradient comes after all layers
    gradients_at_end = gradients - embedding + of_experts
    return np.maximum(gradients_at_end - activations + layer_activations, standing.head)


class _LossBytes(NamedTuple):
    """Bytes that the loss needs, by rank."""

    logits: Bytes  # logits, their gradient, and tensors that the final norm saves
    head_gradient_inputs: Bytes  # inputs of the head's weight gradient
    norm: Bytes  # tensors that the last norm of the forward saves
    norm_backward: Bytes  # tensors that exist in the backward of the final norm


def _phases_outside_layers(
    standing: StandingMemory, resting: MemoryParts, working: MemoryParts, loss: _LossBytes
) -> Phases:
    """Return the memory in the phases ``forward``, ``loss``, ``head``, ``norm``, ``embedding`` and ``step``.

    Args:
        resting: memory between two steps.
        working: memory in the backward of the layers.
    """
    workload, gathered, head = standing.workload, standing.gathered, standing.head
    stage, all_gradients = workload.zero_stage, standing.states["gradients"]
    of_experts = standing.experts.gradients_D
    has_gradients_before = stage == 3 or workload.micro_batches > 1
    gradients_before = all_gradients if has_gradients_before else 0.0
    if workload.micro_batches > 1:
        gradients_before = gradients_before + of_experts
    # A tiled loss adds up the head's gradient from tile to tile.
    gradients_at_loss = gradients_before + (head if workload.has_loss_tiles else 0.0)
    bucket = standing.bucket if stage == 3 else 0.0  # lower stages allocate it with the first gradient
    # The head's gradient is the first, unless it waits for that of an embedding with the same weights.
    has_sent_head = head > 0 and not standing.model.tied_embeddings
    begins = working._replace(gradients=gradients_before, bucket=bucket)
    at_loss = begins._replace(gathered=gathered.at_loss)
    ends = working._replace(activations=0.0, bucket=standing.bucket + standing.bucket_copy)
    return {
        "forward": begins._replace(gathered=gathered.in_layers + gathered.arriving, layer=loss.norm),
        "loss": at_loss._replace(logits=loss.logits, gradients=gradients_at_loss),
        "head": at_loss._replace(logits=loss.head_gradient_inputs, gradients=gradients_at_loss + head),
        "norm": begins._replace(
            layer=loss.norm_backward,
            gradients=gradients_before + head,
            bucket=standing.bucket if has_sent_head else bucket,
        ),
        "embedding": ends._replace(gradients=all_gradients + of_experts + (head if stage >= 2 else 0.0)),
        "step": resting._replace(
            # `_step_bytes` counts the gradients of a rank's partition in ZeRO 1 and 2.
            gradients=(all_gradients if stage in (0, 3) else 0.0) + of_experts,
            bucket=bucket,
            # Experts step after the other parameters.
            step=np.maximum(standing.step_D, standing.experts.step_D),
        ),
    }


def _freed_at_first_gradient(workload: Workload, num_ranks: int) -> Floats:
    """Return the share of the layers whose activations are freed before a rank allocates its gradient buffer, ``[D]``.

    ZeRO partitions elements in the order of the layers: rank 0, or the first of ``zero_order``, owns the first ones.
    The backward begins with the last element. Of four equal ranks rank 3 allocates its buffer at once, and rank 0 when
    three quarters of the layers are done. With several replicas this is computed for the last one, which owns the last
    elements.
    """
    if workload.zero_stage == 3:
        return np.zeros(num_ranks)
    if workload.zero_stage < 2:
        return np.ones(num_ranks)
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    place_D = np.arange(num_ranks) if workload.zero_order is None else np.array(workload.zero_order)
    rank_at = np.argsort(place_D)
    last_element_D = np.cumsum(weights_D[rank_at])[place_D]  # of every rank, in units of the weights
    return np.asarray((1 - last_element_D / weights_D.sum()) / workload.data_parallel)


def _step_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Return the bytes that the optimizer's step allocates on every rank, ``[D]``; 0 if it runs on the host.

    They depend on the ZeRO stage:

        ZeRO 0      the optimizer's temporaries, one tensor after the other
        ZeRO 1, 2   the gradients of the rank's partition, concatenated, and their fp32 copy; or the norm of the largest
                    tensor in fp64 before that, if it needs more
        ZeRO 3      the same for one sub-group of parameters after the other; the gradients are counted elsewhere
    """
    buffers, element = workload.buffers, workload.element_bytes
    owned_D = trained_parameters(model, workload) * owned_share_D(workload, cluster)
    largest = model.hidden_size * max(model.vocab_size, model.mlp_size)
    if workload.zero_stage == 0:
        return np.full(cluster.num_ranks, float(largest * buffers.optimizer_bytes))
    joined: float = element if element < WIDE else 0
    if workload.zero_stage == 3:
        at_once_D = np.minimum(owned_D, buffers.sub_group)
        step_D = at_once_D * (WIDE + max(joined, buffers.optimizer_bytes))
    else:
        step_D = owned_D * (WIDE + max(element + joined, buffers.optimizer_bytes))
        norm_D = owned_D * element + np.minimum(owned_D, largest) * 2 * WIDE
        step_D = np.maximum(step_D, norm_D)
    return np.asarray((0 if workload.offload_optimizer else 1) * step_D)
