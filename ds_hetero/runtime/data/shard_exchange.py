"""How batches travel: one uneven all-to-all of everybody's shards.

A rank that has a batch announces it by a manifest (names, dtypes and shapes), so that every rank can tell how many
bytes it will receive from whom. Then all shards move at once, packed as bytes in the order of the manifest.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.data.shards import WholeBatch, cut
from ds_hetero.runtime.replica import Replica

__all__ = ["exchange_shards", "manifest"]


def manifest(batch: WholeBatch) -> bytes:
    """A line of JSON, and the pickled entries that are not tensors, if there are any."""
    described = {
        "length": batch.length,
        "sequences": [(name, _name(t.dtype), list(t.shape)) for name, t in batch.sequences.items()],
        "constants": [(name, _name(t.dtype), list(t.shape)) for name, t in batch.constants.items()],
    }
    return json.dumps(described).encode() + b"\n" + (pickle.dumps(batch.objects) if batch.objects else b"")


def exchange_shards(
    batch: WholeBatch | None, manifests: Sequence[bytes], replica: Replica, device: torch.device
) -> list[dict[str, Any]]:
    """Trade this rank's whole batch for this rank's shard of every batch.

    Args:
        batch: this rank's batch; None if it has none.
        manifests: of all ranks of the replica; empty for a rank without a batch.
        replica: this rank's replica.
        device: where the process group wants its tensors.

    Returns:
        One shard per batch, in the order of the ranks that had them; tensors on the CPU.

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    Sends: to each rank its tokens of this rank's batch, and the tensors without a sequence dimension.
    """
    out = [torch.empty(0, dtype=torch.uint8)] * replica.sp_size
    if batch is not None:
        out = [_pack(batch, replica.schedule.intervals(batch.length, target)) for target in replica.ranks]
    announced = [_read_manifest(text, replica) for text in manifests]
    in_sizes = [sum(entry.num_bytes for entry in entries) for entries, _ in announced]
    received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
    out_sizes = [part.numel() for part in out]
    dist.all_to_all_single(received, torch.cat(out).to(device), in_sizes, out_sizes, group=replica.sp_group)
    parts = torch.split(received.cpu(), in_sizes)
    return [
        {**_unpack(part, entries), **objects}
        for part, (entries, objects) in zip(parts, announced, strict=True)
        if entries
    ]


@dataclass(frozen=True)
class _Entry:
    """A tensor as this rank will receive it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _read_manifest(text: bytes, replica: Replica) -> tuple[list[_Entry], dict[str, Any]]:
    if not text:
        return [], {}
    line, _, pickled = text.partition(b"\n")
    described = json.loads(line)
    tokens = replica.schedule.tokens(described["length"])[replica.rank]
    sequences = [(name, dtype, (shape[0], tokens, *shape[2:])) for name, dtype, shape in described["sequences"]]
    entries = [
        _Entry(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in sequences + described["constants"]
    ]
    return entries, pickle.loads(pickled) if pickled else {}


def _pack(batch: WholeBatch, intervals: Sequence[tuple[int, int]]) -> Tensor:
    tensors = [cut(tensor, intervals) for tensor in batch.sequences.values()]
    tensors += [tensor.cpu() for tensor in batch.constants.values()]
    return torch.cat([_as_bytes(tensor) for tensor in tensors])


def _unpack(data: Tensor, entries: Sequence[_Entry]) -> dict[str, Tensor]:
    tensors = {}
    for entry, part in zip(entries, torch.split(data, [entry.num_bytes for entry in entries]), strict=True):
        tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)  # aligned, where the bytes may not be
        _as_bytes(tensors[entry.name]).copy_(part)
    return tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
