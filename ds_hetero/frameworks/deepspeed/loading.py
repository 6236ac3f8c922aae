"""Loading an engine's checkpoint: whole, of one save, and under any layout of its parts.

Everything goes through DeepSpeed's own files and methods. The functions here run around methods of the engine, see
`engine.HOOKS`. A fault in a checkpoint is raised on every rank with the same message.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.frameworks.deepspeed.saving import STAMP
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.frameworks.deepspeed.zero.stage12_checkpoint import read_shard
from ds_hetero.job.checkpoints import expect_finished, recover
from ds_hetero.job.manifest import Manifest, changed_parts, read_manifest
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)


def expect_one_save(engine: Engine, folder: Path, *, with_optimizer: bool) -> Manifest | None:
    """Check that all parts are of one save; return its manifest, if any. Raises `CheckpointError` on every rank.

    Args:
        with_optimizer: check the parts that only the optimizer's state is read from.

    Collectives: two `on_all_ranks`, none for universal checkpoints.
    """
    if engine.load_universal_checkpoint():
        return None
    on_all_ranks(lambda: _recover(folder) if dist.get_rank() == 0 else None)
    manifests: list[Manifest | None] = []

    def examine() -> tuple[_Save | None, dict[str, str]]:
        expect_finished(folder)
        manifest = read_manifest(folder)
        manifests.append(manifest)
        if manifest is None:
            return None, {}
        names = [name for name in sorted(manifest.parts) if with_optimizer or not name.endswith("optim_states.pt")]
        faults = changed_parts(folder, manifest, names[dist.get_rank() :: dist.get_world_size()])
        faults = {name: _of_another_save(folder / name, manifest) or fault for name, fault in faults.items()}
        return _Save(manifest.save_id, manifest.step), faults

    examined = on_all_ranks(examine)
    _expect_one(folder, [save for save, _ in examined])
    faults = {name: fault for _, of_rank in examined for name, fault in of_rank.items()}
    manifest = manifests[0]
    if manifest is not None and faults:
        listed = "; ".join(f"{name} {fault}" for name, fault in sorted(faults.items()))
        raise CheckpointError(
            f"the checkpoint {folder} is of step {manifest.step}, but {listed}. Put the parts of one save "
            "together, or load an earlier checkpoint."
        )
    if manifest is None and dist.get_rank() == 0:
        logger.warning(
            "the checkpoint %s has no manifest, as DeepSpeed alone and earlier versions of ds_hetero save it: whether "
            "its parts are undamaged and of one save is not checked",
            folder,
        )
    return manifest


class _Save(NamedTuple):
    """Identity of the save that a manifest belongs to."""

    save_id: str
    step: int


def _recover(folder: Path) -> None:
    try:
        recover(folder)
    except OSError as error:
        raise CheckpointError(
            f"the last save of {folder} was cut off between two renames, and finishing it fails: {error}."
        ) from error


def _expect_one(folder: Path, saves: Sequence[_Save | None]) -> None:
    """Refuse folders of one name that hold different saves, as on the disks of several nodes."""
    if len(set(saves)) > 1:
        listed = "; ".join(
            f"rank {rank}: {'no manifest' if save is None else f'step {save.step}'}" for rank, save in enumerate(saves)
        )
        raise CheckpointError(
            f"the ranks see different saves in {folder} ({listed}). Have all of them see the parts of one save."
        )


def _of_another_save(file: Path, manifest: Manifest) -> str | None:
    """Say of which step a part is that another save has written; None if this one has, or it cannot be read."""
    try:
        content = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
    except Exception:  # torch.load raises what it meets in the bytes
        return None
    stamp = content.get(STAMP, {}) if isinstance(content, dict) else {}
    if stamp.get("save_id") == manifest.save_id:
        return None
    step = stamp.get("step", content.get("global_steps") if isinstance(content, dict) else None)
    return "is of another save" if step is None else f"is of another save, of step {step}"


def raise_on_all_ranks(engine: Engine, load: Function, load_dir: str, tag: object, **kwargs: object) -> object:
    """Around ``_load_checkpoint``: fail on all ranks if any cannot load. Raises `CheckpointError`.

    Collectives: one `on_all_ranks`.
    """
    folder = Path(load_dir, str(tag))
    partitioned = engine.zero_optimization_partition_weights()  # then the ranks exchange messages while they load
    loaded: list[Any] = []

    def load_own_file() -> None:
        if not engine.load_universal_checkpoint():
            _expect_stage(folder, engine.zero_optimization_stage())
        if not engine._get_all_ckpt_names(load_dir, tag):
            raise CheckpointError(f"{folder} has no *model_states.pt, so there is no finished checkpoint in it.")
        if not partitioned:
            try:
                loaded.append(load(load_dir, tag, **kwargs))
            except Exception as error:  # torch and pickle raise almost anything here
                raise CheckpointError(f"{folder} cannot be loaded: {error}") from error

    on_all_ranks(load_own_file)
    path, client_state = load(load_dir, tag, **kwargs) if partitioned else loaded[0]
    if client_state is not None:
        client_state.pop(STAMP, None)
    return path, client_state


def _expect_stage(folder: Path, stage: int) -> None:
    """Refuse a checkpoint whose parts are those of other ZeRO stages: only stage 3 cuts the model's file."""
    cut, uncut = (any(folder.glob(f"{name}mp_rank_*_model_states.pt")) for name in ("zero_pp_rank_*_", ""))
    if cut == uncut or cut == (stage == 3):
        return
    saved = "stage 3" if cut else "a stage below 3"
    raise CheckpointError(
        f"the checkpoint {folder} was saved at ZeRO {saved}, and this job runs stage {stage}, which cannot read its "
        "parts. Resume at the stage that saved it, or begin from its weights (zero_to_fp32.py, beside the checkpoint, "
        "writes them into one file)."
    )


