"""What lets messages of a ring travel beside attention: groups of high priority, and kernels that leave them SMs."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hetero.runtime import process_groups
from ds_hetero.runtime.attention import lane_passes
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.baselines import proportional, ulysses
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

LENGTH, HEAD_DIM = 60, 8


class _Options:
    """Stands in for ``ProcessGroupNCCL.Options``, which torch for CPUs lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(seconds=600)


def test_the_stand_in_takes_what_torchs_options_take() -> None:
    """By torch's own stub, which describes builds with NCCL, too."""
    stub = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}

    nested = (node for node in classes["ProcessGroupNCCL"].body if isinstance(node, ast.ClassDef))
    options = next(node for node in nested if node.name == "Options")
    (init,) = (node for node in options.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [argument.arg for argument in init.args.args] == ["self", "is_high_priority_stream"]


@pytest.mark.parametrize(
    ("backend", "overlaps", "is_urgent"), [("nccl", True, True), ("nccl", False, False), ("gloo", True, False)]
)
def test_only_nccl_groups_that_overlap_have_streams_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, backend: str, overlaps: bool, is_urgent: bool
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(process_groups, "backend_of", lambda: backend)
    monkeypatch.setattr(process_groups, "timeout_of_job", lambda: timedelta(seconds=77))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)  # in no group, so that none of them is used
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options) or object())
    groups = ProcessGroups()
    assert groups.of([0, 1], overlaps=overlaps) is groups.of([1, 0])
    (options,) = made
    assert options["timeout"] == timedelta(seconds=77)
    assert ("pg_options" in options) is is_urgent
    if is_urgent:
        assert options["pg_options"].is_high_priority_stream
        assert options["pg_options"]._timeout == options["timeout"]  # torch warns of others


def test_a_ring_asks_for_priority_and_an_all_to_all_does_not() -> None:
    run_ranks(_check_groups, 4, strict=True)


def _check_groups(rank: int) -> None:
    asked: dict[tuple[tuple[int, ...], str], bool] = {}
    of = ProcessGroups.of

    def recorded(self: ProcessGroups, ranks: Any, purpose: str = "", **options: Any) -> Any:
        asked[tuple(sorted(ranks)), purpose] = options.get("overlaps", False)
        return of(self, ranks, purpose, **options)

    with mock.patch.object(ProcessGroups, "of", recorded):
        make_replica(Plan.of_replicas([ulysses(4, 4, 4)]))
        assert not any(asked.values())
        asked.clear()
        make_replica(Plan.of_replicas([proportional((4, 3, 2, 1), 4, 4)]))
        everyone = (0, 1, 2, 3)  # the strict group counts every rank as a node
        assert asked == {(everyone, purpose): True for purpose in ("", "between nodes", "ring colour 1")}
        asked.clear()
        groups = (Group(ranks=(0, 1), tokens=(2, 1), heads=(3, 1)), Group(ranks=(2, 3), tokens=(1, 1), heads=(2, 2)))
        make_replica(Plan.of_replicas([Schedule(num_heads=4, num_kv_heads=4, groups=groups)]))
        rings = {(everyone, purpose): True for purpose in ("", "between nodes")}
        assert asked == {**rings, ((0, 1), ""): False, ((2, 3), ""): False}


class _Marked(TorchKernel):
    """The kernel of blocks beside messages; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0, 0]

    def forward(self, *arguments: Any) -> Any:
        self.calls[0] += 1
        return super().forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.calls[1] += 1
        return super().backward(*arguments)


@pytest.mark.parametrize("strict", [True, False], ids=["NCCL's rules", "gloo"])
def test_blocks_leave_sms_only_while_messages_travel(strict: bool) -> None:
    """A ring of three: in its last forward step nothing travels; in each backward step keys or gradients do."""
    for forward, backward, all_forward, all_backward in run_ranks(_check_margin, 3, strict=strict):
        if strict:
            assert 0 < forward < all_forward and backward == all_backward > 0
        elif not forward:  # STRICT_GROUP=1 makes all ranks keep NCCL's rules
            assert backward == 0


def _check_margin(rank: int) -> tuple[int, int, int, int]:
    schedule = proportional((3, 2, 1), 4, 2)
    replica = make_replica(Plan.of_replicas([schedule]))
    placement = stream_placement(schedule, LENGTH).with_rows((Rows(0, 1, ((0, LENGTH),)),))
    torch.manual_seed(rank)
    q = torch.randn(1, 4, placement.tokens(rank), HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(1, 2, q.shape[2], HEAD_DIM, requires_grad=True) for _ in range(2))
    plain, marked = _Marked(), _Marked()
    layout = batch_layout(placement, placement.rows)
    with mock.patch.object(lane_passes, "beside_messages", lambda kernel: marked):
        attention(q, k, v, replica, layout, AttentionSpec(plain)).sum().backward()
    totals = [ours + others for ours, others in zip(plain.calls, marked.calls, strict=True)]
    return *marked.calls, *totals  # type: ignore[return-value]
