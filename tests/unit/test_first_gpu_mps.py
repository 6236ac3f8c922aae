"""MPS in the first GPU run: its daemon, and the parts that must not run by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_gpu import mps
from benchmarks.first_gpu.parts import Part
from benchmarks.first_gpu.plan import SECTIONS
from benchmarks.first_gpu.record import parts_of


def _stand_in(folder: Path, script: str = "exit 0") -> str:
    """A control command that notes what it is told, by arguments or by its input."""
    command = folder / mps.COMMAND
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\ncat >> {folder}/told\n{script}\n')
    command.chmod(0o755)
    return str(command)


def _told(folder: Path) -> list[str]:
    return (folder / "told").read_text().split()


def test_a_daemon_is_started_and_ended_by_its_own_pipe(tmp_path: Path) -> None:
    variables = mps.start(_stand_in(tmp_path), tmp_path)
    assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert _told(tmp_path) == ["-d"]
    assert mps.stop(variables)
    assert _told(tmp_path) == ["-d", "quit"]


@pytest.mark.parametrize(
    ("script", "said"), [("echo no driver; exit 1", "no driver"), ("exec sleep 60", "did not end")]
)
def test_a_command_that_does_not_start_a_daemon_says_why(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_START_S", 0.5)
    monkeypatch.setattr(mps, "_STOP_S", 0.5)
    with pytest.raises(mps.MpsError, match=said):
        mps.start(_stand_in(tmp_path, script), tmp_path)


def test_where_no_daemon_was_started_none_is_ended() -> None:
    assert not mps.stop({})


def test_parts_in_which_a_rank_is_killed_run_without_mps() -> None:
    """MPS's processes share a server, which may end all of them with one."""

    def is_killed(part: Part) -> bool:
        return part.name == "self-test" or bool({"timed out", "failed"} & set(part.outcomes))

    by_name = {part.name: part for _, part in parts_of(SECTIONS) if is_killed(part)}
    assert {"lost rank", "pipeline as before", "used by some first", "self-test"} <= set(by_name)
    assert all(part.without_mps for part in by_name.values())
