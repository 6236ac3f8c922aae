"""Save and load the optimizer state of experts that are divided among ranks, under any division.

The model's file has whole experts, as that of one process (`ExpertParts.gathered`). Each rank writes a file with the
masters and the optimizer state of its experts, and their numbers in the layer. Whoever loads reads the rows of its own
experts from the files that have them, so a checkpoint loads under other shares and on other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.experts.optimizer import ExpertOptimizer
from ds_hetero.frameworks.deepspeed.protocols import CheckpointEngine, Content, State
from ds_hetero.job.manifest import Manifest
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.experts.parts import ExpertPart, ExpertParts

_FILE_NAME = "ds_hetero_experts_{:05}.pt"
_VALUE = "value"  # key of the masters, beside the keys of the optimizer's state


def save_experts(writer: CheckpointEngine, folder: Path, parts: ExpertParts, experts: ExpertOptimizer) -> None:
    """Write this rank's file into the checkpoint ``folder``, on the ranks of rank 0's replica; others have the same."""
    if not parts.are_saved:
        return
    rows: dict[str, State] = {}
    for name, part in parts.trained.items():
        start, stop = part.experts.ranges[parts.rank]
        owned = experts.owned[name]
        state = {}
        for key, value in {_VALUE: owned.detach(), **experts.inner.state.get(owned, {})}.items():
            is_by_element = isinstance(value, Tensor) and value.dim() > 0 and value.shape == owned.shape
            state[key] = part.by_expert(value, stop - start) if is_by_element else value
        rows[name] = {"start": start, "stop": stop, "total": part.experts.total, "state": state}
    writer.save({"rows": rows}, str(folder / _FILE_NAME.format(dist.get_rank())))


def load_experts(
    folder: Path, manifest: Manifest | None, parts: ExpertParts, experts: ExpertOptimizer, *, with_state: bool
) -> None:
    """Load masters and optimizer state of this rank's experts; the model's weights are loaded before.

    Args:
        with_state: False to load only the weights: masters are then copied from them.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        CheckpointError: on every rank: files are missing, or lack experts of this model.
    """
    if not with_state:
        experts.copy_from_model()
        experts.inner.state.clear()
        return

    def read() -> None:
        files = _files_of(folder, manifest)
        states = {name: _read_rows(name, part, parts.rank, files, folder) for name, part in parts.trained.items()}
        with torch.no_grad():
            for name, owned in experts.owned.items():
                owned.copy_(states[name].pop(_VALUE))
        experts.load_inner(states)

    on_all_ranks(read)
    experts.copy_to_model()


def _files_of(folder: Path, manifest: Manifest | None) -> list[Content]:
    """Return the contents of all ranks' files. Raises `CheckpointError`: there are none, or one cannot be read."""
    prefix = _FILE_NAME.partition("{")[0]
    names = sorted(name for name in (manifest.parts if manifest is not None else ()) if name.startswith(prefix))
    if not names:
        raise CheckpointError(
            f"the checkpoint {folder} has no optimizer state of experts that were divided among ranks: it was saved "
            'without "experts". Load its weights alone (load_optimizer_states=False), or leave the key out.'
        )
    try:
        return [torch.load(folder / name, map_location="cpu", weights_only=False, mmap=True) for name in names]
    except Exception as error:  # torch and pickle raise almost anything here
        raise CheckpointError(f"{folder} has experts that cannot be read: {error}") from error


def _read_rows(name: str, part: ExpertPart, rank: int, files: Sequence[Content], folder: Path) -> State:
    """Return the state of this rank's experts of one parameter, from the files that have them.

    Raises:
        CheckpointError: some of the experts are in no file.
    """
    start, stop = part.experts.ranges[rank]
    pieces: list[tuple[int, State]] = []  # first expert of each piece, and its state
    result: State = {}  # at first the entries that are not by expert, such as the count of steps
    num_found = 0
    for file in files:
        rows = file["rows"].get(name)
        if rows is None or rows["total"] != part.experts.total:
            raise CheckpointError(
                f"{folder} has no experts {name} of which a layer has {part.experts.total}. Load the checkpoint of "
                "this model."
            )
        result |= {key: value for key, value in rows["state"].items() if not _is_by_expert(value, rows)}
        first, last = max(start, rows["start"]), min(stop, rows["stop"])
        if first < last:
            num_found += last - first
            cut = slice(first - rows["start"], last - rows["start"])
            pieces.append((first, _of_experts(rows, cut)))
    if num_found != stop - start:
        raise CheckpointError(f"{folder} lacks some of the experts {start} to {stop} of {name}. Load an earlier one.")
    if not pieces:  # a rank without experts has the same entries as others, without rows
        no_rows = _of_experts(files[0]["rows"][name], slice(0))
        return {**result, **{key: part.from_experts(value) for key, value in no_rows.items()}}
    in_order = [state for _, state in sorted(pieces, key=lambda piece: piece[0])]
    for key in in_order[0]:
        result[key] = part.from_experts(torch.cat([state[key] for state in in_order]))
    return result


def _of_experts(rows: Content, cut: slice) -> State:
    """Return the entries of a file's state that are by expert, of the experts in ``cut``, counted from its first."""
    return {key: value[cut] for key, value in rows["state"].items() if _is_by_expert(value, rows)}


def _is_by_expert(value: Any, rows: Content) -> bool:
    """Whether an entry of a state has one part for each expert of the file."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == rows["stop"] - rows["start"]
