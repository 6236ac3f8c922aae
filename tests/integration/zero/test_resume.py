"""A resumed job draws what one run draws; a checkpoint of another ZeRO stage is refused as such. Budget: 20 s."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.models.test_features import start
from tests.integration.tiny import collate, llama, samples
from tests.support import run_deepspeed


def test_dropout_goes_on_as_in_one_run_and_another_stage_is_named(tmp_path: Path) -> None:
    logs = run_deepspeed(_resume, 2, str(tmp_path))
    assert logs[1] == []
    (told,) = logs[0]
    assert "has the random states of 1 ranks, but this job has 2 ranks: dropout and shuffling draw" in told


def _begin(stage: int, seed: int) -> tuple[Any, Any]:
    """Engine and loader of a model with dropout."""
    from transformers import set_seed

    model = llama()
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.3))
    handle, engine = start(model, stage=stage)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(samples(10), 2, shuffle=True, generator=generator, collate_fn=collate)
    sharded = handle.for_engine(engine).dataloader(loader, batches="same")
    set_seed(seed + torch.distributed.get_rank())
    return engine, sharded


def _train(engine: Any, loader: Any, epochs: int, folder: str = "", stop: int = 0) -> list[float]:
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == stop:
                engine.save_checkpoint(folder, "t", client_state={"loader": loader.state_dict()})
    return losses


def _resume(rank: int, folder: str) -> list[str]:
    from ds_hetero.errors import CheckpointError
    from ds_hetero.frameworks.deepspeed.random_states import restore_random_states
    from ds_hetero.job.manifest import Manifest, read_manifest

    for stage in (1, 3):
        engine, loader = _begin(stage, 1)
        whole = _train(engine, loader, 2, f"{folder}/{stage}", stop=7)
        again, loader = _begin(stage, 2)
        _, client_state = again.load_checkpoint(f"{folder}/{stage}", "t")
        loader.load_state_dict(client_state["loader"])
        assert _train(again, loader, 1) == whole[7:]
        if stage == 1:
            below = again
    for engine, other, saved in ((below, 3, "stage 3"), (again, 1, "a stage below 3")):
        with pytest.raises(
            CheckpointError, match=f"t was saved at ZeRO {saved}, and this job runs stage {4 - other}, wh"
        ):
            engine.load_checkpoint(f"{folder}/{other}", "t")

    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hetero.frameworks.deepspeed.random_states").addHandler(handler)
    manifest = read_manifest(Path(folder, "1", "t"))
    assert manifest is not None
    parts = {name: part for name, part in manifest.parts.items() if name != "ds_hetero_random_states_1.pt"}
    assert len(parts) < len(manifest.parts)
    restore_random_states(Path(folder, "1", "t"), Manifest(step=7, save_id=manifest.save_id, parts=parts))
    return logs
