"""Memory of one rank, phase by phase of a step (`MemoryParts`).

Of a job that shares sequences, behind DeepSpeed's engine with its buffers, these are the phases:

    forward    it ends: all activations, and in ZeRO-3 parameters beside the buffer that brought them
    loss       the backward begins: all activations, the logits, and of a tiled loss the gradient of the head so far
    head       the head's gradient is made from those of the logits, beside the one of the tiles before
    mlp        the backward of a layer begins: all that the layer has saved, and gradients of its widest part
    sent       gradients of the MLP's weights exist, and ZeRO-3 copies a full bucket by owners
    attention  the MLP's part is gone, keys and values visit, exchanges are packed
    embedding  the backward ends: the gradient of the embedding
    step       the optimizer's: gradients of the rank's own part, their copies in fp32, the optimizer's temporaries

Below ZeRO-2 gradients of a layer come as its activations go: all activations stand beside the head's gradient, those of
a layer beside all gradients but the embedding's, and the larger sum counts. In ZeRO-2 a rank makes the buffer of all
its gradients when the first of them comes, which is that of the last element that it owns: activations of the layers up
to there are still held. With gradient accumulation gradients of earlier micro-batches are there from the start, and
ZeRO-3 has one buffer for all. Stages of pipelines have `ds_hetero.cost.stages.stage_memory`.

Unlike HexiSeq's Eq. 3 (arXiv:2605.07569) activations count once per layer.

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
    normed_bytes,
)
from ds_hetero.cost.terms.memory_parts import Bytes, MemoryParts, Phases
from ds_hetero.cost.terms.model_states import owned_share_D, state_bytes
from ds_hetero.cost.terms.trained import (
    trained_of_ends,
    trained_of_layer,
    trained_parameters,
)
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


def backward_phases(always: MemoryParts, layer: LayerMemory, logits: Bytes, *, checkpointed: bool) -> Phases:
    """The phases ``loss``, ``mlp`` and ``attention`` of a backward.

    Args:
        always: what exists in each of them, with the activations that the backward begins with.
        layer: the layer whose backward runs.
        logits: of the loss; 0 where a rank has no head.
        checkpointed: activations are inputs of layers, and the layer is computed again.
    """
    recomputed = layer.saved_bytes if checkpointed else 0.0
    recomputed_without_mlp = layer.saved_bytes - layer.mlp_saved_bytes if checkpointed else 0.0
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
    """The part of a job's memory that no tokens and heads change: computed once for all schedules."""

    model: ModelSpec
    workload: Workload
    states: Mapping[str, Floats]  # of `state_bytes`
    gathered: Gathered
    bucket: float  # of gradients to reduce
    bucket_copy: float  # ZeRO-3's, sorted by owners
    sent_layers: int  # whose backward is over when the first bucket is full
    head: float  # gradient of the head, and as much of the embedding
    gone_D: Floats  # of `_gone_at_first_gradient`
    step_D: Floats  # of `_step_bytes`
    communicators: Communicators

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, cluster: Cluster) -> StandingMemory:
        """Compute it for a model and a workload on a cluster."""
        element, stage = workload.element_bytes, workload.zero_stage
        trained = float(element * trained_parameters(model, workload))
        bucket = float(workload.buffers.reduce_bucket * element if stage else 0)
        if workload.adapter_rank:  # DeepSpeed makes no larger bucket than there are gradients
            bucket = min(bucket, trained)
        trains_head = trained_of_ends(model, workload) > 0
        head = float(element * model.vocab_size * model.hidden_size if trains_head else 0)
        # The head's gradient is the first in the bucket, unless it is too large and sent alone.
        bucket_of_layers = bucket - (head if head <= bucket else 0)
        gone_D = _gone_at_first_gradient(workload, cluster.num_ranks)
        if workload.micro_batches > 1:  # gradients of earlier micro-batches exist from the start
            gone_D = np.zeros_like(gone_D)
        return cls(
            model=model,
            workload=workload,
            states=state_bytes(model, workload, cluster),
            gathered=Gathered.of(model, workload),
            bucket=bucket,
            bucket_copy=min(bucket, trained) if stage == 3 else 0.0,
            sent_layers=int(bucket_of_layers // (element * trained_of_layer(model, workload))),
            head=head,
            gone_D=gone_D,
            step_D=_step_bytes(model, workload, cluster),
            communicators=Communicators.of(cluster, workload),
        )


def memory_phases(standing: StandingMemory, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
    """Memory of every rank of a job that shares sequences; leading dimensions of the arguments are kept."""
    model, workload = standing.model, standing.workload
    checkpointed = workload.activation_checkpointing
    not_offloaded = stays_on_device(grouping.cluster, model, workload, tokens_D)
    layer = layer_memory(model, workload, LayerShare.of_sequence(model, workload, grouping, tokens_D, heads_D))
    activations, of_one_layer = layer.all_layers_saved_bytes, layer.saved_bytes
    if checkpointed:
        layers_on_device = 1 if workload.offload_activations else model.num_layers
        activations = layers_on_device * layer.input_bytes + not_offloaded.activations
        of_one_layer = layer.input_bytes
    resting = MemoryParts(
        weights=standing.states["weights"] + not_offloaded.weights,
        optimizer_state=standing.states["optimizer_state"] + not_offloaded.optimizer_state,
        communicators=standing.communicators.beyond_reserve_D(grouping),
    )
    working = resting._replace(
        gradients=_gradients_in_backward(standing, activations, of_one_layer),
        gathered=standing.gathered.in_layers,
        activations=activations,
        bucket=standing.bucket,
    )
    loss = _LossBytes(
        logits=logit_bytes(model, workload, tokens_D),
        head_gradient_inputs=head_bytes(model, workload, tokens_D),
        norm=layer.mlp_saved_bytes if checkpointed else normed_bytes(model, workload, tokens_D),
    )
    phases = dict(backward_phases(working, layer, loss.logits, checkpointed=checkpointed))
    if standing.bucket_copy and standing.sent_layers < model.num_layers:
        recomputed = layer.saved_bytes if checkpointed else 0.0
        phases["sent"] = working._replace(
            activations=np.maximum(activations - standing.sent_layers * of_one_layer, 0.0),
            layer=recomputed + layer.input_bytes + 2 * layer.weight_grad_bytes,
            bucket=standing.bucket + standing.bucket_copy,
        )
    return {**phases, **_phases_outside_layers(standing, resting, working, loss)}


def _gradients_in_backward(standing: StandingMemory, activations: Bytes, of_one_layer: Bytes) -> Bytes:
    """Gradients in the phase of the backward in which they and the activations together are most.

    Below ZeRO-2 gradients take the place of activations. With activations of 10 bytes, 1 a layer, gradients of 8 and a
    head of 2: at the beginning of the backward 10 + 2 bytes exist, in the last layer 1 + 6, without the embedding's.
    The caller adds ``activations``, so that 2 is returned.
    """
    workload, gradients = standing.workload, standing.states["gradients"]
    if workload.zero_stage >= 2 or workload.micro_batches > 1:
        return np.maximum(gradients - standing.gone_D * activations, 0.0)
    embedding = 0 if standing.model.tied_embeddings else standing.head  # its gradient comes after all layers
    at_the_end = gradients - embedding
    return np.maximum(at_the_end - activations + of_one_layer, standing.head)


class _LossBytes(NamedTuple):
    """Bytes around the loss, by rank."""

    logits: Bytes
    head_gradient_inputs: Bytes  # that the head's gradient is made of
    norm: Bytes  # that the norm before keeps


def _phases_outside_layers(
    standing: StandingMemory, resting: MemoryParts, working: MemoryParts, loss: _LossBytes
) -> Phases:
    """The phases ``forward``, ``loss``, ``head``, ``embedding`` and ``step``.

    Args:
        resting: between two steps.
        working: in the backward of the layers.
    """
    workload, gathered, head = standing.workload, standing.gathered, standing.head
    stage, all_gradients = workload.zero_stage, standing.states["gradients"]
    has_gradients_before = stage == 3 or workload.micro_batches > 1
    gradients_before = all_gradients if has_gradients_before else 0.0
    # A tiled loss adds up the head's gradient from tile to tile.
    gradients_at_loss = gradients_before + (head if workload.has_loss_tiles else 0.0)
    bucket = standing.bucket if stage == 3 else 0.0  # others make it when the first gradient comes
    begins = working._replace(gradients=gradients_before, bucket=bucket)
    at_loss = begins._replace(gathered=gathered.at_loss)
    ends = working._replace(activations=0.0, bucket=standing.bucket + standing.bucket_copy)
    return {
        "forward": begins._replace(gathered=gathered.in_layers + gathered.arriving, layer=loss.norm),
        "loss": at_loss._replace(logits=loss.logits, gradients=gradients_at_loss),
        "head": at_loss._replace(logits=loss.head_gradient_inputs, gradients=gradients_at_loss + head),
        "embedding": ends._replace(gradients=all_gradients + (head if stage >= 2 else 0.0)),
        "step": resting._replace(
            # ZeRO-1 and -2 count the gradients of the own part in `_step_bytes`.
            gradients=all_gradients if stage in (0, 3) else 0.0,
            bucket=bucket,
            step=standing.step_D,
        ),
    }


def _gone_at_first_gradient(workload: Workload, num_ranks: int) -> Floats:
    """Share of the layers whose activations are gone when a rank holds all gradients that it will, ``[D]``.

    Elements are owned in the order of the layers and of the ranks, or of ``zero_order``; of several replicas the last
    one is meant. The backward comes from the last element: of four equal ranks, rank 3 makes its buffer at once, and
    rank 0 when three quarters of the layers are done.
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
    """Bytes made by the optimizer's step on every rank, ``[D]``: ZeRO-3 by groups of parameters, ZeRO-0 by tensors.

    Gradients of the own part are joined and copied into fp32. In ZeRO 1 and 2 they are counted here themselves, and the
    norm of the largest comes before, in fp64.
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
