"""Embedding and head whose words are cut over ranks with copies of the tokens: each rank has the rows of its words.

    embedding   a rank looks up the tokens of its own words, and zeros for the others; an all-reduce adds them up
    head        a rank computes the logits of its own words alone; the backward's gradients of the tokens add up
    loss        `ds_hetero.runtime.loss.token_log_probs` with a part: logits never exist whole

Dimension key: b rows, L tokens, H hidden size, V words, v of this rank.
Source: Megatron-LM (arXiv:1909.08053, section 3), here with parts of unequal size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.cut_linear import sum_over_ranks, with_summed_gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyPart:
    """Words of this rank, at least one; the ranks of ``group`` hold all of them once."""

    group: ProcessGroup
    start: int
    stop: int
    num_words: int  # V

    @classmethod
    def of(cls, group: ProcessGroup, num_words: int) -> VocabularyPart:
        """Return the part of this rank, as torch.chunk and DTensor cut."""
        step = -(-num_words // dist.get_world_size(group))
        start = dist.get_rank(group) * step
        return cls(group=group, start=start, stop=min(start + step, num_words), num_words=num_words)

    def local(self, words: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of words among this rank's, 0 for words of others; and whether they are this rank's.

        A word that no rank has would count as nothing, so it ends the program, as an index out of bounds does on one
        rank: with a RuntimeError, on GPUs at one of the next kernels.

        Args:
            counted: those that have to be words; None for all.
        """
        is_word = (words >= 0) & (words < self.num_words)
        if counted is not None:
            is_word |= ~counted
        torch._assert_async(is_word.all(), f"the model has {self.num_words} words, the batch has others")
        own = (words >= self.start) & (words < self.stop)
        return (words - self.start).masked_fill(~own, 0), own

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks, in place."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def embed_part(look_up: Callable[[Tensor], Tensor], words_bL: Tensor, part: VocabularyPart) -> Tensor:
    """Embeddings of words, the same on every rank.

        words_bL   [b, L]
        result     [b, L, H]

    Args:
        look_up: embeddings of this rank's words by their row; what it makes of words of others is not used.

    Caller: every rank of the part's group; the gradient of the result is the same on all.
    Collectives: one all_reduce forward, none backward.
    """
    rows, own = part.local(words_bL)
    return sum_over_ranks(look_up(rows).masked_fill(~own[..., None], 0.0), part.group)


def project_to_part(project: Callable[[Tensor], Tensor], x_bLH: Tensor, part: VocabularyPart) -> Tensor:
    """Logits of this rank's words.

        x_bLH   [b, L, H], the same on every rank
        result  [b, L, v]

    Caller: every rank of the part's group.
    Collectives: none forward, one all_reduce backward.
    """
    return project(with_summed_gradient(x_bLH, part.group))
