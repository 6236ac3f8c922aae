"""Failing together: one error on every rank, and nobody left waiting. Budget: 5 s."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ds_hetero.errors import BatchError, CheckpointError, ConfigError, HeteroError, PeerError
from ds_hetero.runtime.collectives import encode_failure, on_all_ranks, raise_failures
from tests.support import run_ranks


def test_every_rank_gets_all_results():
    assert run_ranks(_gather_results, 3) == [([{"rank": (r,)} for r in range(3)], ["in a group", "in a group"])] * 3


def _gather_results(rank):
    pair = dist.new_group([0, 2])
    everywhere = on_all_ranks(lambda: {"rank": (dist.get_rank(),)})
    if rank == 1:
        return everywhere, ["in a group"] * 2
    return everywhere, on_all_ranks(lambda: "in a group", pair)


def test_one_process_needs_no_process_group():
    assert on_all_ranks(lambda: 3) == [3]
    with pytest.raises(ConfigError, match=r"^wrong$"):
        on_all_ranks(lambda: _raise(ConfigError("wrong")))


FAILURES = {
    "one rank breaks a rule": ({2: ConfigError("no")}, "ConfigError", "on rank 2: no"),
    "two ranks break one rule": ({1: ConfigError("no"), 2: ConfigError("no")}, "ConfigError", "on rank 1, 2: no"),
    "all ranks break one rule": (dict.fromkeys(range(3), ConfigError("no")), "ConfigError", "no"),
    "rank 0 acts for all": ({0: BatchError("no")}, "BatchError", "no"),
    "rank 0 cannot write a checkpoint": ({0: CheckpointError("no")}, "CheckpointError", "on rank 0: no"),
    "a crash": ({1: KeyError("x")}, "PeerError", "on rank 1: KeyError: 'x'"),
    "a crash and a rule": (
        {1: KeyError("x"), 2: BatchError("no")},
        "BatchError",
        "on rank 1: KeyError: 'x'\non rank 2: no",
    ),
    "what all know already": (dict.fromkeys(range(3), PeerError("rank 1 gone")), "PeerError", "rank 1 gone"),
    "a result that cannot travel": ({1: None}, "PeerError", "on rank 1: AttributeError"),
}


def test_a_failure_of_any_rank_is_raised_on_all():
    raised = run_ranks(_fail, 3)
    assert raised[0] == raised[1] == raised[2]
    for (name, message), (_, expected_name, expected) in zip(raised[0], FAILURES.values(), strict=True):
        assert name == expected_name
        assert message.startswith(expected) if expected.endswith("AttributeError") else message == expected


def _fail(rank):
    raised = []
    for error_by_rank, _, _ in FAILURES.values():
        with pytest.raises((HeteroError, PeerError)) as caught:
            on_all_ranks(lambda errors=error_by_rank: _compute(errors, rank))
        assert (rank in error_by_rank) == (caught.value.__cause__ is not None)
        raised.append((type(caught.value).__name__, str(caught.value)))
    return raised


def _compute(error_by_rank, rank):
    error = error_by_rank.get(rank)
    if error is not None:
        raise error
    return (lambda: None) if rank in error_by_rank else None


def _raise(error):
    raise error


def test_failures_that_travelled_with_other_bytes():
    raise_failures({}, None, "nothing")
    with pytest.raises(KeyError):
        raise_failures({0: encode_failure(KeyError("x"))}, KeyError("x"), "the sum failed")
    with pytest.raises(PeerError, match=r"^the sum failed on rank 0: KeyError: 'x'$"):
        raise_failures({0: encode_failure(KeyError("x"))}, None, "the sum failed")
    with pytest.raises(BatchError, match=r"^on rank 3: too short$"):
        raise_failures({3: encode_failure(BatchError("too short"))}, None, "the sum failed")
