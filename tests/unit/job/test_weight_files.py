"""Files of weights that cannot be written are named, in words of the file system, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_hetero.errors import CheckpointError
from ds_hetero.job.weight_files import make_folder, write_index, write_text, write_weights
from tests.file_limits import small_files

WEIGHTS = {"layer.weight": torch.arange(4096.0).view(64, 64).t()}


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    calls = {
        "weights.safetensors": lambda path: write_weights(path, WEIGHTS),
        "config.json": lambda path: write_text(path, "x" * 2000),
        "model.safetensors.index.json": lambda path: write_index(path.parent, {"a" * 2000: "f"}, 1),
    }
    for name, write in calls.items():
        with pytest.raises(CheckpointError, match=rf"{name} cannot be written: .*File too large"), small_files():
            write(tmp_path / name)


def test_a_folder_under_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/folder cannot be written: .*Not a directory"):
        make_folder(tmp_path / "file" / "folder")


def test_weights_come_back_whatever_their_layout_in_memory(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors", WEIGHTS)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["layer.weight"], WEIGHTS["layer.weight"])
