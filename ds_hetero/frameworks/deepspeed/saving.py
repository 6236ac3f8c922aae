"""Saving an engine's checkpoint: beside its folder, with a manifest, and one error on all ranks if any cannot write.

DeepSpeed writes its own files by its own methods. A rank that cannot write keeps its error back until all ranks have
done their part of the collectives that saving consists of; then all raise it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.common.reading import write_whole
from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.in_memory import PartTaker, standing_in
from ds_hetero.frameworks.deepspeed.protocols import CheckpointEngine, Content, Engine
from ds_hetero.frameworks.deepspeed.random_states import save_random_states
from ds_hetero.job.checkpoints import DRAFT, begin, discard, draft_of, publish, why_not_written
from ds_hetero.job.manifest import MANIFEST, Manifest, SavedFile, seal_part
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.values.plans import Plan

STAMP = "ds_hetero_save"  # in every part: the step and the save that it is of
_OF_DEEPSPEED = "ds_version"  # in the files of models and optimizers, not in those of single experts


def save_whole(
    engine: Engine,
    save: Function,
    changed_plan: Plan | None,
    save_dir: str,
    tag: object = None,
    client_state: object = None,
    save_latest: bool = True,
    **kwargs: object,
) -> object:
    """Around ``save_checkpoint``: write beside the folder, and move it there when all ranks have written their parts.

    Args:
        changed_plan: what re-planning has given the job; None while it runs what it began with.
        save_dir: as of the method, and so the other arguments.

    Collectives: five `on_all_ranks`.

    Raises:
        CheckpointError: a rank cannot write; the same on every rank. The checkpoint of before is as it was.
    """
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if engine.checkpoint_engine.is_decoupled():  # it writes later, and then ``latest`` as well
        return save(save_dir, tag, client_state or {}, save_latest, **kwargs)
    folder, rank = Path(save_dir, tag), dist.get_rank()
    save_id = _agree_to_begin(folder, tag)
    writer = _PartWriter(engine.checkpoint_engine, draft_of(folder), {"step": engine.global_steps, "save_id": save_id})
    with standing_in(engine, writer):
        draft_tag = os.path.normpath(tag) + DRAFT
        saved = save(save_dir, draft_tag, client_state or {}, save_latest=False, **kwargs)
        save_random_states(engine.checkpoint_engine, draft_of(folder))
    manifest = Manifest(
        step=engine.global_steps,
        save_id=save_id,
        parts=_agree_on_parts(engine, folder, writer),
        plan=None if changed_plan is None else changed_plan.to_dict(),
    )
    on_all_ranks(lambda: _publish(folder, manifest) if rank == 0 else None)
    on_all_ranks(lambda: _publish_on_node(engine, folder, manifest))
    if save_latest:
        on_all_ranks(lambda: _write_latest(Path(save_dir), tag) if rank == 0 else None)
    return saved


def _agree_to_begin(folder: Path, tag: str) -> str:
    """Make the draft on rank 0; return the name of this save."""

    def begin_on_rank_0() -> tuple[str, str]:
        if dist.get_rank() == 0:
            with _naming(folder):
                begin(folder)
        return tag, secrets.token_hex(8)

    begun = on_all_ranks(begin_on_rank_0)
    if len({of_rank for of_rank, _ in begun}) > 1:
        tags = ", ".join(f"{of_rank!r} on rank {rank}" for rank, (of_rank, _) in enumerate(begun))
        raise CheckpointError(f"the ranks save under different tags: {tags}. Give all of them the same.")
    return begun[0][1]


class _PartWriter:
    """Stands in for DeepSpeed's checkpoint engine while a checkpoint is saved.

    Args:
        stamp: put into every part.
    """

    def __init__(self, stock: CheckpointEngine, draft: Path, stamp: Content) -> None:
        self._stock, self._draft, self._stamp = stock, draft, stamp
        self.parts: dict[str, SavedFile] = {}  # what has been written, by name
        self.fault: str | None = None  # why this rank has stopped writing; None as long as it has not

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def save(self, state_dict: object, path: str) -> None:
        """Write a part; keep back what fails."""
        if isinstance(state_dict, dict) and _OF_DEEPSPEED in state_dict:
            state_dict = {**state_dict, STAMP: self._stamp}

        def write() -> None:
            self._stock.save(state_dict, path)
            self.parts[os.path.relpath(path, self._draft)] = seal_part(Path(path))

        self.attempt(write, path)

    def attempt(self, write: Callable[[], None], path: str) -> None:
        """Run ``write`` unless this rank has failed before, and keep back why it fails."""
        if self.fault is not None:
            return
        try:
            write()
        except Exception as error:  # torch and pickle raise almost anything here
            self.fault = f"{path} cannot be written: {why_not_written(Path(path), error)}"


def copy_script_last(engine: Engine, copy: Callable[[str], None], save_path: str) -> None:
    """Around ``_copy_recovery_script``: keep back what fails, as with the parts; nothing in memory."""
    writer = engine.checkpoint_engine
    if isinstance(writer, _PartWriter):
        writer.attempt(lambda: copy(save_path), save_path)
    elif not isinstance(writer, PartTaker):
        copy(save_path)


def _agree_on_parts(engine: Engine, folder: Path, writer: _PartWriter) -> dict[str, SavedFile]:
    """Return the parts of all ranks, this rank's last; raise on every rank if any could not write its own."""
    written = on_all_ranks(lambda: (writer.parts, writer.fault))
    faults = [f"on rank {rank}, {fault}" for rank, (_, fault) in enumerate(written) if fault is not None]
    if faults:
        on_all_ranks(lambda: discard(folder) if engine.local_rank == 0 else None)
        raise CheckpointError(
            f"the checkpoint cannot be saved: {'; '.join(faults)}. What was written of it is deleted, and the "
            "checkpoints of before are as they were."
        )
    return {name: part for parts, _ in written for name, part in parts.items()} | writer.parts


def _publish(folder: Path, manifest: Manifest) -> None:
    with _naming(folder):
        _finish(folder, manifest)


def _finish(folder: Path, manifest: Manifest) -> None:
    write_whole(draft_of(folder) / MANIFEST, manifest.to_json(), durable=True)
    publish(folder)


def _publish_on_node(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Publish a checkpoint as rank 0 does, on a node that does not share rank 0's disk."""
    if dist.get_rank() > 0 and engine.local_rank == 0 and draft_of(folder).is_dir():
        # A shared disk may show for a while what rank 0 has renamed.
        with _naming(folder), contextlib.suppress(FileNotFoundError):
            _finish(folder, manifest)


def _write_latest(save_dir: Path, tag: str) -> None:
    with _naming(save_dir / tag):
        write_whole(save_dir / "latest", tag, durable=True)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raise what the file system refuses as a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be saved: {error}. The checkpoint that `latest` names is as it was."
        ) from error
