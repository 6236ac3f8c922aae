"""The random states of every rank in a checkpoint, so that dropout and shuffling go on as in one run.

DeepSpeed saves none. They can be put back on as many ranks as have saved them: on another number of ranks it is unknown
which of them draws what.
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
from ds_hetero.runtime.data.epochs import process_states, set_process_states

logger = logging.getLogger(__name__)

_PART = "ds_hetero_random_states_{}.pt"


def save_random_states(writer: CheckpointEngine, folder: Path) -> None:
    """Write this rank's part."""
    device = get_accelerator()
    states = {"process": process_states(), "device": None if device.device_name() == "cpu" else device.get_rng_state()}
    writer.save(states, str(folder / _PART.format(dist.get_rank())))


def restore_random_states(folder: Path, manifest: Manifest) -> None:
    """Go on with the random states of the ranks that saved a checkpoint; on another number of ranks, say that not.

    Collectives: one `on_all_ranks`, where as many ranks have saved.
    """
    num_saved, num_ranks = (
        sum(name.startswith(_PART.partition("{")[0]) for name in manifest.parts),
        dist.get_world_size(),
    )
    if num_saved != num_ranks:
        if dist.get_rank() == 0:
            logger.warning(
                "the checkpoint %s has the random states of %d ranks, and this job has %d: dropout and whatever else "
                "draws random numbers goes on with those of this job, not as in one run",
                folder,
                num_saved,
                num_ranks,
            )
        return
    states: list[State] = []
    path = folder / _PART.format(dist.get_rank())
    on_all_ranks(lambda: states.append(torch.load(path, map_location="cpu", weights_only=False)))
    set_process_states(states[0]["process"])
    if states[0]["device"] is not None and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states[0]["device"])
