"""The harness itself: what a test sees when ranks succeed, raise, die or hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import run_deepspeed, run_ranks, same_environment


def test_returns_the_value_of_every_rank_in_rank_order():
    assert run_ranks(_sum, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def _sum(rank, base):
    x = torch.tensor(base + rank)
    dist.all_reduce(x)
    return rank, x.item()


def test_uninitialized_memory_is_nan_and_a_rank_has_one_thread():
    assert run_ranks(_surroundings, 1, env={"A_SETTING": "here"}) == [(True, 1, "here")]


def _surroundings(rank):
    return bool(torch.empty(8).isnan().all()), torch.get_num_threads(), os.environ["A_SETTING"]


def test_output_of_ranks_is_shown(capsys):
    run_ranks(_say, 2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1"]


def _say(rank):
    print(f"I am {rank}")


def test_the_cause_comes_before_its_consequences():
    with pytest.raises(AssertionError) as failure:
        run_ranks(_raise_on_rank_2, 3)
    assert "failed on 3 of 3 ranks\n--- rank 2 ---\nTraceback" in str(failure.value)
    assert str(failure.value).count("ValueError: the cause") == 1


def _raise_on_rank_2(rank):
    if rank == 2:
        time.sleep(0.3)  # the others wait for it by then
        raise ValueError("the cause")
    dist.barrier()


def test_a_rank_that_dies_is_named_with_its_signal():
    with pytest.raises(AssertionError, match=r"--- rank 1 ---\ndied of signal SIGFPE without an exception"):
        run_ranks(_die_on_rank_1, 2)


def _die_on_rank_1(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGFPE)
    dist.barrier()


def test_a_rank_that_hangs_is_killed_and_its_stack_shown():
    # Ranks of a busy machine may need longer to start, and rank 0 to end; gloo gives them half of the time to connect.
    for timeout_s in (4, 16, 64):
        with pytest.raises(AssertionError) as failure:
            run_ranks(_hang_on_rank_1, 2, timeout_s=timeout_s)
        if "in _hang_on_rank_1" in str(failure.value) and "failed on 1 of 2 ranks" in str(failure.value):
            break
    assert "failed on 1 of 2 ranks" in str(failure.value)
    assert f"--- rank 1 ---\nstill running after timeout_s={timeout_s}" in str(failure.value)
    assert "in _hang_on_rank_1" in str(failure.value)


def _hang_on_rank_1(rank):
    if rank == 1:
        time.sleep(1000)


def test_ranks_get_the_environment_of_a_launcher():
    rank_0, rank_1 = run_deepspeed(_launcher_environment, 2)
    assert rank_0[:4] == ("0", "0", "2", "cpu")
    assert rank_1[:4] == ("1", "1", "2", "cpu")
    assert rank_0[4] == rank_1[4]


def _launcher_environment(rank):
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "MASTER_PORT"))


def test_the_environment_is_as_before_a_test(monkeypatch):
    monkeypatch.setenv("A_SETTING", "as it was")
    monkeypatch.setenv("A_DELETED_SETTING", "as it was")
    with same_environment():
        os.environ["A_SETTING"] = os.environ["A_NEW_SETTING"] = "changed"
        del os.environ["A_DELETED_SETTING"]
    assert (os.environ["A_SETTING"], os.environ["A_DELETED_SETTING"]) == ("as it was", "as it was")
    assert "A_NEW_SETTING" not in os.environ
