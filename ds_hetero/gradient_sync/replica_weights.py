"""Weights of the replicas' gradients: each replica's share of the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.errors import SyncError


def token_weights(by_rank: Sequence[int], replicas: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the weight of each rank's gradients: the tokens of its replica divided by those of all replicas.

    All weights are 0 if there is no token.

    Example: ranks 0 and 1 are a replica with 30 tokens, rank 2 is one with 10. The weights are 0.75, 0.75 and 0.25.

    Args:
        by_rank: tokens of each rank's replica, as the rank gave them to `AsymmetricGradientSync.start`.
        replicas: ranks of every replica.

    Raises:
        SyncError: ranks of one replica gave different numbers of tokens, or a negative number.
    """
    for replica, ranks in enumerate(replicas):
        tokens = {rank: by_rank[rank] for rank in ranks}
        if len(set(tokens.values())) > 1 or min(tokens.values(), default=0) < 0:
            raise SyncError(
                f"start() got the tokens {tokens} by rank from the ranks of replica {replica}. Give each of its ranks "
                "the same number: the tokens of the whole replica."
            )
    total = max(sum(by_rank[ranks[0]] for ranks in replicas if ranks), 1)
    return {rank: by_rank[rank] / total for ranks in replicas for rank in ranks}
