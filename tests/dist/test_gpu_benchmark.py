"""The GPU benchmark's logic, on the CPU at tiny sizes: every table has its rows, and results are right."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import gpu

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay


def test_every_table_has_its_rows_and_right_results():
    sizes = gpu.Sizes(
        tokens=(256,),
        heads=((4, 4), (4, 2)),
        head_dims=(16,),
        ring_tokens=(256,),
        ring_sizes=(2, 3),
        packing_tokens=64,
        packing_ranks=2,
        checked_tokens=101,
    )
    tables = gpu.measure(torch.device("cpu"), torch.float32, sizes, time.perf_counter() + 60)
    assert all(row["right"] for row in tables["correctness"])
    assert max(row[name] for row in tables["correctness"] for name in ("out", "dq", "dk", "dv")) < 1e-5
    assert {row["what"] for row in tables["ring"]} == {"ring of 2, kernel torch", "ring of 3, kernel torch"}
    assert all(row["both_of_best"] > 0 for row in tables["kernels"] + tables["ring"])
    assert all(row["gather_of_copy"] > 0 for row in tables["packing"])


def test_measurements_left_out_for_lack_of_time_are_named():
    sizes = gpu.Sizes(tokens=(8,), heads=((2, 2),), head_dims=(16,), ring_tokens=(), ring_sizes=(), packing_tokens=8)
    sizes = gpu.Sizes(**{**vars(sizes), "packing_ranks": 2, "checked_tokens": 9})
    tables = gpu.measure(torch.device("cpu"), torch.float32, sizes, time.perf_counter() - 1)
    assert [row["what"] for row in tables["kernels"]] == ["left out: no time left"]


def test_without_a_gpu_the_benchmark_exits_with_a_message(capsys):
    if torch.cuda.is_available():
        return
    assert gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
