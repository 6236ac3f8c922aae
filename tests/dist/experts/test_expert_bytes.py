"""The bytes that the planner says experts' tokens put between two ranks are those that the ranks send.

Budget: 20 s.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.measure.traffic import Traffic
from ds_hetero.cost.terms.expert_traffic import bytes_between_ranks, token_bytes
from ds_hetero.models import load_model
from ds_hetero.runtime.experts.layer import run_placed_experts
from ds_hetero.values.splits import Split
from tests.support import run_ranks

WIDTH, ELEMENT_BYTES, COUNT_BYTES = 8, 8, 8
# Experts by rank, tokens by rank, experts of a token: ranks without experts, without tokens, and without both.
CASES = [
    ((3, 1, 0, 0), (8, 4, 4, 0), 2),
    ((1, 1, 1, 1), (4, 4, 8, 12), 1),
    ((0, 4, 0, 0), (4, 0, 0, 4), 4),
    ((5, 2, 0, 1), (16, 0, 8, 8), 3),
]


@pytest.mark.parametrize("strict", [False, True], ids=["gloo", "NCCL's rules"])
def test_planned_bytes_equal_those_on_the_wire_by_pair_of_ranks(strict: bool) -> None:
    run_ranks(_check_bytes, 4, strict=strict)


def _check_bytes(rank: int) -> None:
    for experts, tokens, top_k in CASES:
        even = _even_routing(tokens[rank], sum(experts), top_k)
        sent, in_all = _sent(rank, even, experts)
        model = replace(load_model("mixtral-8x7b"), hidden_size=WIDTH, experts_per_token=top_k)
        planned = bytes_between_ranks(model, tokens, experts, ELEMENT_BYTES)[rank]
        assert [sent[peer] for peer in range(4)] == planned, (experts, tokens, top_k)
        # Beside the rows every rank tells the others how many rows their experts get.
        counts = COUNT_BYTES * (sum(experts) - experts[rank])
        assert in_all == pytest.approx(token_bytes(model, tokens, experts, ELEMENT_BYTES)[rank] + counts)


def test_planned_bytes_are_the_mean_of_random_routings() -> None:
    """Routers choose as they like; 40 draws of 64 tokens are within 5 % of the expectation."""
    run_ranks(_check_mean, 2)


def _check_mean(rank: int) -> None:
    experts, tokens, top_k, draws = (6, 2), (48, 16), 2, 40
    model = replace(load_model("mixtral-8x7b"), hidden_size=WIDTH, experts_per_token=top_k)
    planned = bytes_between_ranks(model, tokens, experts, ELEMENT_BYTES)[rank][1 - rank]
    rng = random.Random(rank)
    total = 0
    for _ in range(draws):
        chosen = [rng.sample(range(sum(experts)), top_k) for _ in range(tokens[rank])]
        total += _sent(rank, torch.tensor(chosen), experts)[0][1 - rank]
    assert total / draws == pytest.approx(planned, rel=0.05)


def _even_routing(tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Experts of every token, [tokens, top_k], so that a rank's tokens choose every expert equally often.

    Token t chooses the next ``top_k`` experts after those of token t - 1, and begins again at the end.
    """
    assert tokens * top_k % num_experts == 0
    return (torch.arange(tokens * top_k) % num_experts).view(tokens, top_k)


def _sent(rank: int, ids: torch.Tensor, experts: tuple[int, ...]) -> tuple[Counter[int], int]:
    """Run a layer forward and backward; return bytes of rows by receiver, and all bytes that torch's operators send."""
    sent: Counter[int] = Counter()
    send = dist.all_to_all_single

    def counting(output: Any, rows: Any, receive: Any, splits: Any, **options: Any) -> Any:
        if rows.is_floating_point():
            for peer, count in enumerate(splits):
                sent[peer] += count * rows.shape[1] * rows.element_size() * (peer != rank)
        return send(output, rows, receive, splits, **options)

    x = torch.ones(len(ids), WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.ones(ids.shape, dtype=torch.float64)
    with Traffic() as traffic, mock.patch.object(dist, "all_to_all_single", counting):
        y = run_placed_experts(x, ids, weights, lambda rows, _: rows * 2, Split(experts), dist.group.WORLD)
        y.sum().backward()
    assert torch.equal(y, 2 * ids.shape[1] * torch.ones_like(y))
    return sent, sum(traffic.sent_bytes.values())
