"""Save adapters of a model that is cut into stages, in the folder that PEFT reads.

Every stage writes the adapters of its layers, and rank 0 joins them: adapter_model.safetensors and adapter_config.json,
as ``PeftModel.save_pretrained`` writes them for the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_hetero.gradient_sync.shards import full_parameter
from ds_hetero.job.weight_files import make_folder, write_weights
from ds_hetero.runtime.changed_buffers import persistent_buffers
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.packed_weights import is_packed

_WEIGHTS = "adapter_model.safetensors"
_DEFAULT = "default"  # PEFT saves the adapter of this name in the folder itself, others in folders of their names
_PREFIX = "base_model.model."  # of the names in PEFT's files, which a model without PEFT's wrapper lacks


def write_adapters(model: Any, parameters: Mapping[str, nn.Parameter], stage: int | None, folder: Path) -> None:
    """Write the adapters of all stages.

    Args:
        model: this rank's stage of a model with adapters.
        parameters: of this rank, by their names in the uncut model.
        stage: index of this rank's stage on the ranks that write, None on all other ranks. All ranks of a
            tensor-parallel stage must call, because the gather of their shards is collective.
        folder: a path that every rank can access.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`; in tensor-parallel stages an all_gather for every adapter that is sharded.

    Raises:
        CheckpointError: on every rank; a rank could not write.
    """
    state = _state_without_frozen_shards(model, parameters)
    adapters: dict[str, Any] = model.peft_config

    def write_part() -> dict[str, Path]:
        """Write this stage's part of every adapter. Returns the paths by adapter."""
        if stage is None:
            return {}
        paths = {}
        for name in adapters:
            make_folder(_folder_of(folder, name))
            paths[name] = _folder_of(folder, name) / f"{_WEIGHTS}.stage-{stage}"
            write_weights(paths[name], adapter_tensors(model, name, state))
        return paths

    paths_by_rank = on_all_ranks(write_part)

    def join() -> None:
        if dist.get_rank() != 0:
            return
        for name, config in adapters.items():
            parts = [paths[name] for paths in paths_by_rank if paths]
            write_weights(_folder_of(folder, name) / _WEIGHTS, _joined(parts))
            for path in parts:
                path.unlink()
            saved_config = copy.copy(config)
            saved_config.inference_mode = True  # as PEFT saves it
            saved_config.save_pretrained(str(_folder_of(folder, name)))

    on_all_ranks(join)


def _state_without_frozen_shards(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return whole parameters and buffers of a stage by name, without base weights that would have to be gathered."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        is_base_shard = isinstance(parameter, DTensor) and not parameter.requires_grad and ".lora_" not in name
        if not is_packed(parameter) and not is_base_shard:
            state[name] = full_parameter(parameter)
    return state | dict(persistent_buffers(model))


def adapter_tensors(model: Any, adapter: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a stage's tensors of one adapter, by the names in PEFT's files.

    Args:
        model: this rank's stage of a model with adapters.
        adapter: name of the adapter.
        state: whole parameters and buffers of the stage, by name.
    """
    from peft import PeftModel, get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, dict(state), adapter, save_embedding_layers=False)
    prefix = "" if isinstance(model, PeftModel) else _PREFIX
    return {prefix + name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _joined(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of several files."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  no mapping
    return tensors


def _folder_of(folder: Path, adapter: str) -> Path:
    """Return the folder of one adapter."""
    return folder if adapter == _DEFAULT else folder / adapter
