"""Checkpoints of an engine: `latest` names finished ones only, and parts of any layout can be loaded.

Everything goes through DeepSpeed's own files and methods. A rank that finds a fault in a checkpoint tells all others,
so that every rank refuses it with the same message and none waits for ever.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.errors import CheckpointError
from ds_hetero.integrations.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.integrations.deepspeed.zero.stage12_checkpoint import read_shard
from ds_hetero.runtime.collectives import on_all_ranks

__all__ = ["PRIVATE_NAMES", "guard_checkpoints"]

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


def guard_checkpoints(engine: Any) -> None:
    """Replace the methods of ``engine`` that write and read checkpoints by those that the module promises."""
    engine.save_checkpoint = _saving(engine, engine.save_checkpoint)
    engine._load_checkpoint = _loading(engine, engine._load_checkpoint)
    if isinstance(engine.optimizer, WeightedZeroOptimizer):
        engine._load_zero_checkpoint = _loading_zero(engine, engine._load_zero_checkpoint)


def _saving(engine: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's rank 0 writes `latest` when it has saved its own part; here, when all ranks have saved theirs."""

    @functools.wraps(stock)
    def save_checkpoint(
        save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True, **kwargs: Any
    ) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        if engine.checkpoint_engine.is_decoupled():  # it writes later, and then `latest` as well
            return stock(save_dir, tag, client_state or {}, save_latest, **kwargs)
        saved = stock(save_dir, tag, client_state or {}, save_latest=False, **kwargs)  # ends with a barrier
        if save_latest and dist.get_rank() == 0:
            _write_whole(Path(save_dir, "latest"), tag)
        dist.barrier()
        return saved

    return save_checkpoint


def _write_whole(path: Path, text: str) -> None:
    """Replace a file such that whoever reads it finds the old content or the new one, whatever happens."""
    draft = path.with_name(f"{path.name}.new")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _loading(engine: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """As DeepSpeed, which loads the model here; faults of its file are reported by all ranks."""

    @functools.wraps(stock)
    def _load_checkpoint(load_dir: str, tag: Any, **kwargs: Any) -> Any:
        folder, loaded = Path(load_dir, str(tag)), None

        def load() -> None:
            nonlocal loaded
            if not engine._get_all_ckpt_names(load_dir, tag):
                raise CheckpointError(f"{folder} has no *model_states.pt, so there is no finished checkpoint in it.")
            if not partitioned:
                try:
                    loaded = stock(load_dir, tag, **kwargs)
                except Exception as error:  # torch and pickle raise almost anything here
                    raise CheckpointError(f"{folder} cannot be loaded: {error}") from error

        partitioned = engine.zero_optimization_partition_weights()  # then the ranks speak while they load
        on_all_ranks(load)
        return stock(load_dir, tag, **kwargs) if partitioned else loaded

    return _load_checkpoint


def _loading_zero(engine: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Optimizer state from shards of any layout and number; universal checkpoints go DeepSpeed's way."""

    @functools.wraps(stock)
    def _load_zero_checkpoint(load_dir: str, tag: Any, load_optimizer_states: bool = True) -> bool:
        if engine.load_universal_checkpoint() or not load_optimizer_states:
            done: bool = stock(load_dir, tag, load_optimizer_states=load_optimizer_states)
            return done
        restored: Any = None

        def read() -> None:
            nonlocal restored
            paths = _shard_paths(engine, load_dir, tag)
            load = engine.checkpoint_engine.load
            restored = engine.optimizer.read_checkpoint(lambda i: read_shard(load, paths[i]), len(paths))

        on_all_ranks(read)
        groups, state = restored
        engine.optimizer.restore(groups, state, load_from_fp32_weights=engine.zero_load_from_fp32_weights())
        return True

    return _load_zero_checkpoint


def _shard_paths(engine: Any, load_dir: str, tag: Any) -> list[str]:
    """Where the ranks that saved have put their parts; the number of ranks is known from the model's file."""
    own: bool = engine.bfloat16_enabled()
    of_types = [engine._get_all_zero_checkpoint_names(load_dir, tag, bf16_mode) for bf16_mode in (own, not own)]
    found: list[str] = max(of_types, key=lambda paths: sum(os.path.exists(path) for path in paths))
    if missing := [path for path in found if not os.path.exists(path)]:
        raise CheckpointError(
            f"the checkpoint was saved by {len(found)} ranks, but {len(missing)} of their files are missing: "
            f"{', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}. It is incomplete, as if ranks had "
            "died while saving it, or this rank does not see the files of the others. Load an earlier one."
        )
    return found
