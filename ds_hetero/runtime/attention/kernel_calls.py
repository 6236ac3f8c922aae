"""Calls of one lane step on tensors: one block at a time, or all blocks of a kind in one call.

Documents of a lane step are blocks of their own. A kernel that takes many at a time is given them one behind the
other; short documents then cost one launch together, and not one each.

Keys and values as they travel round a lane's ring: one [2, B, heads, n, D] tensor per sub-ring and source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import KernelCall, Ring
from ds_hetero.runtime.attention.kernels import (
    AttentionKernel,
    Band,
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    merge_,
)
from ds_hetero.runtime.devices import copied_to
from ds_hetero.values.placement import Range


class Call(ABC):
    """One call of a kernel: forward, and backward of the same queries and keys.

    Tensors of queries are [B, h, tokens of the lane, ...], those of keys [B, g, tokens of the source, D].
    """

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """Where the call's blocks lie among its queries and keys, and what is visible."""

    @abstractmethod
    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """Merge a `forward` into the results of all queries."""

    @abstractmethod
    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """Add to the gradient of all queries."""

    @abstractmethod
    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Add to a gradient of all keys."""

    @abstractmethod
    def _queries_of(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _keys_of(self, x: Tensor) -> Tensor: ...

    def forward(self, kernel: AttentionKernel, qkv: Sequence[Tensor], scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the call's queries."""
        q, k, v = qkv
        return kernel.forward(self._queries_of(q), self._keys_of(k), self._keys_of(v), scores, self.blocks)

    def backward(
        self, kernel: AttentionKernel, dout: Tensor, saved: SavedForward, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the call's queries and keys."""
        q, out, lse, dout = (self._queries_of(x) for x in (saved.q, saved.out, saved.lse, dout))
        own = SavedForward(q, self._keys_of(saved.k), self._keys_of(saved.v), out, lse)
        return kernel.backward(dout, own, scores, self.blocks)


@dataclass(frozen=True, slots=True)
class BlockCall(Call):
    """A call for one block, on views of the tensors."""

    call: KernelCall

    @property
    def blocks(self) -> Band:
        """The band of the only block."""
        return self.call.band

    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """See `Call`."""
        queries = self.call.queries
        if self.call.first:
            out[queries], lse[queries] = part
        else:
            merge_(out[queries], lse[queries], *part)

    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """See `Call`."""
        grad[self.call.queries] += part

    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """See `Call`."""
        grad[self.call.keys] += part

    def _queries_of(self, x: Tensor) -> Tensor:
        return x[self.call.queries]

    def _keys_of(self, x: Tensor) -> Tensor:
        return x[self.call.keys]


@dataclass(frozen=True, eq=False)
class PackedCall(Call):
    """A call for many blocks of one batch row and one range of heads; no two share a query or a key."""

    q_heads: slice
    kv_heads: slice
    queries: tuple[Range, ...]  # local queries of every block, ascending
    keys: tuple[Range, ...]  # keys of every block, ascending
    bands: tuple[Band, ...]  # of every block, all with the same `Band.window`
    first: bool  # whether no earlier call of the forward has any of these queries

    @cached_property
    def blocks(self) -> PackedBlocks:
        """Where the blocks lie in the packed tensors."""
        query_sizes = [stop - start for start, stop in self.queries]
        key_sizes = [stop - start for start, stop in self.keys]
        return PackedBlocks.of_sizes(query_sizes, key_sizes, self.bands)

    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """See `Call`."""
        out_part, lse_part = part[0].to(out.dtype), part[1]
        if not self.first:
            merged, lse_merged = self._queries_of(out).clone(), self._queries_of(lse).clone()
            merge_(merged, lse_merged, out_part, lse_part)
            out_part, lse_part = merged, lse_merged
        index = index_of(self.queries, out.device)
        out[:, self.q_heads].index_copy_(2, index, out_part)
        lse[:, self.q_heads].index_copy_(2, index, lse_part)

    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """See `Call`."""
        grad[:, self.q_heads].index_add_(2, index_of(self.queries, grad.device), part.to(grad.dtype))

    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """See `Call`."""
        grad[:, self.kv_heads].index_add_(2, index_of(self.keys, grad.device), part.to(grad.dtype))

    def _queries_of(self, x: Tensor) -> Tensor:
        return _taken(x[:, self.q_heads], self.queries)

    def _keys_of(self, x: Tensor) -> Tensor:
        return _taken(x[:, self.kv_heads], self.keys)


def _taken(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """Return the tokens in ``ranges`` of [B, heads, tokens, ...]; a view where they are consecutive."""
    if all(before[1] == after[0] for before, after in pairwise(ranges)):
        return x[:, :, ranges[0][0] : ranges[-1][1]]
    return torch.index_select(x, 2, index_of(ranges, x.device))


def packed_calls(calls: Sequence[KernelCall]) -> tuple[Call, ...]:
    """Return the same work as ``calls``, of one sub-ring and step of a batch of one row, in as few calls as possible.

    Together are blocks with the same heads and the same window, as flash-attention counts it, that share no query and
    no key. Calls that are the first to have their queries come first: none of their queries is in any other of these.
    """
    groups_by_kind: dict[tuple[object, ...], list[list[KernelCall]]] = {}
    for call in calls:
        query_tokens, key_tokens = call.queries[2], call.keys[2]
        window = call.band.window(query_tokens.stop - query_tokens.start, key_tokens.stop - key_tokens.start)
        heads = (call.queries[1].start, call.queries[1].stop, call.keys[1].start, call.keys[1].stop)
        groups = groups_by_kind.setdefault((heads, window, call.first), [])
        for group in groups:
            if _follows(group[-1], call):
                group.append(call)
                break
        else:
            groups.append([call])
    groups = list(chain.from_iterable(groups_by_kind.values()))
    first_groups = [group for group in groups if group[0].first]
    other_groups = [group for group in groups if not group[0].first]
    return tuple(map(_together, [*first_groups, *other_groups]))


def _follows(before: KernelCall, call: KernelCall) -> bool:
    """Whether a call's queries and keys all lie behind those of another."""
    follows: bool = before.queries[2].stop <= call.queries[2].start and before.keys[2].stop <= call.keys[2].start
    return follows


def _together(group: Sequence[KernelCall]) -> Call:
    """Return one call for a group of calls."""
    first = group[0]
    if len(group) == 1:
        return BlockCall(first)
    return PackedCall(
        q_heads=first.queries[1],
        kv_heads=first.keys[1],
        queries=tuple((call.queries[2].start, call.queries[2].stop) for call in group),
        keys=tuple((call.keys[2].start, call.keys[2].stop) for call in group),
        bands=tuple(call.band for call in group),
        first=first.first,
    )


def pack_kv(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """Return this rank's KV as it travels; no tensor if no other group needs it."""
    columns = ring.table.columns(ring.position)
    if not columns:
        return []
    blocks = []
    for sub in ring.sub_rings:
        if len(columns) == 1:
            tokens = slice(*columns[0])
            blocks.append(torch.stack([k[:, sub.kv_heads, tokens], v[:, sub.kv_heads, tokens]]))
        else:
            index = index_of(columns, k.device)
            parts = [x[:, sub.kv_heads].index_select(2, index) for x in (k, v)]
            blocks.append(torch.stack(parts))
    return blocks


def add_columns_(grad: Tensor, part: Tensor, columns: tuple[Range, ...], first: int = 0) -> None:
    """Add the gradient of keys that have travelled to that of all keys, both [B, heads, tokens, D].

    Args:
        grad: of all keys.
        part: of those in ``columns``, or of some of them that follow one another.
        first: index of the first key of ``part`` among these.
    """
    if len(columns) == 1:
        start = columns[0][0] + first
        grad[:, :, start : start + part.shape[2]] += part
    else:
        grad.index_add_(2, index_of(columns, grad.device)[first : first + part.shape[2]], part)


@lru_cache(maxsize=256)
def index_of(columns: tuple[Range, ...], device: torch.device) -> Tensor:
    """Return the indices that lie in the ranges ``columns``, one range after the other: [n]."""
    return copied_to(torch.cat([torch.arange(start, stop) for start, stop in columns]), device)


def local_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of the local block, by sub-ring; the packed ones, if they hold all tokens: contiguous."""
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, sub.kv_heads], v[:, sub.kv_heads]) for sub in ring.sub_rings]


def block_like(q: Tensor, ring: Ring, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return uninitialised memory for the KV of so many tokens, or for its gradient, by sub-ring: [2, B, g, n, D]."""
    batch_size, _, _, head_dim = q.shape
    blocks = []
    for sub in ring.sub_rings:
        num_kv_heads = sub.kv_heads.stop - sub.kv_heads.start
        blocks.append(q.new_empty(2, batch_size, num_kv_heads, tokens, head_dim, dtype=dtype))
    return blocks


def only(blocks: Mapping[int, list[Tensor]], keep: Set[int]) -> dict[int, list[Tensor]]:
    """Return the blocks whose sources are in ``keep``."""
    return {source: block for source, block in blocks.items() if source in keep}
