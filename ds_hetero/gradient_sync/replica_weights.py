"""Weights of the replicas' gradients: the share of all tokens that each replica has in a step."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.errors import SyncError


def token_weights(by_rank: Sequence[int], replicas: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return each rank's share of all tokens, given those of its replica; zeros if there are no tokens.

    Raises:
        SyncError: ranks of one replica were given different tokens, or fewer than none.
    """
    for replica, ranks in enumerate(replicas):
        tokens = {rank: by_rank[rank] for rank in ranks}
        if len(set(tokens.values())) > 1 or min(tokens.values(), default=0) < 0:
            raise SyncError(
                f"ranks of replica {replica} started a step with tokens {tokens} by rank. Give each the tokens of the "
                "whole replica."
            )
    total = max(sum(by_rank[ranks[0]] for ranks in replicas if ranks), 1)
    return {rank: by_rank[rank] / total for ranks in replicas for rank in ranks}
