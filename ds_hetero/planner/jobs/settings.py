"""Lists of settings that a search over jobs may choose: they change time and memory, and not what is trained.

Every list begins with the simplest setting, so that ties go to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.expert_choice import divided_stages
from ds_hetero.planner.jobs.kinds import Freedom

# Sequences of a micro-batch that are tried. More fill small GPUs no better: the achieved share of the peak is reached
# with some thousand tokens. Chosen, never measured.
_SIZES_OF_REPLICA = (1, 2, 4, 8)


def with_batch(work: Workload, size: int, batch: int) -> Workload:
    """Return the workload with micro-batches of ``size`` sequences, ``batch`` sequences a step."""
    return replace(work, micro_batch=size, micro_batches=batch // size)


def micro_batch_sizes(work: Workload, batch: int, freedom: Freedom) -> list[int]:
    """Return the sequences of a micro-batch that divide a batch; the workload's own if the user fixed it."""
    sizes = _SIZES_OF_REPLICA if freedom.may_choose("micro_batch") else (work.micro_batch,)
    return [size for size in sizes if batch % size == 0]


def zero_settings(work: Workload, cluster: Cluster, freedom: Freedom) -> Iterator[Workload]:
    """Yield the workload under every ZeRO stage and, with several nodes, under stage 3 with shards inside nodes."""
    if not freedom.may_choose("zero_within"):
        yield work
        return
    of_one_rank = cluster.num_ranks * work.data_parallel == 1  # which has nobody to share states with
    stages: tuple[int, ...] = (0, 1) if of_one_rank else (0, 1, 2, 3)
    if not freedom.may_choose("zero_stage"):
        stages = (work.zero_stage,)
    if work.experts is not None:
        stages = tuple(stage for stage in stages if stage in divided_stages(work))
    for stage in stages:
        # DeepSpeed offloads the optimizer of stages 1 to 3 alone.
        if stage or not (work.offload_optimizer or work.offload_parameters):
            yield replace(work, zero_stage=stage)
    offloads_states = work.offload_optimizer or work.offload_parameters
    may_be_within = work.data_parallel == 1 and not offloads_states and work.experts is None
    if 3 in stages and len(cluster.nodes) > 1 and may_be_within:
        yield replace(work, zero_stage=3, zero_within=True)


def recomputations(work: Workload, freedom: Freedom) -> list[Workload]:
    """Return the workload without and with recomputation of whole layers.

    Selective recomputation is not among them: no key of a job turns it on, so only a user who has it names it.
    """
    if not freedom.may_choose("activation_checkpointing", "selective_checkpointing"):
        return [work]
    keeps_all = replace(work, activation_checkpointing=False)
    recomputes = replace(work, activation_checkpointing=True)
    return [recomputes] if work.offload_activations else [keeps_all, recomputes]


def may_keep_attention(work: Workload, freedom: Freedom) -> bool:
    """Whether the search may add kept attention to a recomputation, where ranks share a sequence.

    A rank that runs whole sequences has the model's own attention, which keeps nothing.
    """
    return freedom.may_choose("keep_attention") and not work.keep_attention


def keeping_attention(works: Iterable[Workload]) -> list[Workload]:
    """Return those of the workloads that recompute, with attention kept over the recomputation."""
    return [replace(work, keep_attention=True) for work in works if work.activation_checkpointing]


def tilings(work: Workload, freedom: Freedom) -> list[Workload]:
    """Return the workload as it is, with the loss in tiles, and with loss and MLPs in tiles."""
    tiled = [work]
    if freedom.may_choose("tiled_logits") and not work.has_loss_tiles:
        tiled.append(replace(work, tiled_logits=True))
    loss_may_be_tiled = work.has_loss_tiles or freedom.may_choose("tiled_logits")
    if loss_may_be_tiled and freedom.may_choose("tiled_mlp") and not work.tiled_mlp:
        tiled.append(replace(work, tiled_logits=True, tiled_mlp=True))
    return tiled


def offloadings(work: Workload, cluster: Cluster, freedom: Freedom) -> list[Workload]:
    """Return the workload with optimizer state, checkpoints, or both offloaded; empty if devices use host memory."""
    if cluster.shares_host_memory.all():
        return []
    can_offload_state = (
        freedom.may_choose("offload_optimizer")
        and work.zero_stage > 0
        and not work.zero_within
        and not work.offload_optimizer
        and work.experts is None  # an expert's state stays with it
    )
    can_offload_checkpoints = (
        freedom.may_choose("offload_activations") and work.activation_checkpointing and not work.offload_activations
    )
    offloaded = []
    if can_offload_state:
        offloaded.append(replace(work, offload_optimizer=True))
    if can_offload_checkpoints:
        offloaded.append(replace(work, offload_activations=True))
    if can_offload_state and can_offload_checkpoints:
        offloaded.append(replace(work, offload_optimizer=True, offload_activations=True))
    return offloaded
