"""Memory of one rank, moment by moment: of its parts, those that are there at once count, and the peak is the largest.

Of a job that shares sequences, behind DeepSpeed's engine with its buffers, these are the moments:

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.layer_memory import (
    WIDE,
    Bytes,
    LayerMemory,
    LayerShare,
    head_bytes,
    layer_memory,
    layer_weight_bytes,
    logit_bytes,
    normed_bytes,
    trained_of_ends,
    trained_of_layer,
    trained_parameters,
    weight_bytes,
)
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class MemoryParts(NamedTuple):
    """Bytes of every rank at a moment, ``[D]``, or a number for all.

    Args:
        gradients: what they take beyond the activations that they replace; all of them with accumulation or ZeRO-3.
    """

    weights: Bytes = 0.0  # parameters that stay on the rank
    optimizer_state: Bytes = 0.0  # master weights and moments
    gradients: Bytes = 0.0
    gathered: Bytes = 0.0  # ZeRO-3's parameters that stay gathered, and at the loss those that arrive
    activations: Bytes = 0.0  # per layer its input if checkpointed, else all that its backward needs
    layer: Bytes = 0.0  # what one layer's backward needs, if checkpointed, and what its MLP's backward makes
    ring_buffers: Bytes = 0.0  # keys and values that visit, their gradients, partial results
    exchange_buffers: Bytes = 0.0  # what is packed for an exchange, and activations between stages
    logits: Bytes = 0.0  # of a tile, or of all tokens
    bucket: Bytes = 0.0  # gradients under way
    step: Bytes = 0.0  # gradients of the rank's own part in fp32, and the optimizer's temporaries

    def items(self) -> Iterator[tuple[str, Bytes]]:
        """Name and bytes of every part."""
        return zip(PARTS, self, strict=True)

    def of_rank(self, rank: int) -> MemoryParts:
        """The parts of one rank."""
        shape = self.total.shape
        return MemoryParts(**{name: float(np.broadcast_to(size, shape)[rank]) for name, size in self.items()})

    @property
    def total(self) -> Floats:
        """All parts."""
        return np.asarray(sum([size for size in self if not (isinstance(size, float) and size == 0)]))


PARTS = MemoryParts._fields
Moments = Mapping[str, MemoryParts]


def peak_bytes(moments: Moments) -> Floats:
    """Bytes of every rank at its largest moment; leading dimensions are kept."""
    peak, *others = (parts.total for parts in moments.values())
    for other in others:
        peak = np.maximum(peak, other)
    return peak


def peak_parts(moments: Moments) -> MemoryParts:
    """The parts of the moment that needs the most, rank by rank; parts of other moments are 0."""
    totals = np.stack(np.broadcast_arrays(*(parts.total for parts in moments.values())))
    largest = totals.argmax(axis=0)
    is_peak_MD = np.arange(len(totals)).reshape(-1, *[1] * largest.ndim) == largest
    of_part = (
        np.array([np.broadcast_to(size, largest.shape) for size in sizes])
        for sizes in zip(*moments.values(), strict=True)
    )
    return MemoryParts(*(np.where(is_peak_MD, size_MD, 0.0).sum(axis=0) for size_MD in of_part))


# --- model states under ZeRO


def static_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Parameters, gradients and optimizer state that every rank keeps, ``[D]``.

    ZeRO (arXiv:1910.02054, section 3): stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3 the
    parameters too, each over all ranks of all replicas; see `owned_share_D`.
    """
    return np.asarray(sum(state_bytes(model, workload, cluster).values()))


def state_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> dict[str, Floats]:
    """The parts of `static_bytes`: ``optimizer_state``, ``gradients`` and ``weights``, each ``[D]``."""
    share_D, whole_D = owned_share_D(workload, cluster), np.ones(cluster.num_ranks)
    return {
        name: np.asarray(size * (share_D if stage <= workload.zero_stage else whole_D))
        for name, stage, size in _bytes_from_stage(model, workload)
    }


