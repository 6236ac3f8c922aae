"""The trace is one by Chrome's published format, a reader opens it, and its spans add up to the prediction."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from ds_hetero.reporting.pipelines_sections import predict_pipelines
from ds_hetero.reporting.trace import trace_of
from ds_hetero.runtime.step_clock import RANGE_PREFIX
from tests.reported import command, described, plan_file, run_of

# What the engine names its ranges; tests/integration/job/test_run_file.py has those of a job.
ENGINE = {"forward", "backward", "step", "attention", "attention_backward", "ring_wait", "gather_sequence"}
ENGINE |= {"gather_output_heads", "loss", "scatter_output", "ring_finish"}
ONLY_PREDICTED = {"model", "model_backward", "ring"}  # a profiler has no range for what is between two others


def _expect_chrome_format(trace: dict[str, Any]) -> None:
    """The rules of "Trace Event Format" for what is used: complete and metadata events in the object form."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            (key,) = event["args"]
            assert key == {"process_sort_index": "sort_index"}.get(event["name"], "name")
            continue
        assert event["ph"] == "X" and isinstance(event["cat"], str) and event["ts"] >= 0 and event["dur"] >= 0
        open_until = stacks[event["pid"], event["tid"]]
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        if open_until:  # events of one thread nest
            assert event["ts"] + event["dur"] <= open_until[-1] + 1e-3
        open_until.append(event["ts"] + event["dur"])


def _leaves_s(trace: dict[str, Any], pid: int) -> float:
    """Seconds of the innermost spans of the thread that computes."""
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, 0)]
    return sum(e["dur"] for e in spans if e["name"].removeprefix(RANGE_PREFIX) not in ("forward", "backward")) / 1e6


@pytest.mark.parametrize("options", [(), ("--micro-batches", 3, "--no-checkpointing"), ("--cost-model", "published")])
def test_spans_add_up_to_the_predicted_step(capsys, tmp_path, options):
    path = plan_file(capsys, tmp_path, *options)
    out = tmp_path / "predicted.json"
    code, said, err = command(capsys, "trace", path, "--out", out)
    assert code == 0 and "Perfetto" in said, err
    trace = json.loads(out.read_text())
    _expect_chrome_format(trace)
    plan = described(path)
    predicted_s = plan.cost_of(0).predict(plan.schedule_of(0)).iteration_s
    for rank in range(4):
        assert _leaves_s(trace, rank) == pytest.approx(predicted_s, rel=1e-9)
        calls = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 0]
        outer = [e for e in calls if e["name"].removeprefix(RANGE_PREFIX) in ("forward", "loss", "backward", "step")]
        assert sum(e["dur"] for e in outer) / 1e6 == pytest.approx(predicted_s, rel=1e-9)
    names = {e["name"].removeprefix(RANGE_PREFIX) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert names <= ENGINE | ONLY_PREDICTED and {"forward", "backward", "attention_backward"} <= names


def test_measured_ranks_stand_below_the_predicted_ones(capsys, tmp_path):
    path = plan_file(capsys, tmp_path)
    run = run_of(described(path), tmp_path / "run.json")
    out = tmp_path / "both.json"
    assert command(capsys, "trace", path, "--run", tmp_path / "run.json", "--out", out)[0] == 0
    trace = json.loads(out.read_text())
    _expect_chrome_format(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    shown = [names[pid] for pid in sorted(order, key=order.__getitem__)]
    assert shown[:2] == ["predicted: rank 0 (RTX-4090)", "measured: rank 0 (RTX-4090)"] and len(shown) == 8
    measured = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 4]
    assert [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in measured[:1]] == [
        ("ds_hetero.forward", 0.0, pytest.approx(0.45 * run.step_s))
    ]
    assert {e["name"] for e in measured} == {name for name, _, _ in run.trace[0]}


@pytest.mark.parametrize("cost_model", ["calibrated", "hexiscale"])
def test_spans_of_pipelines_add_up_to_the_predicted_step(capsys, tmp_path, cost_model):
    options = ("--parallel", "full", "--global-batch", 16, "--seq-len", 4096, "--cost-model", cost_model)
    plan = described(plan_file(capsys, tmp_path, *options))
    assert plan.num_replicas == 0
    trace = trace_of(plan)
    _expect_chrome_format(trace)
    for rank in plan.plan.ranks:
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        assert sum(e["dur"] for e in spans) / 1e6 == pytest.approx(predict_pipelines(plan).finished.step_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # pandas' about the reader's own code
def test_holistic_trace_analysis_reads_it(capsys, tmp_path):
    """The reader that is made for traces of torch.profiler; it rounds times down to whole microseconds."""
    pytest.importorskip("hta", reason="install.sh test installs HolisticTraceAnalysis")
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.parser_config import ParserConfig

    path = plan_file(capsys, tmp_path)
    run_of(described(path), tmp_path / "run.json")
    out = tmp_path / "both.json"
    assert command(capsys, "trace", path, "--run", tmp_path / "run.json", "--out", out)[0] == 0
    spans = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    _, frame, symbols = parse_trace_dataframe(str(out), ParserConfig.get_default_cfg())[:3]
    assert len(frame) == len(spans)
    assert {event["name"] for event in spans} <= set(symbols.get_sym_table())
    assert frame["dur"].sum() == pytest.approx(sum(event["dur"] for event in spans), abs=2 * len(spans))
