"""Arguments and results of a block-attention kernel, and how the results for several blocks of keys are merged.

Dimension key: B batch, H query heads, G KV heads (H a multiple of G), Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hetero.batch.tiles import Band


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of queries and keys: ``s = scale * q @ k.T``, with a cap ``softcap * tanh(s / softcap)``.

    Args:
        scale: usually D ** -0.5.
        softcap: the bound of the scores' magnitude (Gemma 2, arXiv:2408.00118, section 2); None for no bound.
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
        out: [B, H, Q, D], of the whole row: merged over all blocks of keys.
        lse: [B, H, Q], of the whole row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class PackedBlocks(NamedTuple):
    """Blocks that lie one behind the other in packed tensors, queries and keys in the same order.

    Args:
        queries: where each block's queries begin, and where the last one's end.
        keys: the same of the keys.
        bands: of every block.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    bands: tuple[Band, ...]

    @classmethod
    def of_sizes(cls, queries: Sequence[int], keys: Sequence[int], bands: Sequence[Band]) -> PackedBlocks:
        """Return blocks of so many queries and keys."""
        return cls(tuple(accumulate(queries, initial=0)), tuple(accumulate(keys, initial=0)), tuple(bands))

    @property
    def max_queries(self) -> int:
        """Queries of the largest block."""
        return max(stop - start for start, stop in pairwise(self.queries))

    @property
    def max_keys(self) -> int:
        """Keys of the block with the most."""
        return max(stop - start for start, stop in pairwise(self.keys))

    @property
    def window(self) -> tuple[int, int]:
        """`Band.window`, which is the same of all blocks."""
        return self.bands[0].window(self.queries[1], self.keys[1])

    def parts(self) -> Iterator[tuple[slice, slice, Band]]:
        """(queries, keys, band) of every block."""
        for queries, keys, band in zip(pairwise(self.queries), pairwise(self.keys), self.bands, strict=True):
            yield slice(*queries), slice(*keys), band


Blocks = Band | PackedBlocks
"""Of one kernel call: the band of the only block, or many blocks of one batch row, all with the same window."""


def window_of_blocks(blocks: Blocks, q: Tensor, k: Tensor) -> tuple[int, int]:
    """`Band.window` of queries [B, H, Q, D] and keys [B, G, K, D], or of many blocks of them."""
    return blocks.window if isinstance(blocks, PackedBlocks) else blocks.window(q.shape[2], k.shape[2])


def head_first(x: Tensor, is_packed: bool) -> Tensor:
    """[B, tokens, heads, D] -> [B, heads, tokens, D]; of many blocks, of which an operator knows no B, with B = 1."""
    return (x[None] if is_packed else x).transpose(1, 2)


class AttentionKernel(Protocol):
    """Attention of a block of queries to a block of keys, together with its log-sum-exp.

    A kernel knows nothing of rings. The parts that a query's attention is cut into are combined by `merge_`, and the
    backward of each part is exact by itself, because it is given the out and lse of the *whole* row: with S the scores,
    P = exp(S - lse) and dS = P * (dP - rowsum(dout * out)), whatever other blocks or an attention sink put into lse
    (FlashAttention-2, arXiv:2307.08691, section 3.1).

        q              [B, H, Q, D]    any strides, here as below
        k, v           [B, G, K, D]    query head h reads KV head h // (H // G)
        out, dout      [B, H, Q, D]    in the dtype of q
        lse            [B, H, Q]       natural logarithm of sum(exp(scores)); float32, for float64 inputs float64
        dq, dk, dv     like q, k, v    of this block alone; in the input dtype or in float32

    ``blocks`` say what is visible. The caller promises of each at least one query and one key, that every query sees a
    key of the block and that every key is seen. Many blocks lie one behind the other in tensors of one batch row.
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(
        self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Whether many blocks in one call are fewer launches than the blocks are many, for queries like these."""


def merge_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """Merge the attention over one more block of keys into the attention over the earlier ones, in place.

    With L = log(exp(lse) + exp(lse_block)), the merged output is exp(lse - L) * out + exp(lse_block - L) * out_block.

        out, out_block   [..., Q, D]   out in float32 or float64
        lse, lse_block   [..., Q]      in the dtype of out

    An lse of -inf is a part in which the query saw nothing; its output must be finite and does not count. Where both
    are -inf, nothing changes. Its test has the same by definition.

    Source: the online softmax (arXiv:1805.02867), as in Ring Attention (arXiv:2310.01889).
    """
    share = torch.sigmoid(lse_block - lse.clamp(min=torch.finfo(lse.dtype).min))
    out.lerp_(out_block.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_block, out=lse)
