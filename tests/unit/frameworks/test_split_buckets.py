"""Buckets of gradients that DeepSpeed averages hold all of them, whatever the installed release leaves out."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2

from ds_hetero.engine.patching import Function, Patches
from ds_hetero.frameworks.deepspeed.zero import optimizers

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _of_0_18_9(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What that release does on CPUs, where no type is called "torch.cpu.FloatTensor"."""
    names = [f"torch.cpu.{kind}Tensor" for kind in ("Half", "Float", "Double", "BFloat16")]
    buckets = [[tensor for tensor in tensors if tensor.type() == name] for name in names]
    return [bucket for bucket in buckets if bucket]


@pytest.mark.parametrize("stock", [_of_0_18_9, stage_1_and_2.split_half_float_double], ids=["0.18.9", "installed"])
def test_every_dense_gradient_is_in_one_bucket_of_its_type(stock: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_1_and_2, "split_half_float_double", stock)
    tensors = [torch.zeros(size, dtype=dtype) for size in (1, 2) for dtype in DTYPES]
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,), check_invariants=True)
    patches = Patches()
    optimizers.install(patches)
    buckets = stage_1_and_2.split_half_float_double([*tensors, sparse])
    patches.undo()
    assert stage_1_and_2.split_half_float_double is stock
    assert sorted(id(tensor) for bucket in buckets for tensor in bucket) == sorted(map(id, tensors))
    assert all(len({tensor.dtype for tensor in bucket}) == 1 for bucket in buckets)
