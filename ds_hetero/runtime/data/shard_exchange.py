"""Exchange of batches: one uneven all-to-all of all ranks' shards.

A rank that has a batch announces it by a manifest (names, dtypes and shapes), so that every rank can tell how many
bytes it will receive from whom. Then all shards move at once, packed as bytes in the order of the manifest.

Results of the tokens of a batch, put together from all ranks of a replica: the other way than cutting.

What follows is computed on every rank from the same whole tensor. Each rank's gradient is then the whole one, and its
own tokens' part of it is all that its backward needs. A script computes one loss per replica from such results, the
same on every rank: by the convention ``"replica_mean"`` of `ds_hetero.runtime.loss` the part is times the ranks of the
replica, as it is behind a differentiable all_gather whose backward adds up over them.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.errors import BatchError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shard_info import WHOLE_POSITIONS, ShardInfo, attach, loaded_sums
from ds_hetero.runtime.data.shards import Batch, Entries, PlacedBatch, cut
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement, Placer, Rows


def manifest(placed: PlacedBatch) -> bytes:
    """Return a line of JSON, and the pickled entries that are not tensors, if there are any."""
    batch = placed.batch
    described = {
        "length": batch.length,
        "rows": batch.rows,
        "documents_from": batch.documents_from,
        "position_runs": batch.position_runs,
        "placement": placed.placement.fingerprint,
        "inputs_are_whole": batch.keeps_inputs,
        "sequences": [(name, _name(t.dtype), list(t.shape)) for name, t in batch.sequences.items()],
        "constants": [(name, _name(t.dtype), list(t.shape)) for name, t in batch.constants.items()],
    }
    return json.dumps(described).encode() + b"\n" + (pickle.dumps(batch.objects) if batch.objects else b"")


def exchange_shards(
    placed: PlacedBatch | None, manifests: Sequence[bytes], replica: Replica, placer: Placer
) -> list[Entries]:
    """This rank's shard of every batch, in order of its ranks, on the CPU. Raises `BatchError`: unlike placements.

    Args:
        manifests: of all ranks of the replica; empty for a rank without a batch.
        placer: decides who holds which positions of the batches of the other ranks.

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    Sends: to each rank its tokens of this rank's batch, and the tensors without a sequence dimension.
    """
    out = [torch.empty(0, dtype=torch.uint8)] * replica.sp_size
    if placed is not None:
        out = [_pack(placed, target) for target in replica.ranks]
    announced = [_read_manifest(text, replica, placer) if text else None for text in manifests]
    in_sizes = [shard.num_bytes if shard is not None else 0 for shard in announced]
    received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=message_device(replica.sp_group))
    out_sizes = [part.numel() for part in out]
    dist.all_to_all_single(received, torch.cat(out).to(received.device), in_sizes, out_sizes, group=replica.sp_group)
    parts = torch.split(received.cpu(), in_sizes)
    return [shard.unpack(part) for part, shard in zip(parts, announced, strict=True) if shard is not None]


@dataclass(frozen=True)
class _Entry:
    """A tensor as this rank will receive it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _AnnouncedShard:
    """A shard as this rank will receive it."""

    info: ShardInfo  # what is to be attached to it
    entries: Sequence[_Entry]  # the tensors, in the order in which they are packed
    objects: Batch  # the entries that are not tensors

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def unpack(self, data: Tensor) -> Entries:
        shard: Entries = {}
        parts = torch.split(data, [entry.num_bytes for entry in self.entries])
        for entry, part in zip(self.entries, parts, strict=True):
            shard[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)  # aligned, where the bytes may not be
            _as_bytes(shard[entry.name]).copy_(part)
        whole_positions = shard.pop(WHOLE_POSITIONS, None)
        info = replace(self.info, whole_positions=whole_positions, sums=loaded_sums(shard))
        attach(shard["position_ids"], info)
        return {**shard, **self.objects}


def _read_manifest(text: bytes, replica: Replica, placer: Placer) -> _AnnouncedShard:
    line, _, pickled = text.partition(b"\n")
    described = json.loads(line)
    rows = tuple(Rows(start, stop, _pairs(documents)) for start, stop, documents in described["rows"])
    placement = placer(replica.schedule, described["length"], rows)
    if placement.fingerprint != described["placement"]:
        raise BatchError(
            f"rank {replica.rank} places a batch of {described['length']} tokens otherwise than the rank that holds "
            "it. All ranks must place by the same schedule and costs: draw a step's batches on every rank between the "
            "same two steps, and leave the placer as the engine makes it."
        )
    info = ShardInfo(
        placement=placement,
        documents_from=described["documents_from"],
        position_runs=tuple(map(_pairs, described["position_runs"])),
        inputs_are_whole=described["inputs_are_whole"],
    )
    tokens = placement.tokens(replica.rank)
    sequences = [(name, dtype, (shape[0], tokens, *shape[2:])) for name, dtype, shape in described["sequences"]]
    entries = [
        _Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in sequences + described["constants"]
    ]
    return _AnnouncedShard(info, entries, pickle.loads(pickled) if pickled else {})


def _pairs(described: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in described)


def _pack(placed: PlacedBatch, rank: int) -> Tensor:
    """Return all tensors of the shard of ``rank``, as bytes."""
    intervals = placed.placement.intervals(rank)
    tensors = [cut(tensor, intervals) for tensor in placed.batch.sequences.values()]
    tensors += [tensor.cpu() for tensor in placed.batch.constants.values()]
    return torch.cat([_as_bytes(tensor) for tensor in tensors])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gather_tokens(shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
    """Give every rank the results of all tokens.

        shard    [B, s, ...]; [B, 1, ...] on a rank without tokens, which is left out
        result   [B, L, ...], the same on every rank

    Caller: every rank of the replica.
    Collectives: one all_gather of [B, max s, ...] forward, none backward. The gradient of ``shard`` is its part of the
    result's, times the ranks of the replica.
    """
    if shard.dtype == torch.bool:  # which no backend sends
        return gather_tokens(shard.to(torch.uint8), placement, replica).to(torch.bool)
    whole: Tensor = _GatherTokens.apply(shard, placement, replica)  # type: ignore[no-untyped-call]
    return whole


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
        ctx.placement, ctx.replica, ctx.columns = placement, replica, shard.shape[1]
        own, widest = placement.tokens(replica.rank), max(placement.rank_tokens)
        sent = shard.new_zeros(shard.shape[0], widest, *shard.shape[2:])
        sent[:, :own] = shard[:, :own]
        parts = [torch.empty_like(sent) for _ in replica.ranks]
        with waiting_for_peers("putting results of all ranks together"):
            dist.all_gather(parts, sent, group=replica.sp_group)
        whole = shard.new_empty(shard.shape[0], placement.length, *shard.shape[2:])
        for rank, part in zip(replica.ranks, parts, strict=True):
            at = 0
            for start, stop in placement.intervals(rank):
                whole[:, start:stop] = part[:, at : at + stop - start]
                at += stop - start
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        replica: Replica = ctx.replica
        own = [grad[:, start:stop] for start, stop in ctx.placement.intervals(replica.rank)]
        missing = ctx.columns - sum(part.shape[1] for part in own)
        if missing:
            own.append(grad.new_zeros(grad.shape[0], missing, *grad.shape[2:]))
        return torch.cat(own, dim=1) * replica.sp_size, None, None
