"""Sync the gradients of two replicas that shard their parameters differently, and compare the updated values.

The first replica is rank 0, with whole parameters. The second replica is all other ranks, with shards of unequal size.
Several buckets are sent during the backward. Values and gradients are small integers, so that sums are exact in every
type and order.
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
    """Yield one line: whether every parameter has the values that both replicas' gradients give."""
    if session.size == 1:
        yield Line(_NAME, "skip", "one process has nobody to add gradients with")
        return
    layouts = _layouts(session.size)
    dtypes = {name: session.trained_dtype if name == "rows" else torch.float32 for name in layouts}
    values = {name: _random_integers(layout, dtypes[name], 0, session) for name, layout in layouts.items()}
    replica = min(session.rank, 1)
    with session.watch.call(_NAME):
        parameters = {
            name: nn.Parameter(_local_shard(values[name], layout.cuts[replica], session.rank))
            for name, layout in layouts.items()
        }
        _step(session, parameters, layouts, replica)
    wrong_names = []
    for name, layout in layouts.items():
        gradients = [_random_integers(layout, dtypes[name], 1 + number, session) for number in range(2)]
        expected = _local_shard(values[name] + gradients[0] + gradients[1], layout.cuts[replica], session.rank)
        if not torch.equal(parameters[name].detach(), expected):
            wrong_names.append(name)
    if wrong_names:
        yield Line(_NAME, "fail", f"other sums than of both replicas in {', '.join(wrong_names)}")
    else:
        yield Line(_NAME, "pass", f"rank 0 and {session.size - 1} shards, {len(layouts)} parameters")


def _step(
    session: Session, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, ParameterLayout], replica: int
) -> None:
    """Run a backward, add the synced gradients to the values on their owners, and gather the values."""
    sync = AsymmetricGradientSync(parameters, layouts, bucket_bytes=_SMALL_BUCKET_BYTES, groups=session.groups)
    terms = []
    for name, parameter in parameters.items():
        gradient = _random_integers(layouts[name], parameter.dtype, 1 + replica, session)
        terms.append((parameter * _local_shard(gradient, layouts[name].cuts[replica], session.rank)).sum())
    torch.autograd.backward(terms)
    sync.finish()
    with torch.no_grad():
        for owned in sync.owned.values():
            assert owned.grad is not None
            owned.add_(owned.grad)
    sync.gather()
    sync.close()


def _layouts(size: int) -> dict[str, ParameterLayout]:
    """Return three parameters: whole on rank 0, on all other ranks sharded by rows, by columns, or by flat elements."""
    sharding_ranks = range(1, size)
    weights = [1 + rank % 3 for rank in sharding_ranks]

    def layout(shape: tuple[int, ...], dim: int | None) -> ParameterLayout:
        """Shard a parameter along ``dim``; by flat elements for None."""
        units = torch.Size(shape).numel() if dim is None else shape[dim]
        return ParameterLayout(
            shape, (Cut.whole(shape, 0), Cut.along(dim, tuple(sharding_ranks), share(units, weights)))
        )

    rows = 2 * size + 5
    return {
        "rows": layout((rows, _COLUMNS), 0),
        "columns": layout((7, _COLUMNS + size), 1),
        "flat": layout((rows, 13), None),
    }


def _random_integers(layout: ParameterLayout, dtype: torch.dtype, seed: int, session: Session) -> Tensor:
    """Return random integers from -9 to 9 for the whole parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, layout.shape, generator=generator).to(session.device, dtype)


def _local_shard(parameter: Tensor, cut: Cut, rank: int) -> Tensor:
    """Return the shard of ``parameter`` that ``rank`` holds: all of it if the rank's replica does not shard it."""
    extent = cut.part(rank)
    assert extent is not None
    start, stop = extent
    if cut.dim is not None:
        return parameter.narrow(cut.dim, start, stop - start).clone()
    if stop - start == parameter.numel():
        return parameter.clone()
    return parameter.reshape(-1)[start:stop].clone()
