"""Checkpoints of an engine: `latest` names finished ones only, and parts of any layout can be loaded.

Everything goes through DeepSpeed's own files and methods. The functions here run around methods of the engine, see
`hooks.HOOKS`. A fault in a checkpoint is raised on every rank with the same message.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.errors import CheckpointError
from ds_hetero.integrations.deepspeed.protocols import Engine
from ds_hetero.integrations.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.integrations.deepspeed.zero.stage12_checkpoint import read_shard
from ds_hetero.runtime.collectives import on_all_ranks

__all__ = ["PRIVATE_NAMES", "load_any_layout", "raise_on_all_ranks", "write_latest_last"]

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PRIVATE_NAMES = (
    f"{_ENGINE}.save_checkpoint",
    f"{_ENGINE}.load_checkpoint",
    f"{_ENGINE}._load_checkpoint",
    f"{_ENGINE}._load_zero_checkpoint",
    f"{_ENGINE}._get_all_ckpt_names",
    f"{_ENGINE}._get_all_zero_checkpoint_names",
    f"{_ENGINE}.bfloat16_enabled",
    f"{_ENGINE}.load_universal_checkpoint",
    f"{_ENGINE}.zero_optimization_partition_weights",
    f"{_ENGINE}.zero_load_from_fp32_weights",
)


def write_latest_last(
    engine: Engine,
    save: Callable[..., Any],
    save_dir: str,
    tag: Any = None,
    client_state: Any = None,
    save_latest: bool = True,
    **kwargs: Any,
) -> Any:
    """Around ``save_checkpoint``: write the file ``latest`` when all ranks have saved their parts.

    DeepSpeed's rank 0 writes it as soon as it has saved its own part.

    Collectives: one `on_all_ranks` and one barrier.

    Raises:
        CheckpointError: a rank cannot write into the folder; the same on every rank, before anything is saved.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    on_all_ranks(lambda: _expect_writable(Path(save_dir, tag)))
    if engine.checkpoint_engine.is_decoupled():  # it writes later, and then `latest` as well
        return save(save_dir, tag, client_state or {}, save_latest, **kwargs)
    saved = save(save_dir, tag, client_state or {}, save_latest=False, **kwargs)  # ends with a barrier
    if save_latest and dist.get_rank() == 0:
        _write_whole(Path(save_dir, "latest"), tag)
    dist.barrier()
    return saved


def raise_on_all_ranks(engine: Engine, load: Callable[..., Any], load_dir: str, tag: Any, **kwargs: Any) -> Any:
    """Around ``_load_checkpoint``, which loads the model: raise on every rank if any rank cannot load its file.

    Collectives: one `on_all_ranks`.

    Raises:
        CheckpointError: the checkpoint is unfinished, or a file cannot be loaded; the same on every rank.
    """
    folder = Path(load_dir, str(tag))
    partitioned = engine.zero_optimization_partition_weights()  # then the ranks exchange messages while they load
    loaded: list[Any] = []

    def load_own_file() -> None:
        if not engine._get_all_ckpt_names(load_dir, tag):
            raise CheckpointError(f"{folder} has no *model_states.pt, so there is no finished checkpoint in it.")
        if not partitioned:
            try:
                loaded.append(load(load_dir, tag, **kwargs))
            except Exception as error:  # torch and pickle raise almost anything here
                raise CheckpointError(f"{folder} cannot be loaded: {error}") from error

    on_all_ranks(load_own_file)
    return load(load_dir, tag, **kwargs) if partitioned else loaded[0]


def load_any_layout(
    engine: Engine, load: Callable[..., Any], load_dir: str, tag: Any, load_optimizer_states: bool = True
) -> bool:
    """Around ``_load_zero_checkpoint`` of stages 1 and 2: take the state from shards of any layout and number.

    Universal checkpoints, and other optimizers than ours, go DeepSpeed's way.

    Collectives: one `on_all_ranks`.

    Raises:
        CheckpointError: shards are missing, damaged or of another model; the same on every rank.
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


def _shard_paths(engine: Engine, load_dir: str, tag: Any) -> list[str]:
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


def _expect_writable(folder: Path) -> None:
    """Write a little into the folder of a checkpoint: most of what fails there fails before a rank waits for others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be saved, since {folder} cannot be written to: {error}. Nothing was saved; the "
            "checkpoint that `latest` names is as it was."
        ) from error


def _write_whole(path: Path, text: str) -> None:
    """Replace a file such that a reader gets the old content or the new one, whatever happens."""
    draft = path.with_name(f"{path.name}.new")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
