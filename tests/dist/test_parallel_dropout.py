"""Dropout of activations that are cut over ranks, against torch's own on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_hetero.errors import ModelError
from ds_hetero.runtime.parallel_dropout import ParallelHeadDropout, drop_part, same_draws
from tests.support import run_ranks


def drops_its_part(rank, sizes, dim):
    torch.manual_seed(7 + rank)
    start, shape = sum(sizes[:rank]), [3, 4, 5]
    shape[dim] = sum(sizes)
    x = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).view(shape)
    own = x.narrow(dim, start, sizes[rank])
    with same_draws(dist.group.WORLD):
        found = drop_part(own, 0.4, dim, start, x.shape[dim])
        after = torch.rand(1).item()
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
    expected = F.dropout(x, 0.4)
    assert torch.equal(found, expected.narrow(dim, start, sizes[rank]))
    return after


@pytest.mark.parametrize(("sizes", "dim"), [((2, 2, 2), 1), ((3, 1, 3), -1)])
def test_parts_of_a_mask_are_those_of_one_process_and_generators_stay_alike(sizes, dim):
    assert len(set(run_ranks(drops_its_part, 3, sizes, dim))) == 1


def test_states_outside_go_on_where_they_were():
    own, others = zip(*run_ranks(draws_around, 2), strict=True)
    assert own == others


def draws_around(rank):
    """What a rank draws behind `same_draws`, and would after one number without it."""
    torch.manual_seed(rank)
    with same_draws(dist.group.WORLD):
        torch.rand(5)
    found = torch.rand(1).item()
    torch.manual_seed(rank)
    torch.randint(2**62, (1,))
    return found, torch.rand(1).item()


def test_what_is_cut_and_not_attentions_is_refused_and_what_is_whole_is_dropped_as_always():
    x, is_cut = torch.ones(2, 3, 8), True
    with ParallelHeadDropout(0, 2, 4, lambda: is_cut):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        with pytest.raises(ModelError, match=r"dropout of \[2, 3, 8\] between the cut layers"):
            F.dropout(x, 0.5)
        probabilities = F.dropout(torch.ones(2, 2, 3, 3), 0.5)
        is_cut = False
        torch.manual_seed(3)
        whole = F.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(whole, F.dropout(x, 0.5))
    assert probabilities.shape == (2, 2, 3, 3) and set(probabilities.unique().tolist()) <= {0.0, 2.0}
