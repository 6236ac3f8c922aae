"""Exchange of batches within a replica: every rank sends the shards of its own batch in one uneven all-to-all.

A rank that has a batch announces it by a manifest (names, dtypes and shapes), so that every rank can tell how many
bytes it will receive from which rank. Then all shards move at once, packed as bytes in the order of the manifest.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shard_info import WHOLE_POSITIONS, ShardInfo, attach, loaded_sums
from ds_hetero.runtime.data.shards import Batch, Entries, PlacedBatch, cut
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placer, Rows


def manifest(placed: PlacedBatch) -> bytes:
    """Describe a batch: a line of JSON, followed by the pickled entries that are not tensors, if it has any."""
    batch = placed.batch
    described = {
        "length": batch.length,
        "rows": batch.rows,
        "documents_from": batch.documents_from,
        "position_runs": batch.position_runs,
        "placement": placed.placement.fingerprint,
        "inputs_are_whole": batch.keeps_inputs,
        "sequences": [(name, _dtype_name(t.dtype), list(t.shape)) for name, t in batch.sequences.items()],
        "constants": [(name, _dtype_name(t.dtype), list(t.shape)) for name, t in batch.constants.items()],
    }
    return json.dumps(described).encode() + b"\n" + (pickle.dumps(batch.objects) if batch.objects else b"")


def exchange_shards(
    placed: PlacedBatch | None, manifests: Sequence[bytes], replica: Replica, placer: Placer
) -> list[Entries]:
    """Return this rank's shard of the batch of every rank that has one, in the order of the ranks, on the CPU.

    Args:
        placed: this rank's batch; None if it has run out of batches.
        manifests: of all ranks of the replica; empty for a rank without a batch.
        placer: decides which rank holds which positions of the other ranks' batches.

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    Sends: to each rank its tokens of this rank's batch, and the tensors without a sequence dimension.

    Raises:
        BatchError: this rank places another rank's batch otherwise than that rank does.
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
    """Name, type and shape of a tensor that this rank will receive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _AnnouncedShard:
    """Description of a shard that this rank will receive."""

    info: ShardInfo  # to be attached to its position_ids
    entries: Sequence[_Entry]  # the tensors, in the order in which they are packed
    objects: Batch  # the entries that are not tensors

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def unpack(self, data: Tensor) -> Entries:
        """Return the entries of the shard from its received bytes, with its `ShardInfo` attached."""
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
    """Return the shard that this rank will get of the batch in a `manifest`. Raises `BatchError`: unlike placements."""
    line, _, pickled = text.partition(b"\n")
    described = json.loads(line)
    rows = tuple(Rows(start, stop, _as_pairs(documents)) for start, stop, documents in described["rows"])
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
        position_runs=tuple(map(_as_pairs, described["position_runs"])),
        inputs_are_whole=described["inputs_are_whole"],
    )
    tokens = placement.tokens(replica.rank)
    sequences = [(name, dtype, (shape[0], tokens, *shape[2:])) for name, dtype, shape in described["sequences"]]
    entries = [
        _Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in sequences + described["constants"]
    ]
    return _AnnouncedShard(info, entries, pickle.loads(pickled) if pickled else {})


def _as_pairs(described: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in described)


def _pack(placed: PlacedBatch, rank: int) -> Tensor:
    """Return all tensors of the shard of ``rank`` as one tensor of bytes, in the order of `manifest`."""
    intervals = placed.placement.intervals(rank)
    tensors = [cut(tensor, intervals) for tensor in placed.batch.sequences.values()]
    tensors += [tensor.cpu() for tensor in placed.batch.constants.values()]
    return torch.cat([_as_bytes(tensor) for tensor in tensors])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
