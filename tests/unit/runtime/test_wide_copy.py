"""Copies 16 bytes at a time: the same bits as torch's, and where elements stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_hetero.runtime.attention.wide_copy import contiguous_rows, copy_rows_, stacked_rows


class CopiedTypes(TorchFunctionMode):
    """Notes the data types that ``copy_`` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.copy_:
            self.types.append(args[0].dtype)
        return func(*args, **kwargs or {})


def any_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all kinds: NaN with payloads, infinities, subnormal numbers."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_arrives(dtype: torch.dtype) -> None:
    source = any_bits(3, 5, 2, 16, dtype=dtype).permute(2, 0, 1, 3)
    target = torch.zeros(3, 2, 7, 16, dtype=dtype).transpose(0, 1)[:, :, 1:6]
    with CopiedTypes() as copies:
        copy_rows_(target, source)
    assert copies.types == [torch.complex128]
    assert torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
    assert torch.equal(contiguous_rows(source).view(torch.uint8), source.contiguous().view(torch.uint8))
    other = any_bits(*source.shape, dtype=dtype)
    stacked = stacked_rows([source, other])
    assert torch.equal(stacked.view(torch.uint8), torch.stack([source, other]).view(torch.uint8))


@pytest.mark.parametrize(
    "source",
    [
        torch.ones(4, 3, 12, dtype=torch.bfloat16),  # rows of 24 bytes
        torch.ones(4, 3, 17, dtype=torch.bfloat16)[..., :16],  # rows 34 bytes apart
        torch.ones(4, 3, 24, dtype=torch.bfloat16)[..., 4:20],  # rows that begin after 8 bytes
        torch.ones(4, 3, 16),  # of another type than the target
        torch.ones(4, 16, 3, dtype=torch.bfloat16).mT,  # rows that are not consecutive
    ],
)
def test_rows_off_the_boundaries_are_copied_by_element(source: Tensor) -> None:
    target = torch.zeros(source.shape, dtype=torch.bfloat16)
    with CopiedTypes() as copies:
        copy_rows_(target, source)
    assert copies.types == [torch.bfloat16]
    assert torch.equal(target, torch.ones_like(target))
    assert torch.equal(stacked_rows([source, source]), torch.ones(2, *source.shape, dtype=source.dtype))


def test_contiguous_rows_are_not_copied() -> None:
    x = torch.ones(2, 3, 16)
    assert contiguous_rows(x) is x
