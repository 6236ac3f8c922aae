"""The manifest of a checkpoint is read as it was written, and damage in it is named. Budget: 1 s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hetero.errors import CheckpointError
from ds_hetero.job.manifest import MANIFEST, Manifest, SavedFile, read_manifest

LOSSES = {"unit_is_found": True, "unit": "label_mean", "of_micro_batches": ["NllLossBackward0"]}


@pytest.mark.parametrize("losses", [None, LOSSES])
def test_a_manifest_is_read_as_it_was_written(losses: dict[str, Any] | None, tmp_path: Path) -> None:
    manifest = Manifest(step=3, save_id="ab", parts={"a.pt": SavedFile(size_bytes=5, crc32=7)}, losses=losses)
    text = manifest.to_json()
    assert ("losses" in json.loads(text)) == (losses is not None)
    (tmp_path / MANIFEST).write_text(text)
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize("losses", [3, {}, {"of_micro_batches": 3}])
def test_damaged_losses_are_named(losses: Any, tmp_path: Path) -> None:
    content = json.loads(Manifest(step=3, save_id="ab").to_json())
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "losses": losses}))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(tmp_path)
