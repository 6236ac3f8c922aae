"""Save an engine's checkpoint completely or not at all.

DeepSpeed's own methods write the files into a draft folder. When all ranks have written their files, rank 0 writes a
manifest and renames the draft to the checkpoint's folder.

A rank that cannot write a file does not raise at once: saving includes collectives, in which the other ranks would
wait. The rank keeps its error, and at the end all ranks raise it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.common.atomic_writing import write_whole
from ds_hetero.common.reading import JsonObject
from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.in_memory import InMemoryCheckpointEngine, replaced_checkpoint_engine
from ds_hetero.frameworks.deepspeed.protocols import CheckpointEngine, Content, Engine
from ds_hetero.frameworks.deepspeed.random_states import save_random_states
from ds_hetero.job.checkpoints import DRAFT, begin, discard, draft_of, publish, write_failure_reason
from ds_hetero.job.manifest import MANIFEST, Manifest, SavedFile, seal_part
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.values.plans import Plan

STAMP = "ds_hetero_save"  # key in every file: the step, and the random name of this save
_DEEPSPEED_KEY = "ds_version"  # key in DeepSpeed's files of models and optimizers, not in those of single experts


def save_whole(
    engine: Engine,
    save: Function,
    changed_plan: Plan | None,
    losses: JsonObject | None,
    save_dir: str,
    tag: object = None,
    client_state: object = None,
    save_latest: bool = True,
    **kwargs: object,
) -> object:
    """Replace ``save_checkpoint``: save into a draft folder, and rename it when all ranks have written their files.

    Args:
        engine: the engine.
        save: DeepSpeed's method. The arguments after ``losses`` are the method's.
        changed_plan: the plan that re-planning has chosen; None if the job runs its first plan.
        losses: what batches have shown of the loss, see `UnlikeLosses.state_dict`; None if there is nothing to save.

    Collectives: five `on_all_ranks`.

    Raises:
        CheckpointError: on every rank: a rank cannot write. Earlier checkpoints are unchanged.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if engine.checkpoint_engine.is_decoupled():  # DeepSpeed writes the files, and ``latest``, after the method returns
        return save(save_dir, tag, client_state or {}, save_latest, **kwargs)
    folder, rank = Path(save_dir, tag), dist.get_rank()
    save_id = _agree_to_begin(folder, tag)
    writer = _PartWriter(engine.checkpoint_engine, draft_of(folder), {"step": engine.global_steps, "save_id": save_id})
    with replaced_checkpoint_engine(engine, writer):
        draft_tag = os.path.normpath(tag) + DRAFT
        saved = save(save_dir, draft_tag, client_state or {}, save_latest=False, **kwargs)
        save_random_states(engine.checkpoint_engine, draft_of(folder))
    manifest = Manifest(
        step=engine.global_steps,
        save_id=save_id,
        parts=_agree_on_parts(engine, folder, writer),
        plan=None if changed_plan is None else changed_plan.to_dict(),
        losses=losses,
    )
    on_all_ranks(lambda: _publish(folder, manifest) if rank == 0 else None)
    on_all_ranks(lambda: _publish_on_node(engine, folder, manifest))
    if save_latest:
        on_all_ranks(lambda: _write_latest(Path(save_dir), tag) if rank == 0 else None)
    return saved


def _agree_to_begin(folder: Path, tag: str) -> str:
    """Make the draft folder on rank 0; return the random name of this save. Raises `CheckpointError`: unlike tags."""

    def begin_on_rank_0() -> tuple[str, str]:
        if dist.get_rank() == 0:
            with _naming(folder):
                begin(folder)
        return tag, secrets.token_hex(8)

    by_rank = on_all_ranks(begin_on_rank_0)
    tags = [tag_of_rank for tag_of_rank, _ in by_rank]
    if len(set(tags)) > 1:
        listed = ", ".join(f"{tag_of_rank!r} on rank {rank}" for rank, tag_of_rank in enumerate(tags))
        raise CheckpointError(
            f"the ranks save under different tags: {listed}. Give save_checkpoint the same tag on all."
        )
    _, save_id = by_rank[0]
    return save_id


