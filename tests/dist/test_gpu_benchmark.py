"""The GPU benchmark's logic, on the CPU at tiny sizes: every table has its rows, and results are right."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import gpu, gpu_steps

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


@pytest.mark.parametrize("benchmark", [gpu, gpu_steps])
def test_without_a_gpu_the_benchmark_exits_with_a_message(capsys, benchmark):
    if torch.cuda.is_available():
        return
    assert benchmark.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_steps_that_were_measured_are_predicted_again(tmp_path, capsys):
    file = tmp_path / "steps.json"
    measured = json.loads(gpu_steps.RESULT.read_text())
    for row in measured["jobs"]:
        row.pop("predicted_s", None)
    file.write_text(json.dumps(measured))
    assert gpu_steps.main(["--predict", str(file)]) == 0
    adapters = [row for row in json.loads(file.read_text())["jobs"] if "LoRA" in row["name"]]
    assert len(adapters) == 2
    assert all(row["predicted_s"] == pytest.approx(row["step_s"], rel=0.05) for row in adapters)
    assert "7 predictions" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "given"), [(5, 2), (2, 5), (6, 3)])
def test_what_would_arrive_is_filled_with_own_numbers(size, given):
    out, own = torch.full((size,), torch.nan), torch.arange(1.0, given + 1)
    gpu_steps._fill(out, own)
    assert out.tolist() == [own[i % given] for i in range(size)]
