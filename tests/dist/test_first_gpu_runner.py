"""The runner of the first GPU run: what becomes of parts that hang, raise, die or have no time. Budget: 40 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.first_gpu.__main__ import main
from benchmarks.first_gpu.crew import Settings
from benchmarks.first_gpu.parts import Context, Part, Section
from benchmarks.first_gpu.record import NOT_REACHED, Record
from benchmarks.first_gpu.runner import Runner
from benchmarks.first_gpu.sections import more_ranks
from tests.support import ROOT

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay


def _parts(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{entry['section']}: {entry['part']}": entry for entry in result["parts"]}


def _report_and_return(context: Context) -> None:
    context.report({"figure": 1})


def _report_and_hang(context: Context) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.report({"figure": 2, "child": child.pid, "own": os.getpid()})
    time.sleep(600)


def _report_and_raise(context: Context) -> None:
    context.report({"figure": 3})
    raise ValueError("planted")


def _report_and_die(context: Context) -> None:
    context.report({"figure": 4})
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_the_other(context: Context) -> None:
    """Rank 1 raises before the collective in which rank 0 waits."""
    context.join()
    if context.rank == 1:
        raise ValueError("planted on rank 1")
    dist.all_reduce(torch.ones(1))


def _say_one_rank(context: Context) -> None:
    context.report({"one_rank": "NCCL refuses"})


def _report_variables(context: Context) -> None:
    context.report({"env": {"PLANTED_VARIABLE": "yes"}})


def _report_planted_variable(context: Context) -> None:
    context.report({"seen": os.environ.get("PLANTED_VARIABLE")})


def _report_daemon(context: Context) -> None:
    command = context.folder / "control"
    command.write_text(f"#!/bin/sh\ncat >> {context.folder}/told\n")
    command.chmod(0o755)
    context.report({"env": {"FIRST_GPU_MPS": str(command)}})


def _fail_by_mps(context: Context) -> None:
    if "FIRST_GPU_MPS" in os.environ:
        raise RuntimeError("no server")


def _report_whether_by_mps(context: Context) -> None:
    context.report({"by_mps": "FIRST_GPU_MPS" in os.environ})


class _InterruptedRecord(Record):
    """Of a run that the user ends when a part has reported something."""

    interrupts_at = ""

    def add(self, section: Section, part: Part, row: dict[str, Any]) -> None:
        super().add(section, part, row)
        if part.name == self.interrupts_at:
            raise KeyboardInterrupt


def _compute_on(context: Context) -> None:
    context.report({"pid": os.getpid(), "rank_said": int(os.environ["RANK"])})


def _planted(*parts: Part) -> tuple[Section, ...]:
    return (Section(name="planted", budget_s=100, decides="nothing", parts=parts),)


def _run(tmp_path: Path, *parts: Part, budget: float = 100.0) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "planted.json"
    code = main(["--rehearse", "--budget", str(budget), "--output", str(output)], _planted(*parts))
    return code, json.loads(output.read_text())


def test_a_part_that_hangs_is_ended_with_what_it_started_and_the_rest_goes_on(tmp_path: Path) -> None:
    hangs = Part(name="hangs", run=_report_and_hang, limit_s=1.5)
    code, result = _run(tmp_path, hangs, Part(name="goes on", run=_report_and_return, limit_s=20))
    assert code == 1
    entry = _parts(result)["planted: hangs"]
    assert entry["outcome"] == "timed out"
    assert entry["rows"][0]["figure"] == 2
    assert "_report_and_hang" in "".join(entry["outputs"].values()), "no stack of the part that hung"
    assert not Path(f"/proc/{entry['rows'][0]['child']}/cwd").exists(), "what the part started is still there"
    assert _parts(result)["planted: goes on"]["outcome"] == "done"


def test_a_process_that_cannot_be_killed_is_named_and_waited_for_no_longer(tmp_path: Path, monkeypatch: Any) -> None:
    """As one in the kernel, in a driver that does not answer."""
    from benchmarks.first_gpu import crew

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    part = Part(name="hangs", run=_report_and_hang, limit_s=20)
    hangs = crew.Crew(part, Settings(rehearsal=True, preload=("torch",)), tmp_path / "hangs", 20.0)
    process = hangs._processes[0]
    stays = mock.Mock(pid=process.pid, is_alive=lambda: True, join=lambda timeout: None)  # without a limit: TypeError
    hangs._processes[0] = stays
    try:
        hangs.end()
    finally:
        process.kill()
        process.join()
    assert hangs.outcome is not None
    assert hangs.outcome.name == "timed out"
    assert hangs.outcome.why.endswith("\nrank 0 could not be killed")


def test_standing_still_is_no_fault_of_a_part_whose_result_it_is(tmp_path: Path) -> None:
    code, result = _run(tmp_path, Part(name="hangs", run=_report_and_hang, limit_s=1.0, outcomes=("done", "timed out")))
    assert code == 0
    assert _parts(result)["planted: hangs"]["outcome"] == "timed out"


@pytest.mark.parametrize(
    ("run", "ranks", "said"),
    [
        (_report_and_raise, 1, "ValueError: planted"),
        (_report_and_die, 1, "signal SIGKILL"),
        (_wait_for_the_other, 2, "rank 1: Traceback"),
    ],
    ids=["raises", "dies", "raises on one rank while the other waits"],
)
def test_a_part_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path, run: Any, ranks: int, said: str) -> None:
    fails = Part(name="fails", run=run, ranks=ranks, limit_s=30)
    code, result = _run(tmp_path, fails, Part(name="goes on", run=_report_and_return, limit_s=20))
    assert code == 1
    entry = _parts(result)["planted: fails"]
    assert entry["outcome"] == "failed"
    assert said in entry["why"]
    assert entry["seconds"] < 20
    assert _parts(result)["planted: goes on"]["rows"] == [{"figure": 1}]


def test_what_a_newer_torch_is_needed_for_is_left_out_by_name(tmp_path: Path) -> None:
    needs = Part(name="needs", run=_report_and_return, limit_s=20, needs=("torch.distributed.all_gather_in_2_99",))
    code, result = _run(tmp_path, needs)
    entry = _parts(result)["planted: needs"]
    assert (code, entry["outcome"]) == (0, "left out")
    assert entry["why"] == "this release of torch lacks torch.distributed.all_gather_in_2_99"


def test_parts_of_several_ranks_are_left_out_where_nccl_refuses_them_on_one_card(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from benchmarks.first_gpu import runner

    monkeypatch.setattr(runner, "_PROBE", Part(name="start", run=_say_one_rank, limit_s=20))
    parts = [
        Part(name="two ranks", run=_wait_for_the_other, ranks=2, limit_s=20),
        Part(name="apart", run=_report_and_return, ranks=2, limit_s=20, communicates=False),
        Part(name="one rank", run=_report_and_return, limit_s=20),
    ]
    code, result = _run(tmp_path, *parts)
    assert code == 0
    assert [entry["outcome"] for entry in result["parts"]] == ["left out", "done", "done"]
    assert result["parts"][0]["why"] == "NCCL refuses"


def test_variables_that_a_part_reports_are_those_of_later_parts_that_may_run_by_mps(tmp_path: Path) -> None:
    parts = [
        Part(name="starts", run=_report_variables, limit_s=20),
        Part(name="by it", run=_report_planted_variable, limit_s=20),
        Part(name="without", run=_report_planted_variable, limit_s=20, without_mps=True),
    ]
    _, result = _run(tmp_path, *parts)
    assert [entry["rows"][0].get("seen") for entry in result["parts"]] == [None, "yes", None]


def test_mps_that_no_process_can_use_is_ended_and_later_parts_run_without_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Its daemon forks with success, and its server fails with the first process, as in containers."""
    from benchmarks.first_gpu import runner

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(runner, "_PROBE", Part(name="start", run=_fail_by_mps, limit_s=20))
    starts = Part(name="starts", run=_report_daemon, limit_s=20)
    sections = _planted(starts, Part(name="after", run=_report_whether_by_mps, limit_s=20))
    record = Record("planted", sections, tmp_path / "planted.json", True)
    Runner(sections, record, tmp_path / "parts", Settings(rehearsal=True, preload=("torch",)), 100.0).run()
    entries = _parts(record.result)
    assert entries["planted: starts"]["rows"][1]["mps"] is False
    assert "no server" in entries["planted: starts"]["rows"][1]["why"]
    assert entries["planted: after"]["rows"] == [{"by_mps": False}]
    assert (tmp_path / "parts" / "planted" / "starts" / "told").read_text() == "quit\n"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_daemon_that_a_part_has_started_ends_with_the_run(
    tmp_path: Path, monkeypatch: Any, is_interrupted: bool
) -> None:
    """Whichever sections were chosen, and when the user ends it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    parts = [Part(name="starts", run=_report_daemon, limit_s=20)]
    sections = _planted(*parts, Part(name="goes on", run=_report_and_return, limit_s=20))
    record = _InterruptedRecord("planted", sections, tmp_path / "planted.json", True)
    run = Runner(sections, record, tmp_path / "parts", Settings(rehearsal=True, preload=("torch",)), 100.0).run
    if is_interrupted:
        record.interrupts_at = "goes on"
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        run()
    assert (tmp_path / "parts" / "planted" / "starts" / "told").read_text() == "quit\n"


def test_to_fail_before_anything_is_reported_is_no_result(tmp_path: Path) -> None:
    outcomes = ("failed", "left out")
    late = Part(name="late", run=_report_and_raise, limit_s=30, outcomes=outcomes)
    early = Part(name="early", run=_wait_for_the_other, ranks=2, limit_s=30, outcomes=outcomes)
    assert _run(tmp_path / "late", late)[0] == 0
    assert _run(tmp_path / "early", early)[0] == 1


def test_tensor_stages_are_left_out_where_torch_lacks_their_collective(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delattr(dist, "all_gather_single")  # as before torch 2.13
    output = tmp_path / "older.json"
    parts = tuple(part for part in more_ranks.SECTION.parts if part.needs)
    assert main(["--rehearse", "--output", str(output)], [replace(more_ranks.SECTION, parts=parts)]) == 0
    (entry,) = json.loads(output.read_text())["parts"]
    assert (entry["part"], entry["outcome"]) == ("tensor stage", "left out")
    assert entry["why"] == "this release of torch lacks torch.distributed.all_gather_single"


def test_a_section_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no section rings; there are planted"):
        main(["--rehearse", "--sections", "rings", "--output", str(tmp_path / "x.json")], _planted())


def test_a_run_without_time_names_what_it_has_left_out(tmp_path: Path) -> None:
    parts = [Part(name=name, run=_report_and_return, limit_s=20) for name in ("first", "second")]
    code, result = _run(tmp_path, *parts, budget=0.0)
    assert code == 0
    assert [entry["why"] for entry in result["parts"]] == ["no time left", "no time left"]


def test_a_part_in_a_new_interpreter_has_its_variables_before_its_imports(tmp_path: Path) -> None:
    part = Part(name="fresh", run=_compute_on, limit_s=60, rehearsed_fresh=True, rehearsed_env={"RANK": "7"})
    code, result = _run(tmp_path, part)
    assert code == 0
    assert _parts(result)["planted: fresh"]["rows"][0]["rank_said"] == 7


def test_forked_processes_that_cannot_use_the_device_are_started_anew(tmp_path: Path, monkeypatch: Any) -> None:
    from benchmarks.first_gpu import runner

    monkeypatch.setattr(runner, "_PROBE", Part(name="start", run=_report_and_raise, limit_s=20))
    code, result = _run(tmp_path, Part(name="goes on", run=_report_and_return, limit_s=60))
    assert (code, result["start_method"]) == (0, "spawn")
    assert _parts(result)["planted: goes on"]["rows"] == [{"figure": 1}]


def test_what_was_reported_before_a_kill_is_on_disk_and_no_process_is_left(tmp_path: Path) -> None:
    output = tmp_path / "killed.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-m", "tests.dist.test_first_gpu_runner", str(output)], cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 60
        while not (output.exists() and '"child"' in output.read_text()):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
    finally:
        run.kill()
        run.wait()
    entries = _parts(json.loads(output.read_text()))
    assert entries["planted: first"]["outcome"] == "done"
    assert entries["planted: first"]["rows"] == [{"figure": 1}]
    assert entries["planted: hangs"]["outcome"] == "running"
    assert entries["planted: last"]["outcome"] == NOT_REACHED
    assert "| planted | first |" in output.with_suffix(".md").read_text()
    hung = entries["planted: hangs"]["rows"][0]
    while any(Path(f"/proc/{hung[which]}/cwd").exists() for which in ("own", "child")):
        assert time.monotonic() < deadline, "processes of a part outlive the run"
        time.sleep(0.1)


def _run_until_killed(output: Path) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRITON_CACHE_DIR": str(output.parent / "triton")}
    parts = (
        Part(name="first", run=_report_and_return, limit_s=30),
        Part(name="hangs", run=_report_and_hang, limit_s=100),
        Part(name="last", run=_report_and_return, limit_s=30),
    )
    sections = _planted(*parts)
    settings = Settings(rehearsal=True, preload=("torch",))
    Runner(sections, Record("killed", sections, output, True), output.parent / "parts", settings, 100.0).run()


if __name__ == "__main__":
    _run_until_killed(Path(sys.argv[1]))
