"""Save the random states of all ranks in a checkpoint, so that a resumed run draws the numbers of an unbroken one.

DeepSpeed does not save them. They are restored only on as many ranks as saved them, since each rank draws its own
numbers for dropout and shuffling.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_hetero.frameworks.deepspeed.protocols import CheckpointEngine, State
from ds_hetero.job.manifest import Manifest
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.random_states import process_states, set_process_states

logger = logging.getLogger(__name__)

_FILE_NAME = "ds_hetero_random_states_{}.pt"


def save_random_states(writer: CheckpointEngine, folder: Path) -> None:
    """Write this rank's random states into a file of the checkpoint ``folder``."""
    device = get_accelerator()
    states = {"process": process_states(), "device": None if device.device_name() == "cpu" else device.get_rng_state()}
    writer.save(states, str(folder / _FILE_NAME.format(dist.get_rank())))


def restore_random_states(folder: Path, manifest: Manifest) -> None:
    """Restore this rank's random states from a checkpoint, or warn on rank 0 that another number of ranks saved it.

    Collectives: one `on_all_ranks`, if the numbers of ranks agree.
    """
    prefix = _FILE_NAME.partition("{")[0]
    num_saved = sum(name.startswith(prefix) for name in manifest.parts)
    num_ranks = dist.get_world_size()
    if num_saved != num_ranks:
        if dist.get_rank() == 0:
            logger.warning(
                "the checkpoint %s has the random states of %d ranks, but this job has %d ranks: dropout and shuffling "
                "draw other random numbers than an unbroken run would",
                folder,
                num_saved,
                num_ranks,
            )
        return
    states: list[State] = []
    path = folder / _FILE_NAME.format(dist.get_rank())
    on_all_ranks(lambda: states.append(torch.load(path, map_location="cpu", weights_only=False)))
    set_process_states(states[0]["process"])
    if states[0]["device"] is not None and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states[0]["device"])
