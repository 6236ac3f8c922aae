"""Interface of a block-attention kernel: its arguments and its results.

Dimension key: B batch, H query heads, G KV heads (H a multiple of G), Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from torch import Tensor

from ds_hetero.batch.tiles import Band


@dataclass(frozen=True, slots=True)
class Scores:
    """Scale and soft cap of attention scores: ``s = scale * q @ k.T``, capped to ``softcap * tanh(s / softcap)``.

    Args:
        scale: usually D ** -0.5.
        softcap: bound of the scores' magnitude (Gemma 2, arXiv:2408.00118, section 2); None for no bound.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SavedForward:
    """Results of the forward that the backward of attention needs.

    Args:
        q: [B, H, Q, D].
        k: [B, G, K, D].
        v: [B, G, K, D].
        out: [B, H, Q, D], of whole rows: merged over all blocks of keys.
        lse: [B, H, Q], of whole rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class PackedBlocks(NamedTuple):
    """Blocks packed along the token dimension, for one batch row: ``queries`` and ``keys`` are their cu_seqlens.

    ``queries`` and ``keys`` are their cu_seqlens. Example: blocks of 3 and 2 queries have ``queries`` (0, 3, 5).

    Args:
        queries: index of the first query of each block, and the number of all queries.
        keys: index of the first key of each block, and the number of all keys.
        bands: of every block, in the same order.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    bands: tuple[Band, ...]

    @classmethod
    def of_sizes(cls, queries: Sequence[int], keys: Sequence[int], bands: Sequence[Band]) -> PackedBlocks:
        """Return blocks with these numbers of queries and of keys."""
        return cls(tuple(accumulate(queries, initial=0)), tuple(accumulate(keys, initial=0)), tuple(bands))

    @property
    def max_queries(self) -> int:
        """Largest number of queries of a block."""
        return max(stop - start for start, stop in pairwise(self.queries))

    @property
    def max_keys(self) -> int:
        """Largest number of keys of a block."""
        return max(stop - start for start, stop in pairwise(self.keys))

    @property
    def window(self) -> tuple[int, int]:
        """`Band.window`, which is the same for all blocks."""
        return self.bands[0].window(self.queries[1], self.keys[1])

    def parts(self) -> Iterator[tuple[slice, slice, Band]]:
        """Yield (queries, keys, band) of every block."""
        for queries, keys, band in zip(pairwise(self.queries), pairwise(self.keys), self.bands, strict=True):
            yield slice(*queries), slice(*keys), band


Blocks = Band | PackedBlocks
"""What a kernel call computes: one block, given by its band, or many blocks of one batch row with the same window."""


def window_of_blocks(blocks: Blocks, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return `Band.window` of a block of queries [B, H, Q, D] and keys [B, G, K, D], or of many blocks."""
    return blocks.window if isinstance(blocks, PackedBlocks) else blocks.window(q.shape[2], k.shape[2])


def head_first(x: Tensor, is_packed: bool) -> Tensor:
    """Transpose [B, tokens, heads, D] to [B, heads, tokens, D]; packed blocks come without B and get B = 1."""
    return (x[None] if is_packed else x).transpose(1, 2)


class AttentionKernel(Protocol):
    """Computes the attention of a block of queries to a block of keys, together with its log-sum-exp.

    A kernel knows nothing of rings. The parts of a query's attention are combined by `merge_`. The backward of each
    part is exact by itself, because it gets out and lse of the *whole* row: with S the scores, P = exp(S - lse) and dS
    = P * (dP - rowsum(dout * out)), whatever other blocks or an attention sink have added to lse (FlashAttention-2,
    arXiv:2307.08691, section 3.1).

        q              [B, H, Q, D]    any strides, here as below
        k, v           [B, G, K, D]    query head h reads KV head h // (H // G)
        out, dout      [B, H, Q, D]    in the dtype of q
        lse            [B, H, Q]       natural logarithm of sum(exp(scores)); float32, for float64 inputs float64
        dq, dk, dv     like q, k, v    of this block alone; in the input dtype or in float32

    ``blocks`` say which keys are visible. The caller promises that each block has at least one query and one key, that
    every query sees a key of its block, and that every key is seen.
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the queries, see the table of the class."""

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) of ``blocks`` from ``dout``, the gradient of out."""

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Whether one call for many blocks launches fewer kernels than one call per block, for queries like ``q``."""
