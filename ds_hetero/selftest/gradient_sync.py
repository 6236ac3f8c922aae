"""Gradients of two replicas that cut their parameters differently: sums, and values that come back.

Rank 0 holds every parameter whole, the other ranks hold shards of unequal size; several buckets leave in the backward.
Values and gradients are small whole numbers, so that sums are exact in every type and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ds_hetero.gradient_sync import AsymmetricGradientSync
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.splits import share

_NAME = "gradient sync"
_SMALL_BUCKET_BYTES = 1024  # a bucket leaves after one or two parameters
_COLUMNS = 48


def check_gradient_sync(session: Session) -> Iterator[Line]:
    """Yield one line."""
    if session.size == 1:
        yield Line(_NAME, "skip", "one process has nobody to add gradients with")
        return
    layouts = _layouts(session.size)
    dtypes = {name: session.trained_dtype if name == "rows" else torch.float32 for name in layouts}
    values = {name: _whole_numbers(layout, dtypes[name], 0, session) for name, layout in layouts.items()}
    replica = min(session.rank, 1)
    with session.watch.call(_NAME):
        parameters = {
            name: nn.Parameter(_part(values[name], layout.cuts[replica], session.rank))
            for name, layout in layouts.items()
        }
        _step(session, parameters, layouts, replica)
    wrong = []
    for name, layout in layouts.items():
        gradients = [_whole_numbers(layout, dtypes[name], 1 + of_replica, session) for of_replica in range(2)]
        expected = _part(values[name] + gradients[0] + gradients[1], layout.cuts[replica], session.rank)
        if not torch.equal(parameters[name].detach(), expected):
            wrong.append(name)
    if wrong:
        yield Line(_NAME, "fail", f"other sums than of both replicas in {', '.join(wrong)}")
    else:
        yield Line(_NAME, "pass", f"rank 0 and {session.size - 1} shards, {len(layouts)} parameters")


def _step(
    session: Session, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, ParameterLayout], replica: int
) -> None:
    """A backward, and a step that adds its gradient to every value."""
    sync = AsymmetricGradientSync(parameters, layouts, bucket_bytes=_SMALL_BUCKET_BYTES, groups=session.groups)
    terms = []
    for name, parameter in parameters.items():
        gradient = _whole_numbers(layouts[name], parameter.dtype, 1 + replica, session)
        terms.append((parameter * _part(gradient, layouts[name].cuts[replica], session.rank)).sum())
    torch.autograd.backward(terms)
    sync.finish()
    with torch.no_grad():
        for owned in sync.owned.values():
            assert owned.grad is not None
            owned.add_(owned.grad)
    sync.gather()
    sync.close()


def _layouts(size: int) -> dict[str, ParameterLayout]:
    """Whole on rank 0; cut by rows, by columns and by flat elements over the others."""
    others = range(1, size)
    weights = [1 + rank % 3 for rank in others]

    def layout(shape: tuple[int, ...], dim: int | None) -> ParameterLayout:
        units = torch.Size(shape).numel() if dim is None else shape[dim]
        return ParameterLayout(shape, (Cut.whole(shape, 0), Cut.along(dim, tuple(others), share(units, weights))))

    rows = 2 * size + 5
    return {
        "rows": layout((rows, _COLUMNS), 0),
        "columns": layout((7, _COLUMNS + size), 1),
        "flat": layout((rows, 13), None),
    }


def _whole_numbers(layout: ParameterLayout, dtype: torch.dtype, seed: int, session: Session) -> Tensor:
    """Return random whole numbers from -9 to 9, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, layout.shape, generator=generator).to(session.device, dtype)


def _part(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    """Return the part of ``whole`` that a rank holds, which may be all of it."""
    extent = cut.part(rank)
    assert extent is not None
    start, stop = extent
    if cut.dim is not None:
        return whole.narrow(cut.dim, start, stop - start).clone()
    if stop - start == whole.numel():
        return whole.clone()
    return whole.reshape(-1)[start:stop].clone()