class _PartWriter:
    """A checkpoint engine that records size and checksum of each file, and keeps errors instead of raising them.

    Args:
        stock: DeepSpeed's checkpoint engine, which writes the files.
        draft: the draft folder.
        stamp: the value of `STAMP` in every file.

    Attributes:
        parts: the written files with their sizes and checksums, by name.
        fault: why this rank has stopped writing; None if every file was written.
    """

    def __init__(self, stock: CheckpointEngine, draft: Path, stamp: Content) -> None:
        self._stock, self._draft, self._stamp = stock, draft, stamp
        self.parts: dict[str, SavedFile] = {}
        self.fault: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def save(self, state_dict: object, path: str) -> None:
        """Write a file; if that fails, keep the reason in ``fault``."""
        if isinstance(state_dict, dict) and _DEEPSPEED_KEY in state_dict:
            state_dict = {**state_dict, STAMP: self._stamp}

        def write() -> None:
            self._stock.save(state_dict, path)
            self.parts[os.path.relpath(path, self._draft)] = seal_part(Path(path))

        self.attempt(write, path)

    def attempt(self, write: Callable[[], None], path: str) -> None:
        """Call ``write``, unless this rank has failed before; if it fails, keep the reason in ``fault``."""
        if self.fault is not None:
            return
        try:
            write()
        except Exception as error:  # torch and pickle raise almost anything here
            self.fault = f"{path} cannot be written: {write_failure_reason(Path(path), error)}"


def copy_script_last(engine: Engine, copy: Callable[[str], None], save_path: str) -> None:
    """Replace ``_copy_recovery_script``: keep an error in ``fault``; copy nothing for a checkpoint in memory."""
    writer = engine.checkpoint_engine
    if isinstance(writer, _PartWriter):
        writer.attempt(lambda: copy(save_path), save_path)
    elif not isinstance(writer, InMemoryCheckpointEngine):
        copy(save_path)


def _agree_on_parts(engine: Engine, folder: Path, writer: _PartWriter) -> dict[str, SavedFile]:
    """Return the files of all ranks, by name; this rank's entry wins if a file has been written by several ranks.

    Raises:
        CheckpointError: on every rank: a rank could not write its files. The draft is deleted.
    """
    by_rank = on_all_ranks(lambda: (writer.parts, writer.fault))
    faults = [f"on rank {rank}, {fault}" for rank, (_, fault) in enumerate(by_rank) if fault is not None]
    if faults:
        on_all_ranks(lambda: discard(folder) if engine.local_rank == 0 else None)
        raise CheckpointError(
            f"the checkpoint cannot be saved: {'; '.join(faults)}. Its files are deleted, and earlier checkpoints are "
            "unchanged."
        )
    all_parts: dict[str, SavedFile] = {}
    for parts, _ in by_rank:
        all_parts |= parts
    return all_parts | writer.parts


def _publish(folder: Path, manifest: Manifest) -> None:
    """Finish a checkpoint on rank 0. Raises `CheckpointError`: the file system refuses."""
    with _naming(folder):
        _finish(folder, manifest)


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the draft, and rename the draft to the checkpoint's folder."""
    write_whole(draft_of(folder) / MANIFEST, manifest.to_json(), durable=True)
    publish(folder)


def _publish_on_node(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Finish a checkpoint on the first rank of a node that does not share rank 0's disk, and so still has a draft."""
    if dist.get_rank() > 0 and engine.local_rank == 0 and draft_of(folder).is_dir():
        # FileNotFoundError: a shared disk may show the draft for a while after rank 0 has renamed it.
        with _naming(folder), contextlib.suppress(FileNotFoundError):
            _finish(folder, manifest)


def _write_latest(save_dir: Path, tag: str) -> None:
    """Write the file that names the newest checkpoint. Raises `CheckpointError`: the file system refuses."""
    with _naming(save_dir / tag):
        write_whole(save_dir / "latest", tag, durable=True)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Inside the context, turn an error of the file system into a `CheckpointError` that names the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be saved: {error}. The checkpoint that `latest` names is unchanged."
        ) from error
