"""Vocabulary-parallel embedding and head, for ranks that hold copies of the tokens: each rank has a part of the words.

A word is an entry of the vocabulary, given by its index.

    embedding   a rank looks up tokens that are its words, and has zeros for others; an all-reduce sums over the ranks
    head        a rank computes the logits of its words; the backward sums the gradients of the tokens
    loss        `ds_hetero.runtime.loss.token_log_probs` with a part: no rank ever has logits of all words

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

from ds_hetero.runtime.parallel_linear import sum_over_ranks, with_summed_gradient


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyPart:
    """The words ``[start, stop)`` of this rank, at least one; together the ranks of ``group`` have each word once."""

    group: ProcessGroup
    start: int
    stop: int
    num_words: int  # V

    @classmethod
    def of(cls, group: ProcessGroup, num_words: int) -> VocabularyPart:
        """Return this rank's part of the vocabulary, cut as torch.chunk cuts, and DTensor with it."""
        step = -(-num_words // dist.get_world_size(group))
        start = dist.get_rank(group) * step
        return cls(group=group, start=start, stop=min(start + step, num_words), num_words=num_words)

    def local(self, words: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the rows of words in this rank's part, 0 for other ranks' words, and whether they are this rank's.

        A number that is no word raises a RuntimeError, as an index out of bounds does on one rank; on GPUs at one of
        the next kernels. Otherwise every rank would silently have zeros for it.

        Args:
            counted: True for the numbers that have to be words; None for all.
        """
        is_word = (words >= 0) & (words < self.num_words)
        if counted is not None:
            is_word |= ~counted
        torch._assert_async(is_word.all(), f"the model has {self.num_words} words, the batch has others")
        is_here = (words >= self.start) & (words < self.stop)
        return (words - self.start).masked_fill(~is_here, 0), is_here

    def summed(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks, in place, and return it. Collectives: one all_reduce."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Take the maximum of ``x`` over the ranks, in place, and return it. Collectives: one all_reduce."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def embed_part(look_up: Callable[[Tensor], Tensor], words_bL: Tensor, part: VocabularyPart) -> Tensor:
    """Return the embeddings of words, the same on every rank.

        words_bL   [b, L]
        result     [b, L, H]

    Args:
        look_up: returns embeddings by row of this rank's part; row 0 is looked up for other ranks' words, and not used.

    Caller: every rank of the part's group; the gradient of the result is the same on all.
    Collectives: one all_reduce forward, none backward.
    """
    rows, are_here = part.local(words_bL)
    return sum_over_ranks(look_up(rows).masked_fill(~are_here[..., None], 0.0), part.group)


def project_to_part(project: Callable[[Tensor], Tensor], x_bLH: Tensor, part: VocabularyPart) -> Tensor:
    """Return the logits of this rank's words.

        x_bLH   [b, L, H], the same on every rank
        result  [b, L, v]

    Caller: every rank of the part's group.
    Collectives: none forward, one all_reduce backward.
    """
    return project(with_summed_gradient(x_bLH, part.group))
