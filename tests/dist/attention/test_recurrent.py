"""Scans and convolutions over random placements equal those of the whole sequence, forward and backward.

The scan is a decayed running sum of its own, one head after another, so that every token depends on all before it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks.proof.chance import with_moves
from ds_hetero.runtime.attention.batch_layout import BatchLayout, batch_layout
from ds_hetero.runtime.documents import (
    documents_from_cu_seqlens,
    documents_from_mask,
    documents_from_positions,
    rows_of,
)
from ds_hetero.runtime.recurrent.convolution import convolution
from ds_hetero.runtime.recurrent.scan import head_cuts, scan
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan
from ds_hetero.runtime.recurrent.sequences import sequences_of
from ds_hetero.runtime.recurrent.state_passing import pass_states
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.runtime.step_clock import UNTIMED
from ds_hetero.values.plans import Plan
from tests.dist.attention.cases import Case, random_case
from tests.support import run_ranks


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, range(12)), (4, range(12)), *(pytest.param(n, range(12, 24), marks=pytest.mark.slow) for n in (2, 4))],
)
def test_random_placements_equal_the_whole_sequence(world_size: int, seeds: range) -> None:
    run_ranks(_check_all, world_size, seeds)


def _check_all(rank: int, seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, torch.distributed.get_world_size(), by_documents=seed % 2 == 0)
        if seed % 3 == 0:
            case.placement = with_moves(random.Random(seed), case.placement)
        replica = make_replica(Plan.of_replicas([case.schedule]))
        batch = batch_layout(case.placement, rows_of(_documents(case)))
        try:
            _check_scan(case, replica, batch, random.Random(seed))
            _check_passed_states(case, replica, batch, random.Random(seed))
            _check_convolution(case, replica, batch, random.Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def _documents(case: Case) -> list[tuple[tuple[int, int], ...]]:
    if "cu_seqlens" in case.agreed:
        return documents_from_cu_seqlens(case.agreed["cu_seqlens"].tolist(), case.length, case.batch_size)
    if "attention_mask" in case.agreed:
        return documents_from_mask(case.agreed["attention_mask"])
    return documents_from_positions(case.agreed["position_ids"])


def _running_sum(inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """[B, L, h, D]: state = decay x state + key x value, out = state + skip x value."""
    key, value, decay, skip = inputs["key"], inputs["value"], inputs["decay"].double(), parameters["skip"]
    if key.shape[2] < value.shape[2]:
        key = key.repeat_interleave(value.shape[2] // key.shape[2], 2)
    state, out = torch.zeros_like(value[:, 0]), []
    for token in range(value.shape[1]):
        state = decay[:, token, :, None] * state + key[:, token] * value[:, token]
        out.append(state + skip[:, None] * value[:, token])
    return torch.stack(out, 1)


def _check_scan(case: Case, replica: Replica, batch: BatchLayout, rng: random.Random) -> None:
    key_heads = rng.choice([1, 2, 3])
    heads = key_heads * rng.choice([1, 2, 4])
    torch.manual_seed(rng.randrange(2**31))
    shape = (case.batch_size, case.length)
    whole = {
        "key": torch.randn(*shape, key_heads, 3, dtype=torch.float64),
        "value": torch.randn(*shape, heads, 3, dtype=torch.float64),
        "decay": torch.rand(*shape, heads, dtype=torch.float32),  # of another type, as gates are
    }
    skip = torch.randn(heads, dtype=torch.float64)
    dout = torch.randn(*shape, heads, 3, dtype=torch.float64)
    mine = torch.tensor(case.placement.positions(replica.rank), dtype=torch.int64)
    expected, expected_grads = _whole_scan(whole, skip, batch, dout)
    own = {name: x[:, mine].clone().requires_grad_() for name, x in whole.items()}
    own_skip = skip.clone().requires_grad_()
    call = Scan(inputs=own, output_like="value", parameters={"skip": own_skip}, compute=_running_sum)
    out = scan(call, replica, batch)
    out.backward(dout[:, mine])
    torch.testing.assert_close(out, expected[:, mine], rtol=1e-12, atol=1e-12)
    for name, x in own.items():
        tolerance = 1e-6 if name == "decay" else 1e-12
        torch.testing.assert_close(x.grad, expected_grads[name][:, mine], rtol=tolerance, atol=tolerance)
    total = torch.zeros_like(skip) if own_skip.grad is None else own_skip.grad
    start, stop = head_cuts(replica, heads)[replica.ranks.index(replica.rank)]
    torch.testing.assert_close(total[start:stop], expected_grads["skip"][start:stop], rtol=1e-12, atol=1e-12)
    assert not total[:start].any() and not total[stop:].any()


def _whole_scan(
    whole: Mapping[str, Tensor], skip: Tensor, batch: BatchLayout, dout: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = {name: x.clone().requires_grad_() for name, x in whole.items()}
    parameter = skip.clone().requires_grad_()
    out = torch.zeros_like(whole["value"])
    for rows in sequences_of(batch):
        for start, stop in rows.documents:
            part = {name: x[rows.start : rows.stop, start:stop] for name, x in inputs.items()}
            out[rows.start : rows.stop, start:stop] = _running_sum(part, {"skip": parameter})
    out.backward(dout)
    grads = {name: x.grad for name, x in inputs.items() if x.grad is not None}
    assert parameter.grad is not None
    return out, {**grads, "skip": parameter.grad}


def _state_space(inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mamba-2 token by token: [B, n, H, P], and the last state [B, H, P, N]."""
    x, write, read = inputs["x"], *(_for_each_head(inputs[name], inputs["x"].shape[2]) for name in ("write", "read"))
    state, out = torch.zeros(*x.shape[:1], *x.shape[2:], write.shape[-1], dtype=x.dtype), []
    left = _log_decay(inputs, parameters).exp()
    for token in range(x.shape[1]):
        state = left[:, token, :, None, None] * state + x[:, token, :, :, None] * write[:, token, :, None]
        out.append((state * read[:, token, :, None]).sum(-1) + parameters["skip"][:, None] * x[:, token])
    return torch.stack(out, 1), state.mT.contiguous().mT  # in another order of memory, as kernels may leave it


