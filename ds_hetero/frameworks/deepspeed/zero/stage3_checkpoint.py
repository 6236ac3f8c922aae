"""Checkpoints of ZeRO-3 that outlive the cut: any number of ranks may load them, with any weights or none.

On disk they are always DeepSpeed's own, of as many ranks as saved them, with shards of one size. So DeepSpeed itself
resumes from them on that many ranks, and its ``zero_to_fp32.py`` and ``ds_to_universal`` convert them. Weighted shards
are exchanged for equal ones while saving, `equal_shards`; a rank that loads reads what it owns from the files that have
it, `stage3_saved`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import Engine, State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.stage3_saved import (
    Saved,
    examine_files,
    expect_same_parameters,
    own_frozen_shards,
    own_state,
)
from ds_hetero.frameworks.deepspeed.zero.stage3_shards import cut_of, is_weighted, parameter_moves
from ds_hetero.sharding.zero_partition import cut_as_deepspeed

CHUNK_ELEMENTS = 1 << 26  # of all ranks together, per exchange: bounds the buffers on the device


def equal_shards(flat: Tensor, params: Sequence[ZeroParameter], name: str = "weights") -> Tensor:
    """Exchange weighted shards of parameters, lying side by side, for shards of one size, on the CPU.

        flat     [sum of s]
        result   [sum of ceil(n / ranks)], the ends padded with zeros

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all per `CHUNK_ELEMENTS` elements of parameters, or per larger parameter.

    Args:
        flat: a value for each element of the shards.
        name: of what is exchanged, for the error.

    Raises:
        CheckpointError: ``flat`` is no such thing, as with optimizers that quantize their state by blocks.
    """
    group = params[0].ds_process_group
    rank = dist.get_rank(group=group)
    sizes = [cut_of(param).sizes[rank] for param in params]
    if flat.numel() != sum(sizes):
        raise CheckpointError(
            f'the optimizer\'s "{name}" has {flat.numel()} values for {sum(sizes)} elements of parameters, so its '
            'shards cannot be exchanged. Use another optimizer, or set "zero_partition": "uniform".'
        )
    shards = list(torch.split(flat.reshape(-1), sizes))
    done, first, elements = [], 0, 0
    for i, param in enumerate(params):
        elements += param.ds_numel
        if elements >= CHUNK_ELEMENTS or i == len(params) - 1:
            done += _exchange(shards[first : i + 1], params[first : i + 1], group)
            first, elements = i + 1, 0
    return torch.cat(done)


def _exchange(shards: Sequence[Tensor], params: Sequence[ZeroParameter], group: ProcessGroup) -> list[Tensor]:
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    equal = [cut_as_deepspeed(param.ds_numel, num_ranks) for param in params]
    # By owner of an equal shard, then by parameter: what each rank sends there.
    table = [
        [parameter_moves(param.ds_numel, cut_of(param), cut, owner) for param, cut in zip(params, equal, strict=True)]
        for owner in range(num_ranks)
    ]
    send = [
        [
            shard[move.in_source : move.in_source + move.count]
            for shard, moves in zip(shards, of_owner, strict=True)
            for move in moves
            if move.source == rank
        ]
        for of_owner in table
    ]
    expected = [
        [(i, move) for i, moves in enumerate(table[rank]) for move in moves if move.source == source]
        for source in range(num_ranks)
    ]
    outgoing = torch.cat([part for parts in send for part in parts] or [shards[0][:0]])
    outgoing = outgoing.to(get_accelerator().current_device_name())
    to_rank = [sum(part.numel() for part in parts) for parts in send]
    from_rank = [sum(move.count for _, move in parts) for parts in expected]
    incoming = outgoing.new_empty(sum(from_rank))
    dist.all_to_all_single(incoming, outgoing, from_rank, to_rank, group=group)

    arrived, start = incoming.cpu(), 0
    done = [torch.zeros(cut.sizes[rank], dtype=arrived.dtype) for cut in equal]
    for i, move in (pair for parts in expected for pair in parts):
        done[i][move.in_target : move.in_target + move.count] = arrived[start : start + move.count]
        start += move.count
    return done


class Stage3Checkpoints:
    """Saves shards of one size and loads checkpoints of any number of ranks, for one engine of stage 3.

    Each method runs around the method of the engine that its first line names, and is given that as ``method``. Files
    and their names are DeepSpeed's; universal checkpoints stay DeepSpeed's to load.

    Args:
        engine: of stage 3, with an optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saved: Saved | None = None  # the checkpoint that is being loaded

    def equal_shard(self, method: Function, param: ZeroParameter) -> Tensor:
        """``_get_param_fragment_func``: this rank's shard of a frozen parameter, of one size on all ranks."""
        if not is_weighted(param):
            fragment: Tensor = method(param)
            return fragment
        return equal_shards(param.ds_tensor.detach(), [param])

    def examine(self, method: Function, load_dir: str, tag: str, **kwargs: object) -> object:
        """``_load_checkpoint``: look the checkpoint over before anything is taken from it.

        Raises:
            CheckpointError: files are missing or damaged, or the checkpoint is of another model; on every rank.
        """
        if self._engine.load_universal_checkpoint():
            return method(load_dir, tag, **kwargs)
        self._saved = examine_files(self._engine, load_dir, str(tag))
        with_state = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
        if with_state:
            expect_same_parameters(self._saved, self._engine)
        loaded = method(load_dir, tag, **kwargs)
        if not with_state:
            self._saved = None
        return loaded

    def list_model_files(self, method: Function, load_dir: str, tag: str) -> list[str]:
        """``_get_all_ckpt_names``: a rank that the saving job did not have reads the first file."""
        names: list[str] = method(load_dir, tag)
        return names or [self._engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")]

    def load_frozen_parameters(self, method: Function, checkpoint: State, **kwargs: object) -> object:
        """``load_module_state_dict``: this rank's file need not have the frozen shards that it owns now."""
        if self._saved is not None and checkpoint.get(FROZEN_PARAM_FRAGMENTS):
            names = set(checkpoint[FROZEN_PARAM_FRAGMENTS])
            shards = own_frozen_shards(self._saved, self._engine, names)
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: shards}
        return method(checkpoint=checkpoint, **kwargs)

    def load_state(self, method: Function, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """``_load_zero_checkpoint``: master weights and optimizer state."""
        if self._saved is None or not load_optimizer_states:
            return bool(method(load_dir, tag, load_optimizer_states=load_optimizer_states))
        optimizer, saved = self._engine.optimizer, self._saved
        self._saved = None
        rank = dist.get_rank(group=optimizer.dp_process_group)
        optimizer.load_state_dict({rank: own_state(saved, optimizer)})
        return True
