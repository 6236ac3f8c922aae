"""Memory of one rank, phase by phase of a step (`MemoryParts`).

Of a job that shares sequences, behind DeepSpeed's engine with its buffers, these are the phases:

    forward    it ends: all activations, and in ZeRO-3 parameters beside the buffer that brought them
    loss       the backward begins: all activations, the logits, and of a tiled loss the gradient of the head so far
    head       gradients of logits have become one of the head, beside the one of the tiles before
    mlp        the backward of a layer begins: all that the layer has kept, and gradients of its widest part
    sent       it has come to gradients of the MLP's weights, and ZeRO-3 copies a full bucket by owners
    attention  it has come to attention: the MLP's part is gone, keys and values visit, exchanges are packed
    embedding  the backward ends: the gradient of the embedding
    step       the optimizer's: gradients of the rank's own part, their copies in fp32, and what the optimizer makes

Below ZeRO-2 gradients of a layer come as its activations go: all activations stand beside the head's gradient, those of
a layer beside all gradients but the embedding's, and the larger sum counts. In ZeRO-2 a rank makes the buffer of all
its gradients when the first of them comes, which is that of the last element that it owns: activations of the layers up
to there are still held. With gradient accumulation gradients of earlier micro-batches are there from the start, and
ZeRO-3 has one buffer for all. Stages of pipelines have `ds_hetero.cost.stages.gradients`.

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
    layer_weight_bytes,
    trained_of_ends,
    trained_of_layer,
    trained_parameters,
    weight_bytes,
)
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


def backward_phases(always: MemoryParts, layer: LayerMemory, logits: Bytes, *, checkpointed: bool) -> Phases:
    """The moments of a backward.

    Args:
        always: what is there at each of them, with the activations that it begins with.
        layer: of a layer whose backward it is.
        logits: at its beginning; 0 where a rank has no head.
        checkpointed: activations are inputs of layers, and the layer is computed again.
    """
    again = layer.kept if checkpointed else 0.0
    held = always.activations if checkpointed else always.activations - layer.of_mlp
    return {
        "loss": always._replace(logits=logits),
        "mlp": always._replace(layer=again + layer.made),
        "attention": always._replace(
            activations=held,
            layer=layer.kept - layer.of_mlp if checkpointed else 0.0,
            ring_buffers=layer.ring_buffers,
            exchange_buffers=always.exchange_buffers + layer.exchange_buffers,
        ),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingMemory:
    """Memory of a job that shares sequences as far as tokens and heads do not matter."""

    model: ModelSpec
    workload: Workload
    states: Mapping[str, Floats]  # of `state_bytes`
    gathered: Gathered
    bucket: float
    copied: float  # of a full bucket, by owners
    sent_layers: int  # whose backward is over when a bucket is full
    head: float  # gradient of the head, and as much of the embedding
    gone_D: Floats  # of `_gone_at_first_gradient`
    step_D: Floats  # of `_step_bytes`

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, cluster: Cluster) -> StandingMemory:
        """Compute it once for all schedules."""
        element, stage = workload.element_bytes, workload.zero_stage
        bucket = float(workload.buffers.reduce_bucket * element if stage else 0)
        trained = float(element * trained_parameters(model, workload))
        if workload.adapter_rank:  # DeepSpeed makes no larger bucket than there are gradients
            bucket = min(bucket, trained)
        head = float(element * model.vocab_size * model.hidden_size if trained_of_ends(model, workload) else 0)
        of_layers = bucket - (head if head <= bucket else 0)
        gone_D = _gone_at_first_gradient(workload, cluster.num_ranks)
        return cls(
            model=model,
            workload=workload,
            states=state_bytes(model, workload, cluster),
            gathered=Gathered.of(model, workload),
            bucket=bucket,
            copied=min(bucket, trained) if stage == 3 else 0.0,
            sent_layers=int(of_layers // (element * trained_of_layer(model, workload))),
            head=head,
            gone_D=np.zeros_like(gone_D) if workload.micro_batches > 1 else gone_D,
            step_D=_step_bytes(model, workload, cluster),
        )


def memory_phases(standing: StandingMemory, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Phases:
    """Memory of every rank of a job that shares sequences; leading dimensions of the arguments are kept."""
    model, workload, states = standing.model, standing.workload, standing.states
    checkpointed = workload.activation_checkpointing
    stays = stays_on_device(grouping.cluster, model, workload, tokens_D)
    layer = layer_memory(model, workload, LayerShare.of_sequence(model, workload, grouping, tokens_D, heads_D))
    activations, of_one = layer.kept_by_all, layer.kept
    if checkpointed:
        activations = (1 if workload.offload_activations else model.num_layers) * layer.given + stays.activations
        of_one = layer.given
    resting = MemoryParts(**{name: states[name] + getattr(stays, name) for name in ("weights", "optimizer_state")})
    working = resting._replace(
        gradients=_gradients_in_backward(standing, activations, of_one),
        gathered=standing.gathered.in_layers,
        activations=activations,
        bucket=standing.bucket,
    )
    logits = logit_bytes(model, workload, tokens_D)
    moments = dict(backward_phases(working, layer, logits, checkpointed=checkpointed))
    if standing.copied and standing.sent_layers < model.num_layers:
        moments["sent"] = working._replace(
            activations=np.maximum(activations - standing.sent_layers * of_one, 0.0),
            layer=(layer.kept if checkpointed else 0.0) + layer.given + 2 * layer.matrix,
            bucket=standing.bucket + standing.copied,
        )
    of_norm = layer.of_mlp if checkpointed else normed_bytes(model, workload, tokens_D)
    of_head = head_bytes(model, workload, tokens_D)
    return {**moments, **_moments_of_ends(standing, resting, working, of_norm, (logits, of_head))}


def _gradients_in_backward(standing: StandingMemory, activations: Bytes, of_one: Bytes) -> Bytes:
    """Gradients at the moment of the backward at which they and the activations, ``of_one`` layer each, are most."""
    workload, states = standing.workload, standing.states
    if workload.zero_stage >= 2 or workload.micro_batches > 1:
        return np.maximum(states["gradients"] - standing.gone_D * activations, 0.0)
    late = states["gradients"] - (0 if standing.model.tied_embeddings else standing.head)
    return np.maximum(late - activations + of_one, standing.head)


def _moments_of_ends(
    standing: StandingMemory, resting: MemoryParts, working: MemoryParts, of_norm: Bytes, of_loss: tuple[Bytes, Bytes]
) -> Phases:
    """Phases outside the layers' backward; ``of_loss`` are bytes of logits, and of what makes the head's gradient."""
    stage, gathered, head = standing.workload.zero_stage, standing.gathered, standing.head
    of_all, (logits, of_head) = standing.states["gradients"], of_loss
    begun = of_all if stage == 3 or standing.workload.micro_batches > 1 else 0.0
    earlier = begun + (head if standing.workload.has_loss_tiles else 0.0)
    bucket = standing.bucket if stage == 3 else 0.0
    begins = working._replace(gradients=begun, bucket=bucket)
    arrived = begins._replace(gathered=gathered.in_layers + gathered.arriving, layer=of_norm)
    at_loss = begins._replace(gathered=gathered.at_loss)
    ends = working._replace(activations=0.0, bucket=standing.bucket + standing.copied)
    return {
        "forward": arrived,
        "loss": at_loss._replace(logits=logits, gradients=earlier),
        "head": at_loss._replace(logits=of_head, gradients=earlier + head),
        "embedding": ends._replace(gradients=of_all + (head if stage >= 2 else 0.0)),
        "step": resting._replace(gradients=of_all if stage in (0, 3) else 0.0, bucket=bucket, step=standing.step_D),
    }


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
        element, buffers, all_bytes = workload.element_bytes, workload.buffers, weight_bytes(model, workload)
        of_layer, head = layer_weight_bytes(model, workload), element * model.vocab_size * model.hidden_size
        if not buffers.live_parameters:
            held = min(2 * of_layer + head, all_bytes)
            return cls(held, held)
        limit = float(element * buffers.live_parameters)
        if all_bytes - head < limit:
            limit = all_bytes
        beyond = 0.5 * element * model.mlp_size * model.hidden_size * max(model.num_experts, 1)
        arriving = min(element * buffers.prefetch_bucket, all_bytes - head)
        return cls(min(max(limit + beyond, of_layer), all_bytes), min(max(limit, head), all_bytes), arriving)


def _gone_at_first_gradient(workload: Workload, num_ranks: int) -> Floats:
    """Share of the layers whose activations are gone when a rank holds all gradients that it will, ``[D]``.

    Elements are owned in the order of the layers and of the ranks, or of ``zero_order``; of several replicas the last
    one is meant.
    """
    if workload.zero_stage == 3:
        return np.zeros(num_ranks)
    if workload.zero_stage < 2:
        return np.ones(num_ranks)
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    place_D = np.arange(num_ranks) if workload.zero_order is None else np.array(workload.zero_order)
    owned_D = np.cumsum(weights_D[np.argsort(place_D)])[place_D]  # up to the last element of every rank
    return np.asarray((1 - owned_D / weights_D.sum()) / workload.data_parallel)


def _step_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Bytes made by the optimizer's step on every rank, ``[D]``: ZeRO-3 by groups of parameters, ZeRO-0 by tensors.

    Gradients of the own part are joined and copied into fp32. In ZeRO 1 and 2 they are counted here themselves, and the
    norm of the largest comes before, in fp64.
    """
    buffers, element = workload.buffers, workload.element_bytes
    own_D = trained_parameters(model, workload) * owned_share_D(workload, cluster)
    largest = model.hidden_size * max(model.vocab_size, model.mlp_size)
    if workload.zero_stage == 0:
        return np.full(cluster.num_ranks, float(largest * buffers.optimizer_bytes))
    joined: float = element if element < WIDE else 0
    if workload.zero_stage == 3:
        own_D = np.minimum(own_D, buffers.sub_group)
        made_D = own_D * (WIDE + max(joined, buffers.optimizer_bytes))
    else:
        made_D = own_D * (WIDE + max(element + joined, buffers.optimizer_bytes))
        made_D = np.maximum(made_D, own_D * element + np.minimum(own_D, largest) * 2 * WIDE)
    return np.asarray((0 if workload.offload_optimizer else 1) * made_D)
