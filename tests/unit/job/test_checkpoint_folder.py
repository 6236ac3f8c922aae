"""Why a part of a checkpoint could not be written, in words of the file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_hetero.job.checkpoints import write_failure_reason
from tests.file_limits import small_files

TORN = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # torch.save, disk full


def test_the_error_of_the_file_system_in_the_chain_counts(tmp_path: Path) -> None:
    error = RuntimeError("writer")
    error.__cause__ = OSError(28, "No space left on device")
    assert write_failure_reason(tmp_path / "part", error) == "[Errno 28] No space left on device"


@pytest.mark.parametrize("name", ["", "part"])
def test_the_file_system_is_asked_again(name: str, tmp_path: Path) -> None:
    with small_files():
        reason = write_failure_reason(tmp_path / name, TORN)
    assert reason.endswith("File too large")


def test_a_part_cut_short_is_told_without_the_words_of_cpp(tmp_path: Path) -> None:
    assert write_failure_reason(tmp_path / "part", TORN).startswith("the file system took a part of it only")


def test_any_other_error_is_told_as_it_is(tmp_path: Path) -> None:
    assert write_failure_reason(tmp_path / "part", TypeError("cannot pickle")) == "TypeError: cannot pickle"
