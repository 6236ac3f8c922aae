"""Values that the self-test sends over communicators: sums over many ranks are exact in float32."""

from __future__ import annotations

import pytest
import torch

from ds_hetero.selftest.communicators import _num_values


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 182, 183, 184, 575, 1024, 3343])
def test_sums_over_ranks_are_exact(num_ranks: int) -> None:
    values = _num_values(num_ranks)
    assert 2 < values <= 1009 and values % 2
    pattern = torch.arange(values, dtype=torch.float32)
    summed = torch.zeros_like(pattern)
    for rank in range(num_ranks):
        summed += pattern * (rank + 1)
    assert torch.equal(summed, pattern * (num_ranks * (num_ranks + 1) // 2))
    assert torch.equal(summed.long(), torch.arange(values) * (num_ranks * (num_ranks + 1) // 2))
    assert summed.max() <= 2**24
