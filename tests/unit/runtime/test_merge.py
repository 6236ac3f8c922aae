"""Which merge is used: one kernel only where it was tried with success, operators everywhere else."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ds_hetero.runtime.attention.kernels import merge

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_choice() -> Iterator[None]:
    merge.chosen_merge.cache_clear()
    yield
    merge.chosen_merge.cache_clear()


def test_cpus_and_float64_merge_by_operators() -> None:
    assert merge.chosen_merge(CPU, torch.float32) is merge.merge_by_operators_
    assert merge.chosen_merge(torch.device("cuda", 0), torch.float64) is merge.merge_by_operators_


def test_a_gpu_uses_the_kernel_if_its_trial_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "one_kernel_refusal", lambda device: None)
    assert merge.chosen_merge(torch.device("cuda", 0), torch.float32) is merge.merge_in_one_kernel_


def test_a_gpu_where_the_trial_fails_says_why_and_merges_by_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge, "one_kernel_refusal", lambda device: "RuntimeError: no C compiler")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert merge.chosen_merge(torch.device("cuda", 0), torch.float32) is merge.merge_by_operators_
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage()


def test_a_trial_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*tensors: Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(merge, "merge_in_one_kernel_", fail)
    assert merge.one_kernel_refusal(CPU) == "RuntimeError: Failed to find C compiler"


def test_a_kernel_with_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
        merge.merge_by_operators_(out, lse, out_block, lse_block)
        out[0, 0, -1] += 1e-3  # its last query

    monkeypatch.setattr(merge, "merge_in_one_kernel_", wrong)
    assert "differ from those of the operators by 0.001" in str(merge.one_kernel_refusal(CPU))


def test_the_trial_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "merge_in_one_kernel_", merge.merge_by_operators_)
    before = torch.get_rng_state()
    assert merge.one_kernel_refusal(CPU) is None
    assert torch.equal(torch.get_rng_state(), before)