def _for_each_head(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[2], 2)


def _log_decay(inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    return -inputs["step"] * parameters["rate"].exp()


def _check_passed_states(case: Case, replica: Replica, batch: BatchLayout, rng: random.Random) -> None:
    groups = rng.choice([1, 2])
    heads = groups * rng.choice([1, 3])
    torch.manual_seed(rng.randrange(2**31))
    shape = (case.batch_size, case.length)
    whole = {
        "x": torch.randn(*shape, heads, 3, dtype=torch.float64),
        "step": 0.2 * torch.rand(*shape, heads, dtype=torch.float64),
        "write": torch.randn(*shape, groups, 2, dtype=torch.float64),
        "read": torch.randn(*shape, groups, 2, dtype=torch.float64),
    }
    parameters = {name: torch.randn(heads, dtype=torch.float64) for name in ("rate", "skip")}
    dout = torch.randn_like(whole["x"])
    mine = torch.tensor(case.placement.positions(replica.rank), dtype=torch.int64)
    leaves = [{name: x.clone().requires_grad_() for name, x in each.items()} for each in (whole, parameters)]
    expected = torch.zeros_like(whole["x"])
    for rows in sequences_of(batch):
        for start, stop in rows.documents:
            part = {name: x[rows.start : rows.stop, start:stop] for name, x in leaves[0].items()}
            expected[rows.start : rows.stop, start:stop] = _state_space(part, leaves[1])[0]
    expected.backward(dout)
    inputs = {name: x[:, mine].clone().requires_grad_() for name, x in whole.items()}
    own = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    passed = PassedState(reader="read", log_decay=_log_decay, compute=_state_space)
    call = Scan(
        inputs=inputs,
        output_like="x",
        parameters=own,
        compute=lambda inputs, parameters: _state_space(inputs, parameters)[0],
        passed_state=passed,
    )
    in_double = mock.patch.object(torch, "float32", torch.float64)  # states are sent in float32 else
    with in_double:
        out = pass_states(call, passed, replica, batch, UNTIMED)
        out.backward(dout[:, mine])
    torch.testing.assert_close(out, expected[:, mine], rtol=1e-12, atol=1e-12)
    for name, x in inputs.items():
        torch.testing.assert_close(x.grad, leaves[0][name].grad[:, mine], rtol=1e-12, atol=1e-11, msg=name)
    for name, parameter in own.items():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, leaves[1][name].grad, rtol=1e-12, atol=1e-11, msg=name)


def _check_convolution(case: Case, replica: Replica, batch: BatchLayout, rng: random.Random) -> None:
    size = rng.choice([1, 2, 4, 7])
    torch.manual_seed(rng.randrange(2**31))
    whole = torch.randn(case.batch_size, 3, case.length, dtype=torch.float64)
    weight, bias = torch.randn(3, 1, size, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    dout = torch.randn_like(whole)
    mine = torch.tensor(case.placement.positions(replica.rank), dtype=torch.int64)

    def compute(x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, weight, bias, padding=size - 1, groups=3)[:, :, : x.shape[2]]

    x = whole.clone().requires_grad_()
    expected = torch.zeros_like(whole)
    for rows in sequences_of(batch):
        for start, stop in rows.documents:
            expected[rows.start : rows.stop, :, start:stop] = compute(x[rows.start : rows.stop, :, start:stop])
    expected.backward(dout)
    assert x.grad is not None
    own = whole[:, :, mine].clone().requires_grad_()
    out = convolution(own, size, compute, replica, batch)
    out.backward(dout[:, :, mine])
    torch.testing.assert_close(out, expected[:, :, mine], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, x.grad[:, :, mine], rtol=1e-12, atol=1e-12)
