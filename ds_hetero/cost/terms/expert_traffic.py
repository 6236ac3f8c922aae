"""Bytes of a layer of experts: tokens that travel to the experts, or weights of experts that travel to the tokens.

Tokens travel if experts are divided among ranks (``"experts"``); under ZeRO-3 weights travel. Few tokens are cheaper to
send than many weights. Example: 8 experts of 176 million weights (Mixtral 8x7B), two for each token of 4,096 elements,
on two equal ranks. Weights are more bytes than tokens if a micro-batch has fewer than 258,048 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.models.shapes import ModelSpec

# A message of the forward has one of as many bytes in the backward.
_PASSES = 2
# ZeRO-3 gathers weights in both passes, and reduces their gradients (arXiv:1910.02054, section 7).
_WEIGHT_TRANSFERS = 3


def bytes_between_ranks(
    model: ModelSpec, rank_tokens: Sequence[int], experts: Sequence[int], element_bytes: int
) -> list[list[float]]:
    """Return the bytes that rank i sends to rank j for one layer in a forward and its backward, as ``[i][j]``.

    Every expert is chosen as often as any other. A token of rank i goes out for those of its k experts that are on
    rank j, and results of rank j's tokens go back. Example: 8 tokens of rank 0, one expert each, and three quarters of
    the experts on rank 1 are 6 rows from rank 0 to rank 1 and 6 results back, in both passes.

    Args:
        rank_tokens: tokens of every rank, of all sequences of the micro-batch.
        experts: experts of every rank; they sum to the layer's.
    """
    row_bytes = _PASSES * model.experts_per_token * model.hidden_size * element_bytes / sum(experts)
    ranks = range(len(experts))
    return [
        [row_bytes * (rank_tokens[i] * experts[j] + rank_tokens[j] * experts[i]) * (i != j) for j in ranks]
        for i in ranks
    ]


def token_bytes(
    model: ModelSpec, rank_tokens: Sequence[int], experts: Sequence[int], element_bytes: int
) -> tuple[float, ...]:
    """Return the bytes that each rank sends for one layer in a forward and its backward; see `bytes_between_ranks`."""
    return tuple(map(sum, bytes_between_ranks(model, rank_tokens, experts, element_bytes)))


def weight_bytes_of_experts(model: ModelSpec, num_ranks: int, element_bytes: int) -> float:
    """Bytes of experts' weights and gradients that each rank sends for one layer in a micro-batch under ZeRO-3.

    Each of the three collectives is a ring, in which a rank sends all parts but one.
    """
    weights = model.num_experts * model.mlp_parameters * element_bytes
    return _WEIGHT_TRANSFERS * weights * (num_ranks - 1) / num_ranks
