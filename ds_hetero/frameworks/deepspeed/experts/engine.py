"""Hooks of an engine whose model has experts that are divided among ranks: its reduction, step and checkpoints."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError, ConfigError
from ds_hetero.frameworks.deepspeed.experts.checkpoints import load_experts, save_experts
from ds_hetero.frameworks.deepspeed.experts.optimizer import ExpertOptimizer
from ds_hetero.frameworks.deepspeed.hook_makers import HookRow, after
from ds_hetero.frameworks.deepspeed.in_memory import read_part
from ds_hetero.frameworks.deepspeed.protocols import Content, Engine
from ds_hetero.job.manifest import Manifest
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.values.section import SECTION


@dataclass(frozen=True)
class EngineExperts:
    """The experts of one engine's model.

    Args:
        optimizer: None if the experts are frozen, or the engine has no optimizer.
    """

    engine: Engine
    parts: ExpertParts
    optimizer: ExpertOptimizer | None
    _saves: list[contextlib.ExitStack] = field(default_factory=list)  # of the running save, closed at its end

    def hooks(self) -> list[HookRow]:
        """Return the hooks of the engine's methods; they are the innermost ones."""
        rows = [
            HookRow("buffered_allreduce_fallback", self.reduce_others),
            HookRow("module_state_dict", self.read_module),
            HookRow("load_module_state_dict", self.load_module),
            HookRow("save_16bit_model", self.save_16bit),
        ]
        if self.optimizer is not None:
            rows += [
                HookRow("_take_model_step", self.take_step),
                HookRow("clip_fp32_gradients", self.optimizer.clip_without_zero),
                HookRow("zero_grad", after(self.optimizer.clear)),
            ]
        return rows

    def reduce_others(self, reduce: Function, *args: object, **kwargs: object) -> object:
        """Replace ``buffered_allreduce_fallback``, which averages the gradients of all parameters without ZeRO."""
        with self.parts.hidden():
            return reduce(*args, **kwargs)

    def read_module(self, read: Function, *args: object, **kwargs: object) -> object:
        """Replace ``module_state_dict``: read the weights, and in a save hide the experts then until its end.

        DeepSpeed reads frozen parameters once more, under names that it has noted without the experts.
        """
        weights = read(*args, **kwargs)
        for rest_of_save in self._saves:
            rest_of_save.enter_context(self.parts.hidden())
        return weights

    def load_module(self, load: Function, checkpoint: Content, **kwargs: object) -> object:
        """Replace ``load_module_state_dict``: load the model with its experts, then frozen parameters without them."""
        weights = checkpoint["module"]
        if self.engine.zero_optimization_partition_weights():
            # A rank's file has no experts; `_load_weights` reads them from that of rank 0 afterwards.
            weights = {**weights, **{name: part.parameter.detach() for name, part in self.parts.parts.items()}}
        result = load(checkpoint={**checkpoint, "module": weights, FROZEN_PARAM_FRAGMENTS: None}, **kwargs)
        if checkpoint.get(FROZEN_PARAM_FRAGMENTS) is not None:
            with self.parts.hidden():
                load(checkpoint={**checkpoint, "module": {}}, strict=False)
        return result

    def take_step(self, step: Function, *args: object, **kwargs: object) -> object:
        """Replace ``_take_model_step``: update the experts with the other parameters."""
        assert self.optimizer is not None
        self.optimizer.take()
        result = step(*args, **kwargs)
        self.optimizer.update(self.engine.was_step_applied())
        return result

    def save(self, save: Function, save_dir: str, tag: str, *args: object, **kwargs: object) -> object:
        """Replace DeepSpeed's ``save_checkpoint`` inside `save_whole`: save whole weights, and the experts' state."""
        frozen = not kwargs.get("exclude_frozen_parameters", False)
        with self.parts.gathered(frozen=frozen), contextlib.ExitStack() as rest_of_save:
            self._saves.append(rest_of_save)
            try:
                saved = save(save_dir, tag, *args, **kwargs)
            finally:
                self._saves.clear()
        if self.optimizer is not None:
            save_experts(self.engine.checkpoint_engine, Path(save_dir, tag), self.parts, self.optimizer)
        return saved

    def expect_saveable(self) -> None:
        """Refuse a checkpoint engine that writes files after the save. Raises `ConfigError` on every rank."""
        if self.engine.checkpoint_engine.is_decoupled():
            raise ConfigError(
                f'"{SECTION}.experts" saves the experts with the checkpoint, but "checkpoint" of ds_config.json has a '
                "writer that returns before the files are written. Leave it out."
            )

    def save_16bit(self, save: Function, *args: Any, **kwargs: Any) -> object:
        """Replace ``save_16bit_model``: save all weights with whole experts.

        Under ZeRO-3 DeepSpeed gathers the weights that it has partitioned; here the writer adds the experts to them.
        """
        given = inspect.signature(save).bind(*args, **kwargs).arguments
        frozen = not given.get("exclude_frozen_parameters", False)
        if not self.engine.zero_optimization_partition_weights():
            with self.parts.gathered(frozen=frozen):
                return save(*args, **kwargs)
        experts = dict(self.parts.whole_weights(frozen=frozen))
        writer: Any = self.engine.checkpoint_engine
        write = writer.save
        writer.save = lambda weights, path: write({**weights, **experts}, path)
        try:
            with self.parts.hidden():
                return save(*args, **kwargs)
        finally:
            del writer.save

    def load(self, folder: Path, manifest: Manifest | None, *, only_weights: bool) -> None:
        """Load the experts' state after DeepSpeed has loaded the rest. Raises `CheckpointError` on every rank."""
        if self.engine.zero_optimization_partition_weights():
            on_all_ranks(lambda: self._load_weights(folder))
        if self.optimizer is not None:
            load_experts(folder, manifest, self.parts, self.optimizer, with_state=not only_weights)

    @torch.no_grad()
    def _load_weights(self, folder: Path) -> None:
        """Load this rank's experts from the model's file of rank 0, which alone has them under ZeRO-3.

        Raises:
            CheckpointError: they are not there, as in a checkpoint of a job without the key.
        """
        file = self.engine._get_ckpt_name(str(folder.parent), folder.name, pp_placeholder="0")
        saved = read_part(file)["module"]
        for name, part in self.parts.parts.items():
            whole = saved.get(name)
            if whole is None and not part.parameter.requires_grad:
                continue  # saved with ``exclude_frozen_parameters``
            if whole is None or whole.shape != part.whole_shape:
                raise CheckpointError(
                    f"{folder} has no experts {name} of shape {tuple(part.whole_shape)}: it was saved without "
                    '"experts", or from another model. Load it as it was saved, or leave the key out.'
                )
            part.parameter.copy_(part.cut(whole, self.parts.rank))


def move_alike(engine: Any, parts: ExpertParts) -> None:
    """Move the experts to where DeepSpeed has moved the other parameters, and cast them as it casts these."""
    experts = [part.parameter for part in parts.parts.values()]
    ids = set(map(id, experts))
    moved = next(parameter for parameter in engine.module.parameters() if id(parameter) not in ids)
    for expert in experts:
        is_cast = engine.bfloat16_enabled() and expert.is_floating_point()
        expert.data = expert.data.to(moved.device, torch.bfloat16 if is_cast else expert.dtype)
    for module in parts.modules:
        constants = getattr(module, "quant_state", None)  # of experts that bitsandbytes has packed
        if constants is not None:
            constants.to(moved.device)
