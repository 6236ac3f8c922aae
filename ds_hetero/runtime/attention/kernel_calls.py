"""Calls of an attention kernel in one lane step: one block at a time, or all blocks of a kind in one call.

In a lane step each document is a block. A kernel that takes packed blocks gets the blocks of many documents packed
along the token dimension, so many short documents cost one launch.

Dimension key: B batch, h query heads, g KV heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import KernelCall
from ds_hetero.runtime.attention.kernels import (
    AttentionKernel,
    Band,
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    merge_,
)
from ds_hetero.runtime.attention.travelling_kv import index_of
from ds_hetero.values.placement import Range


class Call(ABC):
    """One call of a kernel, for some queries of the lane and some keys of a KV block.

    Tensors of queries are [B, h, tokens of the lane, ...], tensors of keys [B, g, tokens of the block, D].
    """

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """Positions of the call's blocks among its queries and keys, and the band that is visible in each."""

    @abstractmethod
    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """Merge the result ``part`` of `forward` into out and lse of all queries."""

    @abstractmethod
    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's queries to the gradient of all queries."""

    @abstractmethod
    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's keys to the gradient of all keys."""

    @abstractmethod
    def store_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Write the gradient ``part`` of the call's keys into the gradient of all keys, whatever was there."""

    @property
    @abstractmethod
    def query_ranges(self) -> Hashable:
        """Rows, heads and tokens of the call's queries: calls with equal ones have the same queries."""

    @abstractmethod
    def queries_of(self, x: Tensor) -> Tensor:
        """Return the call's queries out of all queries."""

    @abstractmethod
    def _keys_of(self, x: Tensor) -> Tensor:
        """Return the call's keys out of all keys."""

    def forward(self, kernel: AttentionKernel, qkv: Sequence[Tensor], scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the call's queries."""
        q, k, v = qkv
        return kernel.forward(self.queries_of(q), self._keys_of(k), self._keys_of(v), scores, self.blocks)

    def backward(
        self, kernel: AttentionKernel, dout: Tensor, saved: SavedForward, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the call's queries and keys.

        Args:
            dout: of all queries of the lane.
            saved: of all queries of the lane and all keys of the block; its lse is not read.
            lse: [B, h, Q], of the call's queries.
        """
        q, out, dout = (self.queries_of(x) for x in (saved.q, saved.out, dout))
        saved_of_call = SavedForward(q, self._keys_of(saved.k), self._keys_of(saved.v), out, lse)
        return kernel.backward(dout, saved_of_call, scores, self.blocks)


@dataclass(frozen=True, slots=True)
class BlockCall(Call):
    """A call for one block, on views of the tensors."""

    call: KernelCall

    @property
    def blocks(self) -> Band:
        """The band of the only block."""
        return self.call.band

    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """Merge the result of `forward` into out and lse of all queries."""
        queries = self.call.queries
        if self.call.first:
            out[queries], lse[queries] = part
        else:
            merge_(out[queries], lse[queries], *part)

    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's queries to the gradient of all queries."""
        grad[self.call.queries].add_(part)

    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's keys to the gradient of all keys."""
        grad[self.call.keys].add_(part)

    def store_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Write the gradient ``part`` of the call's keys into the gradient of all keys."""
        grad[self.call.keys] = part

    @property
    def query_ranges(self) -> Hashable:
        """Rows, heads and tokens of the call's queries."""
        return tuple((part.start, part.stop) for part in self.call.queries)  # slices have no hash before Python 3.12

    def queries_of(self, x: Tensor) -> Tensor:
        """Return the call's queries out of all queries, as a view."""
        return x[self.call.queries]

    def _keys_of(self, x: Tensor) -> Tensor:
        return x[self.call.keys]


@dataclass(frozen=True, eq=False)
class PackedCall(Call):
    """A call for many blocks of one batch row and one range of heads, none of which share a query or a key.

    Attributes:
        queries: local queries of every block, ascending.
        keys: keys of every block, ascending.
        bands: of every block; all have the same `Band.window`.
        first: no earlier call of the forward has any of these queries.
    """

    q_heads: slice
    kv_heads: slice
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    bands: tuple[Band, ...]
    first: bool

    @cached_property
    def blocks(self) -> PackedBlocks:
        """Positions of the blocks in the packed tensors."""
        query_sizes = [stop - start for start, stop in self.queries]
        key_sizes = [stop - start for start, stop in self.keys]
        return PackedBlocks.of_sizes(query_sizes, key_sizes, self.bands)

    def store(self, out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor]) -> None:
        """Merge the result of `forward` into out and lse of all queries."""
        out_part, lse_part = part[0].to(out.dtype), part[1]
        if not self.first:
            # `merge_` works in place, and `queries_of` returns a view or a copy: a clone makes both cases alike.
            merged, lse_merged = self.queries_of(out).clone(), self.queries_of(lse).clone()
            merge_(merged, lse_merged, out_part, lse_part)
            out_part, lse_part = merged, lse_merged
        index = index_of(self.queries, out.device)
        out[:, self.q_heads].index_copy_(2, index, out_part)
        lse[:, self.q_heads].index_copy_(2, index, lse_part)

    def add_to_queries_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's queries to the gradient of all queries."""
        grad[:, self.q_heads].index_add_(2, index_of(self.queries, grad.device), part.to(grad.dtype))

    def add_to_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Add the gradient ``part`` of the call's keys to the gradient of all keys."""
        grad[:, self.kv_heads].index_add_(2, index_of(self.keys, grad.device), part.to(grad.dtype))

    def store_keys_(self, grad: Tensor, part: Tensor) -> None:
        """Write the gradient ``part`` of the call's keys into the gradient of all keys."""
        grad[:, self.kv_heads].index_copy_(2, index_of(self.keys, grad.device), part.to(grad.dtype))

    @property
    def query_ranges(self) -> Hashable:
        """Heads and tokens of the call's queries."""
        return self.q_heads.start, self.q_heads.stop, self.queries

    def queries_of(self, x: Tensor) -> Tensor:
        """Return the call's queries out of all queries, as a view or a copy."""
        return _select_tokens(x[:, self.q_heads], self.queries)

    def _keys_of(self, x: Tensor) -> Tensor:
        return _select_tokens(x[:, self.kv_heads], self.keys)


def _select_tokens(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """Return the tokens in ``ranges`` of x [B, heads, tokens, ...]; a view if the ranges are consecutive."""
    if all(earlier[1] == later[0] for earlier, later in pairwise(ranges)):
        return x[:, :, ranges[0][0] : ranges[-1][1]]
    return torch.index_select(x, 2, index_of(ranges, x.device))


def packed_calls(calls: Sequence[KernelCall]) -> tuple[Call, ...]:
    """Combine the ``calls`` of one sub-ring and step, for a batch of one row, into as few calls as possible.

    Combines blocks that have the same heads and the same window, as flash-attention counts it, and share no query and
    no key. Calls that are the first for their queries come before all others.
    """
    groups_by_kind: dict[tuple[object, ...], list[list[KernelCall]]] = {}
    for call in calls:
        query_tokens, key_tokens = call.queries[2], call.keys[2]
        window = call.band.window(query_tokens.stop - query_tokens.start, key_tokens.stop - key_tokens.start)
        heads = (call.queries[1].start, call.queries[1].stop, call.keys[1].start, call.keys[1].stop)
        groups = groups_by_kind.setdefault((heads, window, call.first), [])
        # First fit: a group is in ascending order, so comparing with its last call suffices.
        for group in groups:
            if _follows(group[-1], call):
                group.append(call)
                break
        else:
            groups.append([call])
    groups = list(chain.from_iterable(groups_by_kind.values()))
    # A first call overwrites out and lse of its queries; the others merge their results into these.
    first_groups = [group for group in groups if group[0].first]
    other_groups = [group for group in groups if not group[0].first]
    return tuple(map(_combine, [*first_groups, *other_groups]))


def _follows(earlier: KernelCall, call: KernelCall) -> bool:
    """Whether all queries and keys of ``call`` lie behind those of the call ``earlier``."""
    has_later_queries: bool = earlier.queries[2].stop <= call.queries[2].start
    has_later_keys: bool = earlier.keys[2].stop <= call.keys[2].start
    return has_later_queries and has_later_keys


def _combine(group: Sequence[KernelCall]) -> Call:
    """Return a `BlockCall` for a single call, a `PackedCall` for several; see `packed_calls`."""
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
