"""Load an engine's checkpoint: check that its files are complete and of the same save, and load any layout of shards.

DeepSpeed's methods read the files; the functions here are hooks around these methods, see `hook_table`. A fault
of a checkpoint is raised on every rank, with the same message.
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
    """Check that all files of a checkpoint are undamaged and of the same save; return its manifest.

    Args:
        with_optimizer: whether to check the files with optimizer state, too.

    Returns:
        None if the checkpoint has no manifest, so that nothing could be checked, or is a universal one.

    Collectives: two `on_all_ranks`; none for universal checkpoints.

    Raises:
        CheckpointError: on every rank: files are missing, damaged or of other saves.
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
        names_of_this_rank = names[dist.get_rank() :: dist.get_world_size()]
        faults = changed_parts(folder, manifest, names_of_this_rank)
        faults = {name: _other_save_text(folder / name, manifest) or fault for name, fault in faults.items()}
        return _Save(manifest.save_id, manifest.step), faults

    by_rank = on_all_ranks(examine)
    _expect_same_save(folder, [save for save, _ in by_rank])
    faults: dict[str, str] = {}  # of all files, by name
    for _, faults_of_rank in by_rank:
        faults |= faults_of_rank
    manifest = manifests[0]
    if manifest is not None and faults:
        listed = "; ".join(f"{name} {fault}" for name, fault in sorted(faults.items()))
        raise CheckpointError(
            f"the checkpoint {folder} is of step {manifest.step}, but {listed}. Put the files of one save "
            "together, or load an earlier checkpoint."
        )
    if manifest is None and dist.get_rank() == 0:
        logger.warning(
            "the checkpoint %s has no manifest, since stock DeepSpeed or an earlier version of ds_hetero saved it: "
            "whether its files are undamaged and of one save is not checked",
            folder,
        )
    return manifest


class _Save(NamedTuple):
    """What identifies a save in its manifest."""

    save_id: str  # random name of the save
    step: int  # optimizer steps done


def _recover(folder: Path) -> None:
    """Finish a save that was interrupted while its folder was renamed. Raises `CheckpointError`: a rename fails."""
    try:
        recover(folder)
    except OSError as error:
        raise CheckpointError(
            f"the last save of {folder} was interrupted between two renames, and finishing it fails: {error}. Make the "
            "folder writable, or load another checkpoint."
        ) from error


def _expect_same_save(folder: Path, saves: Sequence[_Save | None]) -> None:
    """Check that all ranks see the same save; folders on disks of several nodes may differ. Raises `CheckpointError`.

    Args:
        saves: the save that each rank sees.
    """
    if len(set(saves)) > 1:
        listed = "; ".join(
            f"rank {rank}: {'no manifest' if save is None else f'step {save.step}'}" for rank, save in enumerate(saves)
        )
        raise CheckpointError(
            f"the ranks see different saves in {folder} ({listed}). Copy the files of one save to the disk of every "
            "node."
        )


def _other_save_text(file: Path, manifest: Manifest) -> str | None:
    """Return the end of a sentence that says which save a file is of, if it is not the manifest's save.

    None if the file is of the manifest's save, or cannot be read.
    """
    try:
        content = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
    except Exception:  # torch.load raises almost anything for damaged files
        return None
    stamp = content.get(STAMP, {}) if isinstance(content, dict) else {}
    if stamp.get("save_id") == manifest.save_id:
        return None
    step = stamp.get("step", content.get("global_steps") if isinstance(content, dict) else None)
    return "is of another save" if step is None else f"is of another save, of step {step}"


def raise_on_all_ranks(engine: Engine, load: Function, load_dir: str, tag: object, **kwargs: object) -> object:
    """Replace ``_load_checkpoint``: load, or raise `CheckpointError` on all ranks if any rank cannot load.

    Collectives: one `on_all_ranks`.
    """
    folder = Path(load_dir, str(tag))
    # ZeRO-3: ranks exchange messages while they load, so the load cannot run inside `on_all_ranks`, whose failing rank
    # would leave the others waiting in these messages. `Stage3Checkpoints.examine` has read all files before.
    is_partitioned = engine.zero_optimization_partition_weights()
    results: list[Any] = []

    def load_own_file() -> None:
        if not engine.load_universal_checkpoint():
            _expect_stage(folder, engine.zero_optimization_stage())
        if not engine._get_all_ckpt_names(load_dir, tag):
            raise CheckpointError(
                f"{folder} has no *model_states.pt, so there is no finished checkpoint in it. Load an earlier one."
            )
        if not is_partitioned:
            try:
                results.append(load(load_dir, tag, **kwargs))
            except Exception as error:  # torch and pickle raise almost anything here
                raise CheckpointError(f"{folder} cannot be loaded: {error}") from error

    on_all_ranks(load_own_file)
    path, client_state = load(load_dir, tag, **kwargs) if is_partitioned else results[0]
    if client_state is not None:
        client_state.pop(STAMP, None)
    return path, client_state


def _expect_stage(folder: Path, stage: int) -> None:
    """Check that a checkpoint's files are those of this ZeRO stage. Raises `CheckpointError`: they are not.

    Stage 3 saves a model file for each rank; other stages save one model file.
    """
    has_rank_files = any(folder.glob("zero_pp_rank_*_mp_rank_*_model_states.pt"))
    has_model_file = any(folder.glob("mp_rank_*_model_states.pt"))
    if has_rank_files == has_model_file or has_rank_files == (stage == 3):
        return
    saved_stage = "stage 3" if has_rank_files else "a stage below 3"
    raise CheckpointError(
        f"the checkpoint {folder} was saved at ZeRO {saved_stage}, and this job runs stage {stage}, which cannot read "
        "its files. Resume at the stage that saved it, or begin from its weights (zero_to_fp32.py, in the folder above "
        "the checkpoint, writes them into one file)."
    )


def load_any_layout(
    engine: Engine, load: Function, load_dir: str, tag: object, load_optimizer_states: bool = True
) -> bool:
    """Replace ``_load_zero_checkpoint``: load shards of any layout into a `WeightedZeroOptimizer`.

    For universal checkpoints, and for other optimizers, DeepSpeed's method is called.

    Collectives: one `on_all_ranks`.

    Raises:
        CheckpointError: on every rank: shards are missing or damaged, or have other parameters.
    """
    optimizer = engine.optimizer
    is_weighted = isinstance(optimizer, WeightedZeroOptimizer)
    if not is_weighted or engine.load_universal_checkpoint() or not load_optimizer_states:
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
    """Return the paths of the shards of all ranks that saved. Raises `CheckpointError`: some are missing.

    DeepSpeed reads the number of shards from the model's file. The names of their files depend on whether the saving
    job trained in bf16.
    """
    trains_in_bf16 = engine.bfloat16_enabled()
    candidates = []
    for bf16_mode in (trains_in_bf16, not trains_in_bf16):
        candidates.append(engine._get_all_zero_checkpoint_names(load_dir, tag, bf16_mode))
    shards = max(candidates, key=lambda paths: sum(os.path.exists(path) for path in paths))
    if missing := [path for path in shards if not os.path.exists(path)]:
        raise CheckpointError(
            f"the checkpoint was saved by {len(shards)} ranks, but {len(missing)} of their files are missing: "
            f"{', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}. Either ranks died while saving it, or "
            "this rank does not see the files of the others. Load an earlier checkpoint, or copy the files there."
        )
    return shards