def partitioned_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of one copy of the model states that ZeRO partitions over all ranks, as far as they are on devices."""
    return sum(size for _, stage, size in _bytes_from_stage(model, workload) if stage <= workload.zero_stage)


def partitioned_parts(parts: MemoryParts, workload: Workload) -> Floats:
    """Bytes of partitions on a rank at a moment, which is more where it owns more, ``[D]``."""
    states = (("optimizer_state", 1), ("gradients", 2), ("weights", 3))
    names = [name for name, stage in (*states, ("step", 1)) if stage <= workload.zero_stage]
    return np.asarray(sum(getattr(parts, name) for name in names))


def owned_share_D(workload: Workload, cluster: Cluster) -> Floats:
    """Share of what ZeRO partitions that every rank of a replica owns, ``[D]``; of every node's with ``zero_within``.

    ``zero_weights`` are the shares of one replica's ranks; left out, all are equal.
    """
    weights_D = np.ones(cluster.num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    total_D = weights_D.sum() * workload.data_parallel
    if workload.zero_within:
        total_D = np.bincount(cluster.node_of_rank, weights=weights_D)[cluster.node_of_rank]
    return np.asarray(weights_D / total_D)


def _bytes_from_stage(model: ModelSpec, workload: Workload) -> tuple[tuple[str, int, float], ...]:
    """Model states by name, the ZeRO stage from which they are partitioned, and their bytes in all."""
    trained = trained_parameters(model, workload)
    return (
        ("optimizer_state", 1, 0.0 if workload.offload_optimizer else trained * workload.optimizer_bytes),
        ("gradients", 2, trained * workload.gradient_bytes),
        ("weights", 3, 0.0 if workload.offload_parameters else weight_bytes(model, workload)),
    )


# --- moments


def backward_moments(always: MemoryParts, layer: LayerMemory, logits: Bytes, *, checkpointed: bool) -> Moments:
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


def memory_moments(standing: StandingMemory, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Moments:
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
    moments = dict(backward_moments(working, layer, logits, checkpointed=checkpointed))
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
) -> Moments:
    """Moments outside the layers' backward; ``of_loss`` are bytes of logits, and of what makes the head's gradient."""
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


def saved_bytes(cluster: Cluster, model: ModelSpec, work: Workload) -> Floats:
    """Bytes of every rank's part of a save of an elastic job, ``[D]``: what it owns, and rank 0 the trained parameters.

    Measured parts (tests/integration/elastic/test_saved.py) are this, and some 60 KB.
    """
    trained = trained_parameters(model, work)
    owned_D = owned_share_D(work, cluster) * trained * work.optimizer_bytes if work.zero_stage else 0.0
    bytes_D = np.zeros(cluster.num_ranks) + owned_D
    if work.zero_stage < 3:
        bytes_D[0] += trained * (work.element_bytes + (0 if work.zero_stage else work.optimizer_bytes))
    return bytes_D


HOST_SHARE = 0.68
"""Share of a host's memory that offloads can use: ALST's longest sequences (arXiv:2506.13996) end where checkpoints
and optimizer state take 1.1 to 1.5 TB of 1.9. The rest is the system's, the data
loaders', and copies of what is under way."""


def host_bytes_of_nodes(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> Floats:
    """Bytes on the host of every node, of devices whose memory is another one, ``[nodes]``."""
    bytes_D = np.where(cluster.shares_host_memory, 0.0, _offloaded(cluster, model, work, tokens_D).total)
    return np.asarray(
        np.bincount(cluster.node_of_rank, weights=bytes_D, minlength=len(cluster.nodes)), dtype=np.float64
    )


def stays_on_device(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Offloaded bytes of devices whose memory is their host's; leading dimensions of ``tokens_D`` are kept."""
    if not cluster.shares_host_memory.any():
        return MemoryParts()
    parts = _offloaded(cluster, model, work, tokens_D).items()
    return MemoryParts(**{name: np.where(cluster.shares_host_memory, size, 0.0) for name, size in parts})


def _offloaded(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Bytes that offloads move: checkpoints of all layers; optimizer state with gradients; parameters."""
    share_D = owned_share_D(work, cluster)
    checkpoint = model.num_layers * model.hidden_size * work.element_bytes * work.micro_batch
    is_kept = work.activation_checkpointing and work.offload_activations
    per_parameter = (work.optimizer_bytes + work.gradient_bytes) if work.offload_optimizer else 0
    held = weight_bytes(model, work) if work.offload_parameters else 0.0
    return MemoryParts(
        activations=tokens_D * checkpoint if is_kept else 0.0,
        optimizer_state=share_D * trained_parameters(model, work) * per_parameter,
        weights=held * (share_D if work.zero_stage == 3 else np.ones_like(share_D)),
    )
