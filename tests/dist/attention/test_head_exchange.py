"""The ragged exchange moves every element to where the schedule says, forward and backward, in one collective."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

from ds_hetero.runtime.attention.head_exchange import (
    gather_output_heads,
    gather_sequence,
    make_exchange,
    packed_gradients,
    scatter_output,
    scatter_sequence,
)
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks


class Copies(TorchFunctionMode):
    """Counts calls of ``copy_``."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is Tensor.copy_
        return func(*args, **kwargs or {})


# Ranks in head order, token weights, query heads, KV heads.
CASES = {
    "a rank without heads": ((0, 1, 2), (5, 1, 2), (3, 0, 5), 8),
    "a rank without tokens, a cut inside a KV head": ((0, 1, 2), (5, 0, 2), (3, 1, 4), 4),
    "one KV head on all ranks, heads cut in another order": ((2, 0, 1), (1, 1, 1), (3, 2, 3), 1),
    "equal heads, which one copy serves": ((0, 1, 2), (3, 1, 2), (4, 4, 4), 6),
    "two ranks alike, one that is not": ((0, 1, 2), (3, 2, 1), (2, 2, 4), 4),
    "ranks in another order": ((1, 0, 2), (3, 2, 2), (5, 6, 1), 4),
}


@pytest.mark.parametrize(("ranks", "tokens", "heads", "num_kv_heads"), CASES.values(), ids=CASES)
def test_exchange_equals_slicing_the_whole_tensor(ranks, tokens, heads, num_kv_heads):
    group = Group(ranks=ranks, tokens=tokens, heads=heads)
    schedule = Schedule(num_heads=sum(heads), num_kv_heads=num_kv_heads, groups=(group,), layout="contiguous")
    run_ranks(_check_exchange, 3, schedule)


def _check_exchange(rank, schedule):
    (group,), num_kv_heads = schedule.groups, schedule.num_kv_heads
    replica = make_replica(Plan.of_replicas([schedule]))
    for length, batch_size in ((11, 2), (37, 1)):
        exchange = make_exchange(replica, stream_placement(schedule, length))
        torch.manual_seed(length)
        q = torch.randn(batch_size, schedule.num_heads, length, 4)
        k, v = torch.randn(2, batch_size, num_kv_heads, length, 4)
        held = stream_placement(schedule, length)
        mine, in_order = held.positions(rank), sorted(group.ranks)
        q_heads = [group.head_range(r) for r in in_order]
        kv_heads = [schedule.kv_heads(*heads) for heads in q_heads]
        own_q, own_kv = slice(*q_heads[rank]), slice(*kv_heads[rank])
        with CommDebugMode() as comms:
            gathered = gather_sequence(q[:, :, mine], k[:, :, mine], v[:, :, mine], exchange)
        assert comms.get_total_counts() == 1
        for found, expected in zip(gathered, (q[:, own_q], k[:, own_kv], v[:, own_kv]), strict=True):
            assert torch.equal(found, expected)
            assert found._base is gathered[0]._base  # of the message, which nothing has copied
        for found, whole, heads in zip(gathered, (q, k, v), (q_heads, kv_heads, kv_heads), strict=True):
            shards = [whole[:, :, held.positions(r)] for r in in_order]
            assert torch.equal(found, _heads_of_ranks(shards, heads)[rank])

        with CommDebugMode() as comms:
            out = scatter_output(q[:, own_q].permute(2, 0, 1, 3), exchange)
        assert comms.get_total_counts() == 1
        assert torch.equal(out, q[:, :, mine].transpose(1, 2))

        with CommDebugMode() as comms:
            out = gather_output_heads(q[:, :, mine].transpose(1, 2), exchange)
        assert comms.get_total_counts() == 1
        assert torch.equal(out.permute(1, 2, 0, 3), q[:, own_q])

        # Each holder of a KV head sends a gradient of ones, so the rank with the tokens gets their number.
        holders = torch.zeros(num_kv_heads)
        for r in group.ranks:
            holders[slice(*schedule.kv_heads(*group.head_range(r)))] += 1
        with CommDebugMode() as comms:
            dq, dk, dv = scatter_sequence(*map(torch.ones_like, gathered), exchange)
        assert comms.get_total_counts() == 1
        assert torch.equal(dq, torch.ones_like(dq)) and dq.shape == (batch_size, schedule.num_heads, len(mine), 4)
        for grad in (dk, dv):
            assert torch.equal(grad, holders[None, :, None, None].expand_as(grad))
        # The same from float64 gradients that are rounded: packed by the rounding, and by nothing else.
        drawn = [torch.randn(x.shape, dtype=torch.float64) for x in gathered]
        rounded = packed_gradients(*drawn, exchange, torch.float32)
        with Copies() as copies:
            sent_as_they_are = scatter_sequence(*rounded, exchange)
        with Copies() as more_copies:
            copied_first = scatter_sequence(*(x.float() for x in drawn), exchange)
        has_heads = own_q.stop > own_q.start  # of no elements, every buffer is the message
        assert more_copies.count == copies.count + (3 if has_heads else 0)
        for found, expected in zip(sent_as_they_are, copied_first, strict=True):
            assert torch.equal(found, expected)

        tokens = [held.tokens(r) for r in in_order]
        ones = [torch.ones(batch_size, stop - start, length, 4) for start, stop in kv_heads]
        assert torch.equal(dk, _tokens_of_ranks(ones, kv_heads, tokens)[rank])


def test_schedules_that_differ_are_refused_on_every_rank():
    messages = run_ranks(_disagree, 3)
    assert all("do not hold the same schedule" in message for message in messages)


def _disagree(rank):
    group = Group(ranks=(0, 1, 2), tokens=(1, 1, 1 + (rank == 1)), heads=(1, 1, 2))
    try:
        make_replica(Plan.of_replicas([Schedule(num_heads=4, num_kv_heads=4, groups=(group,))]))
    except ValueError as error:
        return str(error)
    return "accepted"


def _heads_of_ranks(shards_BHsD: Sequence[Tensor], heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Each rank's tensor after an exchange from tokens to heads: [B, h, S, D], all tokens of its heads.

    Args:
        shards_BHsD: every rank's tokens, in the order of the ranks.
        heads: range of heads of every rank; ranges of KV heads may overlap.
    """
    whole_BHSD = torch.cat(list(shards_BHsD), dim=2)
    return [whole_BHSD[:, start:stop] for start, stop in heads]


def _tokens_of_ranks(
    parts_BhSD: Sequence[Tensor], heads: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> list[Tensor]:
    """Each rank's tensor after an exchange from heads to tokens: [B, H, s, D], all heads of its tokens.

    Where ranges of heads overlap, their parts add up, as the gradients of a shared KV head do.

    Args:
        parts_BhSD: every rank's heads, in the order of the ranks.
        heads: range of heads of every rank.
        tokens: of every rank.
    """
    batch_size, _, num_tokens, head_dim = parts_BhSD[0].shape
    whole_BHSD = parts_BhSD[0].new_zeros(batch_size, max(stop for _, stop in heads), num_tokens, head_dim)
    for part, (start, stop) in zip(parts_BhSD, heads, strict=True):
        whole_BHSD[:, start:stop] += part
    return list(torch.split(whole_BHSD, list(tokens), dim=2))
