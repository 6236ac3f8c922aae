"""Ranks of one job may run different attention kernels; `test_mixed_kernels` runs this file in a new process.

By hand: TRITON_INTERPRET=1 python -m pytest tests/dist/attention/mixed_kernels.py
"""

from __future__ import annotations

import pytest
import torch

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import AttentionKernel, Band, SavedForward, Scores
from ds_hetero.runtime.attention.kernels.plain import plain_backward, plain_forward
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.attention.kernels.triton_native import TritonKernel
from ds_hetero.runtime.replica import make_replica
from ds_hetero.selftest.attention_case import AttentionCase, largest_error
from ds_hetero.selftest.uneven_schedules import uneven_schedules
from ds_hetero.values.plans import Plan
from tests.support import run_ranks

LENGTH, HEAD_DIM = 41, 8
TOLERANCE = 1e-5  # float32, sums of 41 products in another order


class PlainKernel(TorchKernel):
    """The slow operators that serve where no fused one does."""

    name = "plain"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_forward(q, k, v, scores, band)

    def backward(
        self, dout: torch.Tensor, saved: SavedForward, scores: Scores, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return plain_backward(dout, saved, scores, band)


KERNELS = (TorchKernel, PlainKernel, TritonKernel)  # by rank


@pytest.mark.parametrize("name", uneven_schedules(3))
def test_ranks_with_different_kernels_equal_one_process(name: str) -> None:
    run_ranks(_check, 3, name)


def _check(rank: int, name: str) -> None:
    kernel: AttentionKernel = KERNELS[rank]()
    replica = make_replica(Plan.of_replicas([uneven_schedules(3)[name]]))
    all_at_once = AttentionSpec(kernel, window=19, softcap=1.5)
    cases = {
        "window, soft cap, sinks": AttentionCase(all_at_once, torch.float32, HEAD_DIM, with_sinks=True),
        "documents": AttentionCase(AttentionSpec(kernel), torch.float32, HEAD_DIM, documents=((0, 11), (11, 41))),
    }
    for feature, case in cases.items():
        error = largest_error(case, replica, LENGTH, torch.device("cpu"))
        assert error <= TOLERANCE, f"{feature} on rank {rank}: {error:.1e}"


def test_the_section_names_a_kernel_by_rank() -> None:
    told = run_ranks(_train, 3)
    assert [kernel for kernel, _ in told] == ["triton", "torch", None]
    assert all(error < 1e-5 for _, error in told), told


def _train(rank: int) -> tuple[str | None, float]:
    """The kernel of this rank, and how far its gradients are from those of one process."""
    import ds_hetero
    from tests.integration.tiny import batches, llama

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    whole, model = llama(**sizes), llama(**sizes)
    (batch,) = batches(1)
    whole(**batch).loss.backward()
    schedule = uneven_schedules(3)["sub-rings"].to_dict()
    handle = ds_hetero.register()
    section = {"schedule": schedule, "attention": ["triton", "torch", None], "verify": "off"}
    trained = handle.registry.prepare(model, {"heterogeneity": section}, {})
    (shard,) = handle.dataloader([batch])
    handle.loss(model(**{**shard, "labels": shard["shift_labels"]}), shard).backward()
    errors = []
    for expected, parameter in zip(whole.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        errors.append(float((parameter.grad / 3 - expected.grad).norm() / expected.grad.norm()))
    handle.undo()
    return trained.kernel, max(errors)