def load_any_layout(
    engine: Engine, load: Function, load_dir: str, tag: object, load_optimizer_states: bool = True
) -> bool:
    """Replace ``_load_zero_checkpoint``: load shards of any layout. Raises `CheckpointError` on every rank.

    Universal checkpoints, and other optimizers than ours, go DeepSpeed's way.

    Collectives: one `on_all_ranks`.
    """
    optimizer = engine.optimizer
    ours = isinstance(optimizer, WeightedZeroOptimizer)
    if not ours or engine.load_universal_checkpoint() or not load_optimizer_states:
        return bool(load(load_dir, tag, load_optimizer_states=load_optimizer_states))
    restored: list[Any] = []

    def read() -> None:
        paths = _shard_paths(engine, load_dir, tag)
        read_file = engine.checkpoint_engine.load
        restored.append(optimizer.read_checkpoint(lambda i: read_shard(read_file, paths[i]), len(paths)))

    on_all_ranks(read)
    groups, state = restored[0]
    optimizer.restore(groups, state, load_from_fp32_weights=engine.zero_load_from_fp32_weights())
    return True


def _shard_paths(engine: Engine, load_dir: str, tag: object) -> list[str]:
    """List the files of the ranks that saved; their number is known from the model's file."""
    own = engine.bfloat16_enabled()
    by_type = [engine._get_all_zero_checkpoint_names(load_dir, tag, bf16_mode) for bf16_mode in (own, not own)]
    shards = max(by_type, key=lambda paths: sum(os.path.exists(path) for path in paths))
    if missing := [path for path in shards if not os.path.exists(path)]:
        raise CheckpointError(
            f"the checkpoint was saved by {len(shards)} ranks, but {len(missing)} of their files are missing: "
            f"{', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}. It is incomplete, as if ranks had "
            "died while saving it, or this rank does not see the files of the others. Load an earlier one."
        )
    return shards
