"""Why a part of a checkpoint could not be written, in words of the file system."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_hetero.job.checkpoint_folder import why_not_written

TORN = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # torch.save, disk full


@contextmanager
def _small_files() -> Iterator[None]:
    """Bound every file of this process, pytest's own output among them: around one call only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_error_of_the_file_system_in_the_chain_counts(tmp_path: Path) -> None:
    error = RuntimeError("writer")
    error.__cause__ = OSError(28, "No space left on device")
    assert why_not_written(tmp_path / "part", error) == "[Errno 28] No space left on device"


@pytest.mark.parametrize("name", ["", "part"])
def test_the_file_system_is_asked_again(name: str, tmp_path: Path) -> None:
    with _small_files():
        reason = why_not_written(tmp_path / name, TORN)
    assert reason.endswith("File too large")


def test_a_part_cut_short_is_told_without_the_words_of_cpp(tmp_path: Path) -> None:
    assert why_not_written(tmp_path / "part", TORN).startswith("the file system took a part of it only")


def test_any_other_error_is_told_as_it_is(tmp_path: Path) -> None:
    assert why_not_written(tmp_path / "part", TypeError("cannot pickle")) == "TypeError: cannot pickle"
