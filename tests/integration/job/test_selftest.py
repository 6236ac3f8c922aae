"""``ds-hetero selftest`` passes what works, and ends with the rank and the call where something was planted.

Budget: 40 s; what differs by the number of ranks or by the call is marked slow.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.selftest import ranks
from ds_hetero.selftest.lines import Line, merge
from ds_hetero.selftest.ranks import check_ranks, trained_dtype_of
from ds_hetero.selftest.report import redacted
from ds_hetero.selftest.run import CHECKS as CHECKS_OF_RUN
from tests.support import run_deepspeed

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

CHECKS = ("ranks", "kernel torch", "uneven all_to_all", "uneven reduce_scatter", "training step, ZeRO-3")
OF_SEVERAL = (
    "ragged exchange",
    "ragged exchange, bfloat16",
    "ring",
    "ring, bfloat16",
    "documents with routes",
    "gradient sync",
    "training step, ZeRO-3 by weights, bfloat16",
    "training step, ZeRO-3 inside nodes, bfloat16",
    "pipeline step",
    "pipeline step, tied embedding",
    "uneven gather of ZeRO-3",
    "uneven reduce of ZeRO-3",
    "megabytes over communicators",
    "killed rank",
)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(1, ["--quick"], marks=pytest.mark.slow),
        (2, ["--quick"]),
        pytest.param(2, [], marks=pytest.mark.slow),
        pytest.param(4, ["--quick"], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_work_pass(world_size: int, options: list[str], tmp_path: Path) -> None:
    codes = run_deepspeed(_selftest, world_size, str(tmp_path), options)
    assert codes == [0] * world_size
    report = json.loads((tmp_path / "report.json").read_text())
    lines = {line["name"]: line for line in report["lines"]}
    assert report["healthy"] and len(report["ranks"]) == world_size
    assert {lines[name]["status"] for name in CHECKS} == {"pass"}
    assert set(CHECKS_OF_RUN) < set(report["seconds_of_checks"]) and sum(report["seconds_of_checks"].values()) > 0
    assert {line["status"] for line in lines.values()} <= {"pass", "skip", "info"}
    if world_size > 1:
        assert {lines[name]["status"] for name in OF_SEVERAL} == {"pass"}
        assert ("sub-rings" in lines) == (world_size == 4)
    if not options:
        assert {f"training step, ZeRO-{stage}" for stage in range(4)} <= set(lines)
        assert lines["training step, ZeRO-0, bfloat16"]["status"] == "pass"
    text = (tmp_path / "report.txt").read_text()
    assert "PASS" in text and os.uname().nodename not in text


@pytest.mark.slow
def test_measured_steps_stand_beside_predicted_ones(tmp_path: Path) -> None:
    """The same path as on GPUs; seconds of a shared machine mean nothing, so that only their presence is asserted."""
    assert run_deepspeed(_selftest, 2, str(tmp_path), ["--quick", "--measure"]) == [0, 0]
    text = (tmp_path / "report.json").read_text()
    report = json.loads(text)
    lines = {line["name"]: line for line in report["lines"]}
    for name in ("plan", "ring"):
        assert re.fullmatch(r"\S+ s predicted, \S+ measured: [+-]\d+ %", lines[f"step under {name}"]["detail"])
        assert "not measured on CPUs" in lines[f"memory under {name}"]["detail"]
    plan, ring = report["measured"]["steps"]
    assert [len(group["ranks"]) for group in ring["schedule"]["groups"]] == [1, 1]
    assert plan["measured_s"] > 0 and plan["ranks"][0]["predicted_bytes"] > 2**20
    assert [node["name"] for node in report["measured"]["profile"]["nodes"]] == ["node 0"]
    assert set(report["measured"]["profile"]["fit_errors"]) >= {"inside node 0", "all-to-all inside node 0"}
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text) and str(Path.home()) not in text


def _selftest(rank: int, folder: str, options: list[str], fault: str = "") -> int:
    from ds_hetero.cli import main

    if fault:
        FAULTS[fault](rank)
    if os.environ["WORLD_SIZE"] == "1":
        del os.environ["RANK"]  # a process without a launcher
    try:
        return main(["selftest", "--out", f"{folder}/report.txt", "--json", f"{folder}/report.json", *options])
    except SystemExit as end:
        return int(end.code or 0)


def _wrong_kernel(rank: int) -> None:
    from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel

    right = TorchKernel.forward
    if rank == 1:
        TorchKernel.forward = lambda self, *block: tuple(x * 1.01 for x in right(self, *block))  # type: ignore


def _replace_collective(name: str, replacement: Any) -> None:
    from ds_hetero.selftest import collectives

    collectives._COLLECTIVES[name] = replacement


def _sleeping_rank(rank: int) -> None:
    if rank == 1:
        _replace_collective("uneven broadcasts", lambda session: time.sleep(600))


def _late_rank(rank: int) -> None:
    from ds_hetero.selftest import run

    if rank == 1:
        run.CHECKS["collectives"] = lambda session: time.sleep(600)  # type: ignore


def _dead_rank(rank: int) -> None:
    if rank == 1:
        _replace_collective("uneven broadcasts", lambda session: os._exit(0))


def _told_to_end(rank: int) -> None:
    """The launcher has seen rank 1 fail, which other hosts cannot, and ends rank 0 with a signal."""
    if rank == 0:
        Path("pid").write_text(str(os.getpid()))
    else:
        _replace_collective("uneven broadcasts", _end_rank_0)


def _end_rank_0(session: object) -> None:
    time.sleep(0.5)  # rank 0 has come to the call too
    os.kill(int(Path("pid").read_text()), signal.SIGTERM)
    time.sleep(600)


def _wrong_size(rank: int) -> None:
    from ds_hetero.selftest import collectives

    right = collectives._part_sizes
    if rank == 0:  # sends more than the other expects; gloo lets the opposite pass
        collectives._part_sizes = lambda size: [count + (count == 3) for count in right(size)]  # type: ignore


def _late_teardown(rank: int) -> None:
    from ds_hetero.selftest import run

    run.CHECKS.clear()
    if rank == 1:
        run.dist.destroy_process_group = lambda: time.sleep(600)


FAULTS = {
    "wrong kernel": _wrong_kernel,
    "sleeping rank": _sleeping_rank,
    "late rank": _late_rank,
    "dead rank": _dead_rank,
    "told to end": _told_to_end,
    "wrong size": _wrong_size,
    "late teardown": _late_teardown,
}


def test_a_wrong_kernel_of_one_rank_is_named_and_the_test_goes_on(tmp_path: Path) -> None:
    assert run_deepspeed(_selftest, 2, str(tmp_path), ["--quick"], "wrong kernel") == [1, 1]
    lines = json.loads((tmp_path / "report.json").read_text())["lines"]
    by_ranks = {tuple(line["ranks"]): line for line in lines if line["name"] == "kernel torch"}
    assert by_ranks[0,]["status"] == "pass"
    assert by_ranks[1,]["status"] == "fail" and "of the largest value" in by_ranks[1,]["detail"]
    assert lines[-1]["name"].startswith("links")


@pytest.mark.parametrize(
    ("fault", "call", "said"),
    [
        (
            "sleeping rank",
            "uneven broadcasts",
            (r"did not end within 8 s", r"rank 1: has come to the call; its process is in <lambda> \(test_selftest.py"),
        ),
        pytest.param(
            "late rank",
            "all_reduce",
            (
                r"rank 0: has come to the call; its process is in ",
                r"rank 1: has not come to the call, its last one is ",
            ),
            marks=pytest.mark.slow,
        ),
        ("dead rank", "uneven broadcasts", (r"rank 1: has come to the call; its process has ended",)),
        pytest.param(
            "late teardown",
            "ending the process groups",
            (r"did not end within 8 s", r"rank 1: has come to the call; "),
            marks=pytest.mark.slow,
        ),
        ("told to end", "uneven broadcasts", (r"was told to end \(SIGTERM\), as launchers do when another rank",)),
        pytest.param(
            "wrong size",
            "uneven all_to_all",
            (r"rank [01]", r"has come to the call; its process is in"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_does_not_answer_ends_the_test_with_its_name(
    fault: str, call: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="died of exit code"):
        run_deepspeed(_selftest, 2, str(tmp_path), ["--quick", "--timeout-s", "8"], fault)
    lines = json.loads((tmp_path / "report.json").read_text())["lines"]
    (failed,) = [line for line in lines if line["status"] == "fail"]
    assert failed["name"] == call
    for pattern in said:
        assert re.search(pattern, failed["detail"]), failed["detail"]
    assert lines[-1]["name"] == "what comes after" and lines[-1]["status"] == "skip"


def test_lines_are_told_as_soon_as_they_are_known(tmp_path: Path) -> None:
    """Whoever ends a test that takes too long has what it has found so far."""
    file = tmp_path / "heard"
    with pytest.raises(AssertionError, match="died of exit code"):
        run_deepspeed(_selftest_that_hangs, 1, str(file))
    assert file.read_text().split("\n")[:-1] == ["ranks", "known", "hangs", "what comes after"]


def _selftest_that_hangs(rank: int, file: str) -> None:
    from ds_hetero.selftest import run

    def hear(line: Line) -> None:
        with Path(file).open("a") as heard:
            heard.write(f"{line.name}\n")

    def hang(session: run.Session) -> list[Line]:
        with session.watch.call("hangs"):
            assert Path(file).read_text() == "ranks\nknown\n"
            time.sleep(600)
        return []

    run.CHECKS.clear()
    run.CHECKS.update(known=lambda session: [Line("known", "pass")], hangs=hang)
    options = {"quick": True, "measure": False, "out": None, "as_json": None, "with_host_names": False}
    run.run(run.Options(limit_s=2.0, on_line=hear, **options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    codes = run_deepspeed(_selftest, 2, str(tmp_path), ["--timeout-s", "3"], env={"WORLD_SIZE": "3"})
    assert codes == [1, 1]
    (line,) = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert "rank 2 did not answer within 3 s (the start)" in line["detail"]


def test_cpus_among_gpus_are_refused() -> None:
    gpu: dict[str, Any] = {"type": "cuda", "environment": {}}
    with pytest.raises(ConfigError, match=r"rank 1 computes on a CPU and the others on GPUs"):
        check_ranks([gpu, {**gpu, "type": "cpu"}, gpu])
    with pytest.raises(ConfigError, match=r"rank 2: ConfigError: this rank's accelerator is XPU"):
        check_ranks([gpu, gpu, {"error": "ConfigError: this rank's accelerator is XPU"}])
    check_ranks([gpu, gpu])


def test_ranks_train_in_the_16_bit_type_that_all_have() -> None:
    ampere, turing = {"native_types": ["float32", "float16", "bfloat16"]}, {"native_types": ["float32", "float16"]}
    assert trained_dtype_of([ampere, ampere]) is torch.bfloat16
    assert trained_dtype_of([ampere, turing]) is torch.float16


def test_a_gpu_that_torch_has_no_code_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "default_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    described = ranks.describe_rank(with_host_name=False)
    with pytest.raises(ConfigError, match=r"rank 1: ConfigError: torch .* has no code for Tesla V100 \(sm_70\)"):
        check_ranks([{"type": "cuda", "environment": {}}, described])


def test_lines_of_ranks_are_put_together() -> None:
    good, bad = Line("a", "pass"), Line("a", "fail", "off")
    assert merge([[good], [good]]) == [Line("a", "pass", "")]
    assert merge([[good], [bad], [good]]) == [Line("a", "pass", ranks=(0, 2)), Line("a", "fail", "off", ranks=(1,))]


def test_a_report_has_no_private_data() -> None:
    text = f"{os.uname().nodename} [127.0.0.1]:1234 10.0.0.7:80 [fe80::1%eth0]:5 {Path.home()}/x torch 2.13.0 12.4.1.2x"
    clean = redacted(text)
    assert clean == "HOST ADDRESS ADDRESS ADDRESS ~/x torch 2.13.0 12.4.1.2x" or os.uname().nodename in ("", "a")
    assert torch.__version__ in redacted(torch.__version__)
